"""The stages in order, and the one rule that they all follow: skip what a record proves, refuse what changed.

A stage is a module with two functions, found by name (so that `eyas --help` imports none of them):

    inputs(run) -> flat JSON-able pairs that the result depends on
    execute(run) -> Result(output digest, counts)

`discard(run)`, where a stage has it, removes its output for `--redo`; without it `execute` overwrites.
Stages never import one another: they meet through files.
"""

import fcntl
import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

from eyas import fs
from eyas.errors import Busy, EyasError, Interrupted, RecipeError, from_os_error
from eyas.progress import duration, say
from eyas.record import Inputs, Record, changed_input, load_record, record_path, save_record
from eyas.run import Run, save_recipe

STAGES = {
    "regenerate": "eyas.data.regenerate.stage",
    "prepare": "eyas.data.prepare",
    "capture": "eyas.capture.run",
    "verify": "eyas.store.stage",
    "train": "eyas.train.loop",
    "evaluate": "eyas.evaluate.stage",
    "export": "eyas.export.stage",
    "serving": "eyas.evaluate.serving",
}
ERROR_FILE = "last_error.json"


@dataclass(frozen=True)
class Result:
    """What a stage made: the digest that later stages depend on, and figures for people."""

    output: str
    counts: dict[str, Any] = field(default_factory=dict)


class Stage(Protocol):
    def inputs(self, run: Run) -> Inputs: ...

    def execute(self, run: Run) -> Result: ...


def run_stage(run: Run, name: str, *, redo: bool = False) -> Record:
    """Bring one stage to its end: skip, refuse, or execute and write its record last.

    Raises: RecipeError where an input changed under the finished stage, or an earlier stage is missing; and
        whatever the stage raises.
    """
    _refuse_without_data(run, name)
    stage = cast(Stage, importlib.import_module(STAGES[name]))
    with noting_errors(run, name):
        inputs = _upstream(run, name) | stage.inputs(run)
        done = None if redo else _done_already(run, name, inputs)
        if done is not None:
            return done
        with alone(run):
            if redo:
                _discard(run, name, stage)
            elif (done := _done_already(run, name, inputs)) is not None:  # since, by another process
                return done
            return _execute(run, name, stage, inputs)


def _execute(run: Run, name: str, stage: Stage, inputs: Inputs) -> Record:
    save_recipe(run)
    started = time.monotonic()
    result = stage.execute(run)
    record = Record(name, inputs, result.output, result.counts, round(time.monotonic() - started, 2))
    save_record(run.dir, record)
    say(f"{name}: done in {duration(record.duration_s)}")
    return cast(Record, load_record(run.dir, name))


@contextmanager
def alone(run: Run) -> Iterator[None]:
    """No other process does a stage of this run meanwhile: two would take each other's half-made files for their own,
    and each other's servers.

    The kernel lets go of the lock at the end of the process, however it ends.
    Raises: Busy.
    """
    fs.make_folder(run.dir)
    lock = os.open(run.dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(
                f"{run.dir}: another process is at a stage of this run",
                expected="one at a time",
                next=f"{run.command('status')}   # how far it is; wait for it, or end it: what it has finished is kept",
            ) from None
        yield
    finally:
        os.close(lock)


def follow_stage(run: Run, name: str, *, redo: bool = False) -> None:
    """What a process does that works on a stage together with another one, which runs it: the same decisions.

    It writes nothing: record, recipe and errors are the other's. Raises: as run_stage.
    """
    stage = cast(Stage, importlib.import_module(STAGES[name]))
    inputs = _upstream(run, name) | stage.inputs(run)
    if redo or _done_already(run, name, inputs) is None:
        stage.execute(run)


def run_all(
    run: Run, *, redo: str = "", before: Mapping[str, Callable[[Run], None]] = MappingProxyType({})
) -> dict[str, Record]:
    """All stages in order; `redo` names the first stage to do again (it and all after it).

    Args:
        before: stage -> what has to pass before it is executed.
    """
    records, again = {}, False
    for name in stages_of(run):
        again = again or name == redo
        if name in before and (again or load_record(run.dir, name) is None):
            before[name](run)
        records[name] = run_stage(run, name, redo=again)
    return records


def _done_already(run: Run, name: str, inputs: Inputs) -> Record | None:
    """The record that proves a stage's end; None where there is none.

    Raises: RecipeError where it was made from other inputs.
    """
    done = load_record(run.dir, name)
    if done is None:
        return None
    change = changed_input(done, inputs)
    if change:
        raise RecipeError(
            f"{name} is finished in {run.dir}, but {change}",
            cause="the recipe, the data or an earlier stage changed since",
            next=f"{run.command('run', '--redo', name)}   # from {name} on; --set name=OTHER keeps both",
        )
    say(f"{name}: done already on {done.finished} with the same inputs; skipped")
    return done


def _refuse_without_data(run: Run, name: str) -> None:
    if name in ("regenerate", "prepare", "capture") and not run.has_own_store:
        raise RecipeError(
            f"{name}: the recipe names no data.sources: its store, {run.store_url}, was imported",
            expected=f"one of the stages {', '.join(stages_of(run))}",
            next=f"{run.command('run')}   # does them in order",
        )


def _upstream(run: Run, name: str) -> Inputs:
    """The output of the stage before, as an input of this one."""
    order = stages_of(run)
    position = order.index(name) if name in order else 0
    if position == 0:
        return {}
    before = load_record(run.dir, order[position - 1])
    if before is None:
        raise RecipeError(
            f"{name}: the stage before it, {order[position - 1]}, is not finished in {run.dir}",
            next=f"{run.command('run')}   # does all stages in order",
        )
    return {f"output of {order[position - 1]}": before.output}


def _discard(run: Run, name: str, stage: Stage) -> None:
    """Remove a stage's record first, then its output, so that a kill between the two leaves no false proof."""
    record_path(run.dir, name).unlink(missing_ok=True)
    discard = getattr(stage, "discard", None)
    if discard is not None:
        discard(run)


@contextmanager
def noting_errors(run: Run, name: str) -> Iterator[None]:
    """Keep the last error for `eyas status`, and turn full or read-only disks into the user's words."""
    try:
        yield
    except OSError as error:
        told = from_os_error(error)
        if told is None:
            raise
        _note(run, name, told)
        raise told from error
    except EyasError as error:
        if not isinstance(error, Interrupted | Busy):
            _note(run, name, error)
        raise


def _note(run: Run, name: str, error: EyasError) -> None:
    try:
        fs.write_json(run.logs_dir / ERROR_FILE, {"stage": name, "error": str(error), "time": time.time()})
    except OSError:
        say(f"{run.logs_dir}: this error could not be noted there for `eyas status`")


def last_error(run: Run) -> dict[str, Any] | None:
    try:
        return dict(json.loads((run.logs_dir / ERROR_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def remove_tree(folder: Path) -> None:
    """Remove a folder of this run's own making; absent is fine."""
    if folder.exists():
        shutil.rmtree(folder)


def stages_of(run: Run) -> Sequence[str]:
    """The stages of one run, in order: `regenerate` is among them where the recipe names servers, `serving` where it
    names an engine that serves the drafter. Without data.sources the store is there already, and `verify` is the first.
    """
    wanted = {"regenerate": bool(run.recipe.regenerate.servers), "serving": bool(run.recipe.serving.kind)}
    if not run.has_own_store:
        wanted |= dict.fromkeys(("regenerate", "prepare", "capture"), False)
    return [name for name in STAGES if wanted.get(name, True)]
