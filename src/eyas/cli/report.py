"""`eyas report`: the page about a run."""

from eyas.cli.options import Limit, Overrides, RecipePath, read_run


def report(recipe: RecipePath, set_: Overrides = None, limit: Limit = 0) -> None:
    """Write runs/NAME/report.html, one page that opens offline, and print its path."""
    from eyas.report.page import write_report

    print(write_report(read_run(recipe, set_, limit)))
