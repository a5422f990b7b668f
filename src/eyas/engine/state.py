"""What Eyas remembers of a run's server: `runs/NAME/engine/server.json`, and the lock beside it."""

import contextlib
import fcntl
import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from eyas import fs
from eyas.engine import process
from eyas.engine.client import EngineClient
from eyas.engine.kinds import KINDS
from eyas.engine.readiness import LAYERS
from eyas.engine.ring import open_ring
from eyas.errors import EngineError, Interrupted
from eyas.pids import alive
from eyas.progress import say
from eyas.run import Run
from eyas.signals import Stop
from eyas.tap.reader import RingReader

STATE_FILE = "server.json"


@dataclass
class ServerState:
    """What runs/NAME/engine/server.json holds.

    Attributes:
        pid, created: the first process and its creation time; 0 until it is there.
        mark: value of EYAS_SERVER in the environment of all its processes.
        url, port: where it listens.
        ring: path of the shared memory, "" for a server without the tap.
        log, events, plugin: files and folder of this start.
        command, version, profile, device: what was started.
        aux_layer_ids: in our meaning.
        settings: what the states depend on; a running server of other settings is not used.
        started: unix time.
        layers: layers of readiness reached, name -> seconds after `started`.
        family: pid and creation time of each process that was seen in it.
        shm: files in /dev/shm that its processes mapped, the ring not among them.
        self_test: figures of the self-test.
        stopped: unix time at which Eyas ended it; 0 before.
        engine: its kind, as in engine.kind.
        gpu_bytes: what was in use on each GPU that it sees before the start, by uuid; none on a CPU.
    """

    url: str
    port: int
    ring: str
    log: str
    events: str
    plugin: str
    command: list[str]
    version: str
    profile: str
    device: str
    aux_layer_ids: list[int]
    settings: dict[str, Any]
    mark: str
    pid: int = 0
    created: float = 0.0
    started: float = 0.0
    layers: dict[str, float] = field(default_factory=dict)
    family: list[tuple[int, float]] = field(default_factory=list)
    shm: list[str] = field(default_factory=list)
    self_test: dict[str, Any] = field(default_factory=dict)
    stopped: float = 0.0
    engine: str = "sglang"
    gpu_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return KINDS[self.engine].title

    @property
    def model(self) -> str:
        """The folder of the model that it serves."""
        return KINDS[self.engine].model_of(self.command)

    def client(self) -> EngineClient:
        """For asking it; one for each event loop."""
        return KINDS[self.engine].client(self.url, Path(self.events))

    def open_ring(self) -> RingReader:
        """Its ring, mapped. Raises EngineError where that is gone."""
        return open_ring(self.ring, stop_command(self.mark) or f"kill {self.pid}")

    @property
    def next_layer(self) -> str:
        """The layer of readiness that comes next; "" once it is ready."""
        tapless = ("plugin loaded", "tap fired", "self-test passed")
        wanted = [name for name in LAYERS if self.ring or name not in tapless]
        return next((name for name in wanted if name not in self.layers), "")

    @property
    def ready(self) -> bool:
        return not self.next_layer

    def alive(self) -> bool:
        return self.pid > 0 and alive(self.pid, self.created)

    @property
    def table(self) -> str:
        """The recipe's table that said how it is started, by where its state lies (`Run.engine_table`)."""
        return "engine" if Path(self.mark.rpartition(":")[0]).name == "engine" else "serving"

    @property
    def session(self) -> int:
        """Its processes' session, 0 where none of them is left in it."""
        return process.session_of(self.pid, self.created, self.mark, self.family)

    def members(self) -> list[psutil.Process]:
        """Its living processes."""
        return process.members(self.session, self.mark)


def engine_dir(run: Run) -> Path:
    return run.dir / run.engine_folder


def stop_command(mark: str) -> str:
    """The command that ends the server of this mark; "" for one of several that a stage measures, and for no mark."""
    folder = Path(mark.rpartition(":")[0])
    words = {"engine": "", "serving": " --with-drafter"}.get(folder.name)
    return "" if words is None else f"eyas serve stop {shlex.quote(str(folder.parent))}{words}"


def load_state(run: Run) -> ServerState | None:
    """What the last start left, whether its server still runs or not."""
    return read_state(engine_dir(run) / STATE_FILE)


def running(run: Run) -> ServerState | None:
    """The run's server, where one runs. Raises: as `read_state`."""
    state = load_state(run)
    return state if state is not None and state.alive() else None


def read_state(path: Path) -> ServerState | None:
    """A server.json; None where there is none.

    Raises: EngineError where it is another version's.
    """
    try:
        state = ServerState(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise EngineError(
            f"{path}: {error}",
            expected="a server's state as this version of Eyas writes it",
            cause="the server was started by another version, or the file was edited",
            next=f'stop it with that version; if none runs (see "pid" in it): rm {shlex.quote(str(path))}',
        ) from None
    state.family = [(pid, created) for pid, created in state.family]  # JSON has lists
    state.layers = {name: state.layers[name] for name in LAYERS if name in state.layers}  # JSON has them by name
    return state


def save_state(run: Run, state: ServerState) -> None:
    fs.write_json(engine_dir(run) / STATE_FILE, asdict(state))


@contextlib.contextmanager
def locked(run: Run, stop: Stop | None) -> Iterator[None]:
    """One start or stop of a run's server at a time; the lock goes with its process."""
    fs.make_folder(engine_dir(run))
    with (engine_dir(run) / "lock").open("a") as lock:
        told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say(f"serve: another eyas starts or stops the server of {run.dir}; waiting for it")
                    told = True
            if stop is not None and stop.signum is not None:
                raise Interrupted(stop.signum, "serve: stopped while another eyas starts the server", next="again")
            time.sleep(0.2)
        yield
