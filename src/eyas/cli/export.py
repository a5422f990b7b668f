"""`eyas export`: the drafter as a folder that SGLang and vLLM load."""

from typing import Annotated

import typer

from eyas.cli.options import Limit, Overrides, RecipePath, Redo, read_run

Check = Annotated[
    bool, typer.Option("--check", help="Only check the finished folder as an engine's loader reads it; exit code 3.")
]


def export(
    recipe: RecipePath, set_: Overrides = None, limit: Limit = 0, redo: Redo = False, check: Check = False
) -> None:
    """Write the drafter as a folder that SGLang and vLLM load (export/)."""
    from eyas.export.stage import check as check_export
    from eyas.stages import run_stage

    run = read_run(recipe, set_, limit)
    if not check:
        run_stage(run, "export", redo=redo)
        return
    check_export(run)
    print(f"{run.export_dir}: names, shapes, number types, vocabulary, layer ids, rope and context are as trained")
