"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from eyas.run import Run

RecipePath = Annotated[Path, typer.Argument(help="Recipe file, or the folder of a run.", metavar="RECIPE")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key: --set train.lr=1e-4. May be repeated.", metavar="KEY=VALUE"),
]
Limit = Annotated[
    int, typer.Option("--limit", help="Take at most N samples, in a run of its own (NAME-limitN); 0: all.", min=0)
]
Redo = Annotated[
    bool, typer.Option("--redo", help="Do this stage again although it is finished; its old output is removed.")
]


def read_run(recipe: Path, overrides: list[str] | None, limit: int) -> Run:
    """The run that these options describe."""
    from eyas.run import open_run

    return open_run(recipe, [*(overrides or []), *([f"data.limit={limit}"] if limit else [])])
