"""Rows off the ring and into the store: one thread reads blocks, some write them.

A *request* is one try at a sample. Its rows are known by its id; rows of ids that nobody waits for (a dead worker's, or
a try that was given up) are let go. Pieces of one request are written by one thread, in the order they came, so that
checksums follow without reading back.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.data.tokens import Sample
from eyas.engine.ring import read_from
from eyas.errors import EngineError
from eyas.store.writer import BadStates, StoreWriter
from eyas.tap.block import Block, Segment, cut, row_bytes
from eyas.tap.encode import Encoded, decode
from eyas.tap.reader import RingReader

_THREADS = 4  # one pwrite stream reaches 4 GB/s, but waits for the disk while three shards are being committed
_READ_S = 0.1
_ROOM = 0.75  # of the ring, for rows; the rest for what blocks need beside them, and fillers where it wraps


@dataclass
class Request:
    """One try at a sample.

    Attributes:
        rid: its id on the server.
        store: whether rows go to the store; else they are only counted.
        final_from: final states from this position on are kept, for a spot check; None: none are.
        final: float32 [N - final_from, H], the states kept.
        bad: why the sample can't be stored; "" while nothing is wrong.
    """

    rid: str
    sample: Sample
    on_settled: Callable[[], None] = field(repr=False)
    store: bool = True
    final_from: int | None = None
    final: Tensor | None = field(default=None, repr=False)
    bad: str = ""

    def __post_init__(self) -> None:
        self._came = torch.zeros(len(self.sample.token_ids), dtype=torch.bool)
        self._ids = torch.from_numpy(self.sample.token_ids)
        self._mask = torch.from_numpy(self.sample.loss_mask)

    @property
    def whole(self) -> bool:
        return bool(self._came.all())

    @property
    def rows(self) -> int:
        """Rows that came."""
        return int(self._came.sum())


class Filing:
    """Takes rows off a ring. Use as a context manager.

    Attributes:
        rows: rows taken so far, whoever's.
    """

    def __init__(self, ring: RingReader, writer: StoreWriter) -> None:
        self._ring, self._writer = ring, writer
        self._requests: dict[str, Request] = {}
        self._ended = threading.Event()
        self._queues: list[_Queue] = [queue.SimpleQueue() for _ in range(_THREADS)]
        self._left: dict[int, int] = {}  # end of a block -> segments of it that are not filed
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_THREADS + 1, thread_name_prefix="eyas-filing")
        self._work: list[Future[None]] = []
        self.rows = 0

    def __enter__(self) -> "Filing":
        read_from(self._ring)
        self._work = [self._pool.submit(self._write, waiting) for waiting in self._queues]
        self._work.append(self._pool.submit(self._read))
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._pool.shutdown()
        self._ring.close()

    def check(self) -> None:
        """Raises what ended one of the threads: EngineError, StoreFull, OSError..."""
        for work in self._work:
            if work.done():
                work.result()

    def expect(self, request: Request) -> None:
        """From now on this request's rows are filed."""
        if request.final_from is not None:
            rows = len(request.sample.token_ids) - request.final_from
            request.final = torch.empty(rows, self._ring.layout.hidden_size)
        self._requests[request.rid] = request

    def forget(self, request: Request) -> None:
        """Rows of this request that are still to come are let go."""
        self._requests.pop(request.rid, None)

    def room_for(self, rows: int) -> bool:
        """Whether so many more rows surely find room: what is in the ring and all that requests may still send counted.

        True for any number where nothing is there and nothing is expected.
        """
        expected = sum(len(request.sample.token_ids) for request in list(self._requests.values()))
        counters = self._ring.counters()
        needed = counters.used_bytes + (expected + rows) * row_bytes(self._ring.layout)
        return needed <= _ROOM * counters.capacity_bytes or not (counters.used_bytes or expected)

    @property
    def waiting(self) -> bool:
        """Whether rows lie in the ring that aren't filed."""
        return self._ring.counters().used_bytes > 0

    def marker(self) -> "Marker":
        """A mark behind everything that has found room in the ring until now."""
        return Marker(self._ring)

    def _read(self) -> None:
        try:
            while not self._ended.is_set():
                block = self._ring.read(_READ_S)
                if block is not None:
                    self._deal(block)
        finally:
            for waiting in self._queues:
                waiting.put(None)

    def _deal(self, block: Block) -> None:
        wanted = [
            (index, request)
            for index, segment in enumerate(block.segments)
            if (request := self._requests.get(segment.rid)) is not None
        ]
        self.rows += block.rows
        self._left[block.end] = len(wanted)
        if not wanted:
            self._release(block)
        for index, request in wanted:
            self._queues[hash(request.rid) % _THREADS].put((block, index, request))

    def _write(self, waiting: "_Queue") -> None:
        try:
            while (entry := waiting.get()) is not None and not self._ended.is_set():
                block, index, request = entry
                self._file(block, index, request)
                with self._lock:
                    self._left[block.end] -= 1
                    done = self._left[block.end] == 0
                if done:
                    self._release(block)
        finally:
            self._ended.set()

    def _release(self, block: Block) -> None:
        with self._lock:
            del self._left[block.end]
        self._ring.release(block)

    def _file(self, block: Block, index: int, request: Request) -> None:
        segment = block.segments[index]
        first, last = segment.start, segment.start + segment.length
        ids, aux, final = block.piece(index)
        check_ids(request, segment, ids)
        mask = request._mask[first:last]
        if request.final_from is not None and request.final is not None and last > request.final_from:
            keep = max(first, request.final_from)
            request.final[keep - request.final_from : last - request.final_from] = _floats(final, keep - first)
        if request.store and not request.bad:
            chosen = final if bool(mask.all()) else cut(final, mask)
            try:
                self._writer.write_encoded(request.sample, first, aux, chosen)
            except BadStates as bad:
                request.bad = f"{bad.fault} in {bad.tensor}"
        request._came[first:last] = True
        if request.whole or request.bad:
            request.on_settled()


_Queue = queue.SimpleQueue[tuple[Block, int, Request] | None]


class Marker:
    """Tells when everything that was in the ring, or on its way there, has been filed and released."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        self._reserved = ring.counters().reserved_rows
        self._head = -1

    def passed(self) -> bool:
        """Whether the consumer is past it. To be asked again and again, some milliseconds apart."""
        counters = self._ring.counters()
        if self._head < 0:
            # Rows that found room are published in order. Those that are given up again count in neither.
            if counters.rows >= self._reserved or counters.rows == counters.reserved_rows:
                self._head = self._ring.counters().head
            return False
        return counters.head - counters.used_bytes >= self._head


def check_ids(request: Request, segment: Segment, ids: Tensor) -> None:
    """Raises EngineError where rows came with other tokens than the sample has at their positions."""
    first, last = segment.start, segment.start + segment.length
    expected = request._ids[first:last]
    if torch.equal(expected, ids):
        return
    at = int((expected != ids).nonzero()[0]) if len(expected) == len(ids) else len(expected)
    sent = int(expected[at]) if at < len(expected) else None
    raise EngineError(
        f"request {request.rid}: row {first + at} came with token id {int(ids[at])}",
        expected=f"{sent}, the sample's",
        cause="the engine files rows under the wrong request or position, or rewrites token ids",
        next="report it with the engine's version; committed shards hold checked rows only",
    )


def _floats(part: Encoded, first: int) -> Tensor:
    return decode(part.values[first:], None if part.scales is None else part.scales[first:]).float()
