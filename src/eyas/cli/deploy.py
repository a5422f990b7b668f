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
    from eyas.errors import RecipeError, VerificationFailed
    from eyas.export.stage import check_served
    from eyas.progress import say

    if engine not in ("", "sglang", "vllm"):
        raise RecipeError(f"--engine {engine}", expected="sglang or vllm; both where it is left out")
    run = read_run(recipe, set_, limit)
    kinds: list[Literal["sglang", "vllm"]] = ["sglang", "vllm"]
    fit: list[Deployment] = []
    unfit: list[VerificationFailed] = []
    for made in [deployment(run, kind) for kind in kinds if engine in ("", kind)]:
        try:
            check_served(run, made.kind, made.release)
            fit.append(made)
        except VerificationFailed as error:
            unfit.append(error)
    if not fit:
        raise unfit[0]
    for refused in unfit:
        say(f"deploy: left out: {refused.seen}")
    for made in fit:
        for name, content in made.files.items():
            print(f"# ---- {made.engine}: {name}\n{content}")
        if out is not None:
            made.write(out / made.kind)
            print(f"# wrote {out / made.kind}")
