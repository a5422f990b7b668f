"""A ring's first page: what was written when it was made, and the counters of both sides.

    0     magic, format, capacity, length of the layout's JSON, the JSON          written once
    1024  the producer's counters, 8 bytes each, little-endian
    2048  the consumer's counters

Nothing is locked between the processes: each counter has one writer, 8 aligned bytes are stored at once, and x86-64
shows stores to other cores in the order in which they were made. Elsewhere (aarch64) a reader might see `head` before
the rows: no ring is made there.
"""

import json
import mmap
import struct
from typing import NamedTuple

from .block import Layout

FORMAT = 1
ORDERED_MACHINES = ("x86_64",)  # as platform.machine() names them
HEADER_BYTES = 4096

_MAGIC = b"EYASRING"
_PRODUCER = ("head", "producer_pid", "reserved_rows", "rows", "blocks", "dropped_rows", "waited_ns")
_CONSUMER = ("tail", "consumer_pid", "heartbeat_ns", "released_rows")
_WORDS = {name: at for first, names in ((128, _PRODUCER), (256, _CONSUMER)) for at, name in enumerate(names, first)}


class RingError(Exception):
    """The file is no ring of this format, or somebody else uses it."""


class Counters(NamedTuple):
    """Totals since the ring was made.

    Attributes:
        capacity_bytes, used_bytes: of the blocks' memory; used: published and not released.
        reserved_rows: rows that found room. While it exceeds `rows` some are still on their way from the GPU.
        rows, blocks: published.
        released_rows: given back by consumers.
        dropped_rows: rows that were not kept, whatever the reason.
        waited_s: time the engine's forward path spent waiting for room.
        producer_pid, consumer_pid: 0 where there is none.
        head: bytes published, fillers included; `head - used_bytes` of them are released.
    """

    capacity_bytes: int
    used_bytes: int
    reserved_rows: int
    rows: int
    blocks: int
    released_rows: int
    dropped_rows: int
    waited_s: float
    producer_pid: int
    consumer_pid: int
    head: int


class Page:
    """The first page of a mapped ring.

    Attributes:
        layout, capacity: as the ring was created with.
    """

    def __init__(self, path: str, mapped: mmap.mmap) -> None:
        magic, (form, self.capacity, length) = mapped[:8], struct.unpack_from("<QQQ", mapped, 8)
        if magic != _MAGIC or form != FORMAT or len(mapped) != HEADER_BYTES + self.capacity:
            raise RingError(
                f"{path}: {len(mapped)} bytes with {magic!r}, format {form}; expected a ring of format {FORMAT}"
            )
        self.layout = Layout(**json.loads(mapped[32 : 32 + length]))
        self._words = memoryview(mapped).cast("Q")

    @staticmethod
    def fresh(capacity: int, layout: Layout) -> bytes:
        """What a new ring begins with; the counters behind it are 0."""
        text = json.dumps(layout._asdict()).encode()
        return _MAGIC + struct.pack("<QQQ", FORMAT, capacity, len(text)) + text

    def get(self, name: str) -> int:
        return self._words[_WORDS[name]]

    def set(self, name: str, value: int) -> None:
        self._words[_WORDS[name]] = value

    def add(self, name: str, value: int) -> None:
        self._words[_WORDS[name]] += value

    def counters(self) -> Counters:
        """Totals; anyone may ask, also while others write."""
        get = self.get
        tail = get("tail")  # before head: a tail that is read later might be past it
        head = get("head")
        return Counters(
            self.capacity,
            head - tail,
            get("reserved_rows"),
            get("rows"),
            get("blocks"),
            get("released_rows"),
            get("dropped_rows"),
            get("waited_ns") / 1e9,
            get("producer_pid"),
            get("consumer_pid"),
            head,
        )
