"""`eyas doctor`: what a server that doesn't get on is doing, and why."""

from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.options import Limit, Overrides
from eyas.cli.serve import WithDrafter


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="Recipe file, or the folder of a run.", metavar="[RECIPE]", show_default=False)
    ] = None,
    set_: Overrides = None,
    limit: Limit = 0,
    with_drafter: WithDrafter = False,
    pid: Annotated[int, typer.Option("--pid", help="Look at this process and its children instead.")] = 0,
) -> None:
    """Say what a run's server is doing, or what would stop it from starting, and what to try next. Exit code 1:
    something is wrong. It changes nothing and ends nothing.
    """
    from eyas.engine.causes import findings
    from eyas.engine.diagnose import evidence_lines, examine_pid, finding_lines
    from eyas.errors import RecipeError

    if pid:
        evidence = examine_pid(pid)
        found = findings(evidence)
        print("\n".join(evidence_lines(evidence) + finding_lines(found)))
        raise typer.Exit(1 if found else 0)
    if recipe is None:
        raise RecipeError("neither a recipe nor --pid", expected="eyas doctor RECIPE, or eyas doctor --pid N")
    from eyas.cli.serve import startable_run, started_run
    from eyas.engine.state import running
    from eyas.engine.status import doctor_lines

    run = started_run(recipe, set_, limit, with_drafter)
    if running(run) is None:
        run = startable_run(recipe, set_, limit, with_drafter)
    lines, healthy = doctor_lines(run)
    print("\n".join(lines))
    raise typer.Exit(0 if healthy else 1)
