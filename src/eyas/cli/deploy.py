"""`eyas deploy`: the serving command, as people deploy it."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.options import Limit, Overrides, RecipePath, read_run


def deploy(
    recipe: RecipePath,
    set_: Overrides = None,
    limit: Limit = 0,
    engine: Annotated[str, typer.Option(help="Of this engine only: sglang or vllm.", metavar="KIND")] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Write the files here too, one folder an engine, with the drafter.", metavar="DIR"),
    ] = None,
) -> None:
    """Print the command that serves the drafter, for SGLang and vLLM, with a systemd unit and a Dockerfile."""
    from eyas.engine.deploy import deployment
    from eyas.errors import RecipeError

    if engine not in ("", "sglang", "vllm"):
        raise RecipeError(f"--engine {engine}", expected="sglang or vllm; both where it is left out")
    run = read_run(recipe, set_, limit)
    for kind in ("sglang", "vllm"):
        if engine and engine != kind:
            continue
        made = deployment(run, kind)
        for name, content in made.files.items():
            print(f"# ---- {made.engine}: {name}\n{content}")
        if out is not None:
            folder = out / kind
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in made.files.items():
                (folder / name).write_text(content, encoding="utf-8")
            (folder / "serve.sh").chmod(0o755)
            shutil.copytree(made.drafter, folder / "drafter", dirs_exist_ok=True)
            print(f"# wrote {folder}")
