"""`eyas evaluate`: acceptance from the store, or in the engine that will serve the drafter."""

from typing import Annotated

import typer

from eyas.cli.options import Limit, Overrides, RecipePath, Redo, read_run

Engine = Annotated[
    str,
    typer.Option(
        help="Measure in a serving engine instead: sglang or vllm, as --set serving.kind=...; see [serving].",
        metavar="KIND",
    ),
]


def evaluate(
    recipe: RecipePath, set_: Overrides = None, limit: Limit = 0, redo: Redo = False, engine: Engine = ""
) -> None:
    """Measure acceptance on held-out samples (eval.json), or speed and acceptance in an engine (serving.json)."""
    from eyas.stages import run_stage
    from eyas.train.ranks import refuse_ranks

    refuse_ranks("evaluate")
    if not engine:
        run_stage(read_run(recipe, set_, limit), "evaluate", redo=redo)
        return
    from eyas.errors import VerificationFailed
    from eyas.export.stage import check_served
    from eyas.record import load_record
    from eyas.report.page import write_report

    run = read_run(recipe, [*(set_ or []), f"serving.kind={engine}"], limit)
    if load_record(run.dir, "export") is not None:
        check_served(run)  # what is wrong in the folder has a name before a server is started
    try:
        run_stage(run, "serving", redo=redo)
    except VerificationFailed:
        print(write_report(run))  # with the figures that fail
        raise
    print(run.dir / "serving.json", write_report(run), sep="\n")
