"""`eyas deploy`: the serving command, as people deploy it."""

from pathlib import Path
from typing import Annotated, Literal

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
    from eyas.engine.deploy import Deployment, deployment
    from eyas.errors import EngineError, EyasError, RecipeError, VerificationFailed
    from eyas.export.stage import check_served
    from eyas.progress import say

    if engine not in ("", "sglang", "vllm"):
        raise RecipeError(f"--engine {engine}", expected="sglang or vllm; both where it is left out")
    run = read_run(recipe, set_, limit)
    kinds: list[Literal["sglang", "vllm"]] = ["sglang", "vllm"]
    fit: list[Deployment] = []
    unfit: dict[str, EyasError] = {}
    for kind in [kind for kind in kinds if engine in ("", kind)]:
        try:
            made = deployment(run, kind)
            check_served(run, made.kind, made.release)
            fit.append(made)
        except (EngineError, RecipeError, VerificationFailed) as error:  # one engine's: the other may serve it
            unfit[kind] = error
    if not fit:
        raise next(iter(unfit.values()))
    for name, refused in unfit.items():
        say(f"deploy: left out: {refused.seen}")
        if out is not None and (out / name).exists():
            say(f"deploy: {out / name} is an earlier call's")
    for made in fit:
        for file, content in made.files.items():
            print(f"# ---- {made.engine}: {file}\n{content}")
        if out is not None:
            made.write(out / made.kind)
            print(f"# wrote {out / made.kind}")
