"""`eyas run`: all stages in order."""

from typing import Annotated

import typer

from eyas.cli.options import Limit, Overrides, RecipePath, read_run
from eyas.errors import RecipeError


def run(
    recipe: RecipePath,
    set_: Overrides = None,
    limit: Limit = 0,
    redo: Annotated[str, typer.Option(help="First stage to do again, with all that follow.", metavar="STAGE")] = "",
) -> None:
    """Do every stage in order, skipping what is finished, and write the report."""
    from eyas.stages import run_all, stages_of
    from eyas.train.ranks import refuse_ranks

    refuse_ranks("run")
    described = read_run(recipe, set_, limit)
    if redo and redo not in stages_of(described):
        raise RecipeError(f"--redo {redo}: no such stage", expected=", ".join(stages_of(described)))
    from eyas.export.stage import check_served

    run_all(described, redo=redo, before={"serving": check_served})
    from eyas.report.summary import finish

    finish(described)
