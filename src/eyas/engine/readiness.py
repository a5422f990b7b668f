"""Is a starting server ready? In layers, each with its time, so that a hang has a name.

    process alive      the process runs
    plugin loaded      the tap was imported by the engine                   (the tap's events)
    weights loaded     the model is in memory, on every rank                (the tap's events, or the log)
    listening          the port answers                                     (TCP)
    warm               the engine answers                                   (SGLang's log, /health)
    tap fired          a request of Eyas's own reached the tap              (the tap's events)
    self-test passed   states are what they should be                       (engine/selftest.py)

SGLang's `/health` runs a request through the model: it says 503 before the first and while a long prefill keeps it
waiting, and neither is death. Death is the process's end.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil

from eyas.engine import process
from eyas.engine.client import EngineClient, Refused, Transient
from eyas.engine.events import read_events, refusal
from eyas.engine.evidence import tail
from eyas.engine.gpu import gpus
from eyas.engine.ring import read_from
from eyas.errors import EngineError, Interrupted
from eyas.pids import alive
from eyas.progress import duration, say
from eyas.signals import Stop
from eyas.tap.reader import RingReader

LAYERS = (
    "process alive",
    "plugin loaded",
    "weights loaded",
    "listening",
    "warm",
    "tap fired",
    "self-test passed",
)
_POLL_S = 0.25
_SAY_EVERY_S = 15.0
_BUSY_CORES = 0.05  # less is bookkeeping: a waiting scheduler wakes a few times a second
_READ_BYTES_S = 1e5
_GROWN_BYTES = 1 << 20
_SPIN_FACTOR = 3
_FIRE_PATIENCE_S = 10.0
_ANSWER_PATIENCE_S = 60.0

Layer = tuple[str, Callable[[], bool]]


@dataclass
class Watched:
    """What readiness looks at.

    Attributes:
        pid, created, mark: of the server (engine/process.py).
        log, events: files.
        ready_line: of the log.
        started: unix time of the launch; layer times count from it.
        layers: name -> seconds, of those reached.
    """

    pid: int
    created: float
    mark: str
    url: str
    log: Path
    events: Path
    ready_line: str
    started: float
    layers: dict[str, float]

    def alive(self) -> bool:
        return alive(self.pid, self.created)

    def told(self, name: str, **having: str) -> bool:
        """Whether the tap has told an event of this name, with these values."""
        return bool(read_events(self.events, event=name, **having))

    def ranks(self, name: str) -> int:
        """How many ranks have told an event of this name."""
        return len({event["rank"] for event in read_events(self.events, event=name)})

    def logged(self, text: str) -> bool:
        return self.log.exists() and text in self.log.read_text(encoding="utf-8", errors="replace")

    def listening(self) -> bool:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        try:
            socket.create_connection((host, int(port)), timeout=2).close()
        except OSError:
            return False
        return True

    def warm(self) -> bool:
        return self.logged(self.ready_line) or self._status("/health") == 200

    def _status(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, timeout=5, trust_env=False).status_code
        except httpx.HTTPError:
            return 0


def fire(watched: Watched, ring: RingReader, client: EngineClient, token_ids: Sequence[int]) -> bool:
    """Send a request of Eyas's own and take its rows from the ring; False where the server can't be reached yet.

    Raises: EngineError where the server answered and no rows came, or answered nonsense.
    """
    rid = f"eyas-ready-{time.time_ns()}"

    async def ask() -> None:
        async with client:
            await asyncio.wait_for(client.prefill(token_ids, rid), _ANSWER_PATIENCE_S)

    read_from(ring)
    try:
        asyncio.run(ask())
        if _take_rows(ring, rid, len(token_ids)) == len(token_ids):
            return True
    except (Transient, TimeoutError):  # the first forward passes may compile kernels for minutes
        return False
    except Refused as refusal:
        raise EngineError(
            f"{watched.url}: {refusal}, to a request of {len(token_ids)} token ids",
            expected="an answer: the server is warm",
            next=f"look at the end of its log: {watched.log}",
        ) from None
    finally:
        ring.close()
    raise EngineError(
        f"{watched.url}: answered a request of {len(token_ids)} tokens, but not all their rows came through the tap",
        expected=f"{len(token_ids)} rows within {_FIRE_PATIENCE_S:.0f} s",
        cause="the engine's methods are not what the tap stands on, or a prefix was taken from a cache",
        next=f"eyas doctor --pid {watched.pid}; the tap's own words: {watched.events}",
    )


def _take_rows(ring: RingReader, rid: str, wanted: int) -> int:
    """How many of so many rows of a request arrive in the ring; all blocks are given back."""
    rows, deadline = 0, time.monotonic() + _FIRE_PATIENCE_S
    while rows < wanted and time.monotonic() < deadline:
        block = ring.read(timeout_s=1.0)
        if block is not None:
            rows += sum(segment.length for segment in block.segments if segment.rid == rid)
            ring.release(block)
    return rows


def climb(
    watched: Watched,
    layers: Sequence[Layer],
    *,
    patience_s: float,
    stop: Stop | None,
    reached: Callable[[], None],
    diagnose: Callable[[str], EngineError],
) -> None:
    """Wait for one layer after the other; `reached` is called after each.

    A layer without a sign of work for half of `patience_s` is diagnosed, and given up after all of it. One that works
    is waited for; where only processors spin (no log line, nothing read) for `patience_s` the diagnosis is said, and
    after three times that it is given up.

    Args:
        diagnose: called with the layer's name where it is given up, or the process ended: the error to raise.
    Raises: EngineError; Interrupted where a signal came.
    """
    for name, check in layers:
        if name in watched.layers:
            continue
        signs = _Signs(watched, name)
        while not check():
            if stop is not None and stop.signum is not None:
                raise Interrupted(stop.signum, f"serve: stopped while waiting for: {name}", next="start it again")
            if not watched.alive() or refusal(watched.events):
                raise diagnose(name)
            signs.look()
            if signs.idle_s > patience_s or signs.spinning_s > _SPIN_FACTOR * patience_s:
                raise diagnose(name)
            if signs.idle_s > patience_s / 2 or signs.spinning_s > patience_s:
                signs.tell_once(partial(diagnose, name))
            time.sleep(_POLL_S)
        watched.layers[name] = round(time.time() - watched.started, 2)
        say(f"serve: {name} ({duration(watched.layers[name])})")
        reached()


class _Signs:
    """Signs of work of one layer: how long there were none, and how long there was nothing but spinning."""

    def __init__(self, watched: Watched, layer: str) -> None:
        self._watched, self._layer = watched, layer
        self._began = self._said = self._looked = self._worked = self._moved = time.monotonic()
        self._last = self._work()
        self._told = False

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._worked

    @property
    def spinning_s(self) -> float:
        return time.monotonic() - self._moved

    def tell_once(self, diagnose: Callable[[], EngineError]) -> None:
        """Say the diagnosis, unless it was said since the last sign of more than spinning."""
        if not self._told:
            self._told = True
            say(f"serve: {self._layer}: nothing moved for {duration(self.spinning_s)}.\n{diagnose()}")

    def look(self) -> None:
        """Compare with two seconds ago; now and then say what the server does."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < 2:
            return
        work = self._work()
        cores = (work.cpu_s - self._last.cpu_s) / passed
        read = (work.read_bytes - self._last.read_bytes) / passed
        grown = work.log_bytes > self._last.log_bytes or abs(work.memory_bytes - self._last.memory_bytes) > _GROWN_BYTES
        if read > _READ_BYTES_S or grown:
            self._moved = self._worked = now
            self._told = False
        elif cores > _BUSY_CORES or self._on_gpus():
            self._worked = now
        self._looked, self._last = now, work
        if now - self._said >= _SAY_EVERY_S:
            self._said = now
            line = (tail(self._watched.log, 1) or [""])[0]
            doing = f"{cores:.1f} cores busy, reads {read / 1e6:,.0f} MB/s"
            say(f"serve: waiting for: {self._layer}, {duration(now - self._began)}; {doing}; log: {line[:120]}")

    def _members(self) -> list[psutil.Process]:
        watched = self._watched
        return process.members(process.session_of(watched.pid, watched.created, watched.mark), watched.mark)

    def _work(self) -> process.Work:
        return process.work(self._members(), self._watched.log)

    def _on_gpus(self) -> bool:
        """Whether a kernel runs on a GPU that the server holds memory of; one that only waits counts too."""
        try:
            held = [gpu for gpu in gpus() if gpu.holders.keys() & {member.pid for member in self._members()}]
        except EngineError:  # nvidia-smi hangs: no sign of work
            return False
        return any(gpu.busy > 0 for gpu in held)
