"""The server of a run: started, found again, stopped.

`runs/NAME/engine/server.json` says what was started and how far it got; it is written before the process is there, so
that a kill of Eyas at any moment leaves nothing that the next command doesn't find.
"""

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from eyas.engine import process
from eyas.engine.begin import begin, settings_of
from eyas.engine.diagnose import flags_of
from eyas.engine.leftovers import end_server, shm_of
from eyas.engine.preflight import Facts, preflight
from eyas.engine.profile import load_profile
from eyas.engine.readiness import Layer, Watched, climb, fire
from eyas.engine.selftest import self_test
from eyas.engine.state import STATE_FILE, ServerState, load_state, locked, running, save_state, stop_command
from eyas.engine.status import diagnosis
from eyas.errors import EngineError, Interrupted, RecipeError
from eyas.progress import say
from eyas.run import Run
from eyas.signals import Stop

_STOP_PATIENCE_S = 30.0


class OtherSettings(EngineError):
    """A server of the run lives, with other settings than the recipe's."""


def start_server(run: Run, *, stop: Stop | None = None) -> ServerState:
    """Start the run's server and wait until it is ready; one that runs already with these settings is returned.

    Args:
        stop: looked at while waiting; a signal ends what this call started.
    Raises: EngineError, TargetError or RecipeError before the start for what preflight finds, after it with a
        diagnosis; Interrupted. What this call started is stopped then.
    """
    return _start(run, stop)[0]


def _start(run: Run, stop: Stop | None) -> tuple[ServerState, bool]:
    """The run's server, ready, and whether this call launched it."""
    facts = Facts(run)
    with locked(run, stop):
        living = _living(run, facts)
        if living is None:
            _clear_dead(run)
            preflight(facts)
        state = living or begin(run, facts)
        _get_ready(run, facts, state, stop)
        return state, living is None


def attach(run: Run, *, stop: Stop | None = None) -> ServerState | None:
    """The run's living server with the same settings, ready; None where none lives.

    Raises: EngineError where one lives with other settings, naming them.
    """
    if running(run) is None:
        return None
    facts = Facts(run)
    with locked(run, stop):
        found = _living(run, facts)
        if found is not None:
            _get_ready(run, facts, found, stop)
        return found


@contextlib.contextmanager
def serving(run: Run, *, stop: Stop | None = None) -> Iterator[ServerState]:
    """The run's server with the tap: the one that lives, or one of our own that is stopped at the end.

    Raises: RecipeError where the profile has no tap; what `attach` and `start_server` raise.
    """
    if load_profile(run.recipe.engine.profile).purpose != "capture":
        raise RecipeError(
            f"engine.profile = {run.recipe.engine.profile!r} starts a plain server, without the tap",
            expected='a profile with purpose = "capture"',
            next="--set engine.profile=extraction",
        )
    state, ours = attach(run, stop=stop), False
    if state is None:
        state, ours = _start(run, stop)
    if not ours:
        say(f"serve: using the server that runs at {state.url} (pid {state.pid})")
        yield state
        return
    try:
        yield state
    finally:
        for line in stop_server(run):
            say(f"serve: {line}")


def stop_server(run: Run) -> list[str]:
    """End the run's server with all its processes, and remove what it would leave; lines for the user."""
    state = load_state(run)
    if state is None:
        return ["no server was started for this run"]
    if state.stopped and not state.members():
        return ["its server was stopped before"]
    with locked(run, None):
        return _end(run, state)


def end_left(run: Run, folder: str) -> None:
    """End what a killed call left of the servers that a stage measures: their states lie below `folder`, in the run's
    folder. One whose state lies in `folder` itself, which `eyas serve start` started, lives on."""
    for path in sorted((run.dir / folder).glob(f"*/**/{STATE_FILE}")):
        one = dataclasses.replace(run, engine_folder=str(path.parent.relative_to(run.dir)))
        state = load_state(one)
        if state is not None and (not state.stopped or state.members()):
            for line in stop_server(one):
                say(f"serve: left in {one.engine_folder}: {line}")


def _clear_dead(run: Run) -> None:
    """Remove what the run's last server left, if it ended otherwise than by `stop_server`."""
    state = load_state(run)
    if state is None or state.stopped:
        return
    lines, _ = end_server(state.session, state.mark, _STOP_PATIENCE_S, shm=[state.ring, *state.shm])
    shutil.rmtree(state.plugin, ignore_errors=True)
    for line in lines:
        say(f"serve: left by an earlier start: {line}")


def _end(run: Run, state: ServerState) -> list[str]:
    """End it, verify that nothing is left, and note it.

    Raises: EngineError where something is.
    """
    lines, whole = end_server(
        state.session,
        state.mark,
        _STOP_PATIENCE_S,
        port=state.port,
        shm=[state.ring, *state.shm],
        gpu_bytes=state.gpu_bytes,
    )
    shutil.rmtree(state.plugin, ignore_errors=True)
    state.stopped = state.stopped or time.time()
    save_state(run, state)
    if not whole:
        told = "\n  ".join(line for line in lines if line.startswith("left:"))
        raise EngineError(
            f"the server of {run.dir} was stopped, but not all of it is gone:\n  {told}",
            cause="a process that waits in the kernel, or a port that another one took meanwhile",
            next="eyas serve clean   # once more, later",
        )
    return lines


def _living(run: Run, facts: Facts) -> ServerState | None:
    """The living server, where its settings are the recipe's.

    Raises: OtherSettings, naming the first one that differs.
    """
    state = running(run)
    if state is None:
        return None
    settings = settings_of(facts)
    for key in sorted(settings | state.settings):
        theirs, ours = state.settings.get(key), settings.get(key)
        if theirs != ours:
            if isinstance(theirs, list) and isinstance(ours, list):
                theirs, ours = [one for one in theirs if one not in ours], [one for one in ours if one not in theirs]
            raise OtherSettings(
                f"a server of this run lives (pid {state.pid}) with {key} {theirs!r}",
                expected=f"{ours!r}, by the recipe",
                cause="the recipe changed after the server was started",
                next=f"{stop_command(state.mark) or f'kill {state.pid}'}   # then start again",
            )
    return state


def _get_ready(run: Run, facts: Facts, state: ServerState, stop: Stop | None) -> None:
    """Climb the layers that are not reached yet; what fails is ended."""
    files, ready = (Path(state.log), Path(state.events)), facts.launch.kind.ready_line
    watched = Watched(state.pid, state.created, state.mark, state.url, *files, ready, state.started, state.layers)

    def reached() -> None:
        members = state.members()
        state.family = process.identities(members)
        state.shm = sorted((shm_of(members) | set(state.shm)) - {state.ring})
        save_state(run, state)

    def diagnose(layer: str) -> EngineError:
        told = "gives no sign of work" if state.alive() else "ended"
        return diagnosis(run, state, layer, f"{state.title} (pid {state.pid}) {told} while waiting for: {layer}")

    def watch() -> None:
        if stop is not None and stop.signum is not None:
            raise Interrupted(stop.signum, "serve: stopped in the self-test", next="start it again")
        if not state.alive():
            raise diagnose("self-test passed")

    try:
        climb(
            watched,
            _layers(watched, facts, state, watch),
            patience_s=run.recipe.engine.patience_s,
            stop=stop,
            reached=reached,
            diagnose=diagnose,
        )
    except BaseException:
        for line in _end(run, state):
            say(f"serve: {line}")
        raise


def _layers(watched: Watched, facts: Facts, state: ServerState, watch: Callable[[], None]) -> list[Layer]:
    if not state.ring:
        weights: Layer = ("weights loaded", lambda: watched.logged(facts.launch.kind.weights_line))
        return [weights, ("listening", watched.listening), ("warm", watched.warm)]
    token_ids = [token % facts.target.vocab_size for token in range(10, 18)]
    ranks = flags_of(state.command)["tp_size"]
    return [
        ("plugin loaded", lambda: watched.told("plugin", role="scheduler")),
        ("weights loaded", lambda: watched.ranks(facts.launch.kind.loaded_event) >= ranks),
        ("listening", watched.listening),
        ("warm", watched.warm),
        ("tap fired", lambda: fire(watched, state.open_ring(), state.client(), token_ids)),
        ("self-test passed", lambda: _test_states(facts, state, watch)),
    ]


def _test_states(facts: Facts, state: ServerState, watch: Callable[[], None]) -> bool:
    """Run the self-test and keep its figures. Raises EngineError where it fails."""
    dtype, middle = facts.run.recipe.engine.dtype, facts.run.recipe.capture.check_middle
    ring, ids = state.open_ring(), state.aux_layer_ids
    passed = self_test(facts.target, ids, dtype, state.client, ring, middle=middle, watch=watch)
    state.self_test = passed.figures()
    for line in passed.lines():
        say(f"serve: self-test: {line}")
    return True
