"""`eyas report`: the page about a run, or about two."""

from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.options import Limit, Overrides, RecipePath, read_run


def report(
    recipe: RecipePath,
    other: Annotated[Path | None, typer.Argument(help="A second recipe or run's folder, to compare with.")] = None,
    set_: Overrides = None,
    limit: Limit = 0,
) -> None:
    """Write runs/NAME/report.html, one page that opens offline, or a page that compares two runs; print its path."""
    from eyas.report.compare import write_comparison
    from eyas.report.page import write_report
    from eyas.run import open_run

    run = read_run(recipe, set_, limit)
    print(write_report(run) if other is None else write_comparison(run, open_run(other)))
