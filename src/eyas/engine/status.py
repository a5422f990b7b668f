"""How a run's server is: for `eyas serve status`, `eyas doctor`, and errors of whoever needs it."""

import time
from pathlib import Path

from eyas.engine import process
from eyas.engine.causes import findings
from eyas.engine.diagnose import as_error, evidence_lines, finding_lines, flags_of
from eyas.engine.events import refusal
from eyas.engine.evidence import Evidence, examine
from eyas.engine.preflight import faults
from eyas.engine.state import ServerState, load_state
from eyas.errors import EngineError
from eyas.progress import duration, size
from eyas.run import Run


def server_died(run: Run, state: ServerState) -> EngineError:
    """The error for a server that ended by itself: the likely cause, and where its log is."""
    return diagnosis(run, state, "ready", f"{state.title} (pid {state.pid}) ended by itself")


def diagnosis(run: Run, state: ServerState, layer: str, seen: str) -> EngineError:
    """Look at the server as it is now, and say what is the matter with it."""
    return as_error(examine_server(state, layer), seen, Path(state.log), run.command("doctor"))


def examine_server(state: ServerState, layer: str) -> Evidence:
    """What this server does, while it is waited for `layer` ("": it is ready)."""
    return examine(
        state.members(),
        log=Path(state.log),
        layer=layer,
        engine_python=state.command[0],
        model_path=state.model,
        flags=flags_of(state.command),
        exit_code=process.reap(state.pid),
        refused=refusal(Path(state.events)),
        table=state.table,
    )


def status_lines(run: Run) -> list[str]:
    """The server in some lines: does it live, how far it got, its ring, its log."""
    state = load_state(run)
    if state is None:
        return [f"server    none was started for {run.dir}", f"next      {run.command('serve start')}"]
    lives = state.alive()
    lines = [
        f"server    {state.title} {state.version}, profile {state.profile}, {state.url}, pid {state.pid}: "
        f"{_condition(state)}",
        f"layers    {', '.join(f'{name} {duration(seconds)}' for name, seconds in state.layers.items())}",
    ]
    lines += [f"waits     for: {state.next_layer}"] if lives and not state.ready else []
    if lives and state.ring:
        lines.append(f"ring      {_ring_line(state)}")
    return [*lines, f"command   {' '.join(state.command)}", f"log       {state.log}"]


def _ring_line(state: ServerState) -> str:
    try:
        counted = state.open_ring().counters()
    except EngineError as error:
        return f"{error.seen}: {error.cause}; next: {error.next}"
    reader = f"read by process {counted.consumer_pid}" if counted.consumer_pid else "read by nobody"
    filled = f"{size(counted.used_bytes)} of {size(counted.capacity_bytes)} in use"
    return f"{filled}, {counted.rows:,} rows sent, {counted.dropped_rows:,} dropped, {reader}"


def _condition(state: ServerState) -> str:
    if state.alive():
        return ("ready" if state.ready else "starting") + f", started {duration(time.time() - state.started)} ago"
    return "stopped" if state.stopped else "ended by itself"


def doctor_lines(run: Run) -> tuple[list[str], bool]:
    """What the server does, or what stops it from starting; and whether nothing is wrong."""
    state = load_state(run)
    if state is not None and state.alive():
        evidence = examine_server(state, state.next_layer)
        found = findings(evidence)
        verdict = finding_lines(found) or [f"cause     none of the known ones; the server is {_condition(state)}"]
        return status_lines(run)[:1] + evidence_lines(evidence) + verdict, not found
    lines = [] if state is None else status_lines(run)[:1]
    died = state is not None and not state.stopped
    if state is not None and died:
        evidence = examine_server(state, state.next_layer or "ready")
        lines += evidence_lines(evidence) + finding_lines(findings(evidence))
    lines.append("preflight checks what would stop a start")
    wrong = list(faults(run))
    for error in wrong:
        parts = ("cause     ", error.seen), ("  wanted  ", error.expected), ("  because ", error.cause)
        lines += [label + text for label, text in (*parts, ("  next    ", error.next)) if text]
    if not wrong:
        lines.append(f"          nothing found; next: {run.command('serve start')}")
    return [line for line in lines if line], not wrong and not died
