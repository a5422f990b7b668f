"""`eyas serve`: the server of a run, started, looked at and stopped by hand. `eyas capture` does it by itself."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli.options import Limit, Overrides, RecipePath, read_run

if TYPE_CHECKING:
    from eyas.run import Run

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Start, watch and stop the server that runs the target."
)


WithDrafter = Annotated[
    bool,
    typer.Option("--with-drafter", help="The server of [serving], with the drafter, instead of the one of [engine]."),
]


def started_run(recipe: Path, overrides: list[str] | None, limit: int, with_drafter: bool) -> Run:
    """The run whose server is meant, for what is asked of its server.json alone: what the recipe and the run's folder
    have become since its start doesn't matter."""
    from eyas.engine.drafting import SERVING
    from eyas.engine.state import load_state

    run = read_run(recipe, overrides, limit)
    if with_drafter:
        # In messages every command is to mean this server.
        return dataclasses.replace(run, arguments=f"{run.arguments} --with-drafter", engine_folder=SERVING)
    return run if load_state(run) else _with_server(run)


def startable_run(recipe: Path, overrides: list[str] | None, limit: int, with_drafter: bool) -> Run:
    """The run whose server is to be started; with the drafter by the tuned settings, where there are some."""
    if not with_drafter:
        return _with_server(read_run(recipe, overrides, limit))
    from eyas.engine.drafting import find_drafting, serving_run

    run = started_run(recipe, overrides, limit, with_drafter)
    return serving_run(run, find_drafting(run))


def _with_server(run: Run) -> Run:
    from eyas.errors import RecipeError

    if run.recipe.engine.kind == "local":
        raise RecipeError(
            'engine.kind = "local" runs the target in process: there is no server',
            next="--set engine.kind=sglang (or vllm) --set engine.python=PATH, the interpreter that holds it",
        )
    return run


@app.command()
def start(recipe: RecipePath, set_: Overrides = None, limit: Limit = 0, with_drafter: WithDrafter = False) -> None:
    """Start the server and wait until it is ready; it stays after this command and the terminal are gone."""
    from eyas.engine.server import start_server
    from eyas.signals import stop_on_signals

    run = startable_run(recipe, set_, limit, with_drafter)
    if with_drafter:
        from eyas.export.stage import check_served

        check_served(read_run(recipe, set_, limit))
    with stop_on_signals("this start: the server is stopped") as stop:
        state = start_server(run, stop=stop)
    print(f"ready    {state.url} (pid {state.pid})")
    print(f"log      {state.log}")
    print(f"next     {run.command('capture')}" if state.ring else f"next     {run.command('serve status')}")
    print(f"         {run.command('serve stop')}")


@app.command()
def status(recipe: RecipePath, set_: Overrides = None, limit: Limit = 0, with_drafter: WithDrafter = False) -> None:
    """Say whether the server lives, how far it got, and what is in its ring."""
    from eyas.engine.status import status_lines

    print("\n".join(status_lines(started_run(recipe, set_, limit, with_drafter))))


@app.command()
def logs(
    recipe: RecipePath,
    set_: Overrides = None,
    limit: Limit = 0,
    with_drafter: WithDrafter = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the last lines.", min=1)] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written.")] = False,
) -> None:
    """Print the end of the server's log."""
    from eyas.engine.evidence import tail
    from eyas.engine.state import load_state
    from eyas.errors import EngineError

    run = started_run(recipe, set_, limit, with_drafter)
    state = load_state(run)
    if state is None:
        raise EngineError(f"{run.dir}: no server was started", next=run.command("serve start"))
    log = Path(state.log)
    end = log.stat().st_size
    print("\n".join(tail(log, lines)), flush=True)
    with log.open(encoding="utf-8", errors="replace") as handle:
        handle.seek(end)
        while follow:
            print(handle.read(), end="", flush=True)
            time.sleep(0.5)


@app.command()
def stop(recipe: RecipePath, set_: Overrides = None, limit: Limit = 0, with_drafter: WithDrafter = False) -> None:
    """End the server with all its processes, and verify that port, memory and shared memory are free again."""
    from eyas.engine.server import stop_server

    print("\n".join(stop_server(started_run(recipe, set_, limit, with_drafter))))


@app.command()
def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List them, remove nothing.")] = False,
) -> None:
    """Remove what dead servers left: rings, and processes whose first one is gone; never what a living one uses."""
    from eyas.engine.leftovers import clean as remove
    from eyas.engine.leftovers import find_leftovers
    from eyas.engine.process import command_of

    found = find_leftovers()
    if dry_run:
        lines = [f"process {one.pid}: {command_of(one.pid)}" for one in found.orphans] + found.rings
    else:
        lines = remove(found)
    print("\n".join(lines) or "nothing of dead servers is left")
    for path in found.others:
        print(f"not ours: {path}: SGLang's, used by no process that is seen here; if it is yours: rm {path}")


@app.command()
def profiles(
    names: Annotated[list[str] | None, typer.Argument(help="Profiles, or TOML files; default: all.")] = None,
) -> None:
    """List launch profiles: every flag and variable with its reason."""
    from eyas.engine.profile import load_profile, profile_names

    for name in names or profile_names():
        profile = load_profile(name)
        print(
            f"{profile.name} ({'hidden states' if profile.purpose == 'capture' else 'plain server'}): {profile.about}"
        )
        for flag in profile.flags:
            span = f" from {flag.since}" if flag.since else f" before {flag.before}" if flag.before else ""
            kind = " (vLLM)" if flag.engine == "vllm" else ""
            print(f"  {flag.flag}{' ' + flag.value if flag.value else ''}{span}{kind}")
            print(f"      {flag.reason}")
        for variable in profile.env:
            print(f"  {variable.name}={variable.value}")
            print(f"      {variable.reason}")
