"""Rows on their way from the engine's process to the capture worker: a byte ring in a file of shared memory.

One producer process (the tap) and one consumer process. What travels is a *block*: the rows of one forward pass, or a
part of them, contiguous, 64-byte aligned. `head` and `tail` count bytes since the ring was made, so that their
difference is what lies in it; a block that would cross the end of the memory is preceded by a filler up to the end.
The producer reserves blocks, writes them and publishes them in that order; the consumer reads published blocks in
order and releases them in any.

    0     magic, format, capacity, length of the layout's JSON, the JSON          written once
    1024  the producer's counters, 8 bytes each, little-endian
    2048  the consumer's counters
    4096  the blocks: `capacity` bytes

A block: 64 bytes of header (size, rows, length of the segments' JSON, running number), the segments as JSON
[[rid, start, length], ...], then the tensors of `_fields`. Counters and data need no lock: each counter has one
writer, 8 aligned bytes are stored at once, and x86-64 shows stores to other cores in the order they were made.
"""

import errno
import fcntl
import json
import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .encode import DTYPES, Encoded

AUX_LAYERS = 3
FORMAT = 1
HEADER_BYTES = 4096
STALE_NS = 10_000_000_000  # a consumer that hasn't beaten for 10 s while the ring is full is taken for stopped

_MAGIC = b"EYASRING"
_ALIGN = 64
_BLOCK = struct.Struct("<QQQQ")
_PRODUCER = {
    "head": 0,
    "producer_pid": 1,
    "reserved_rows": 2,
    "rows": 3,
    "blocks": 4,
    "dropped_rows": 5,
    "waited_ns": 6,
}
_CONSUMER = {"tail": 0, "consumer_pid": 1, "heartbeat_ns": 2, "released_rows": 3}
_PLACES = {name: (1024 >> 3) + at for name, at in _PRODUCER.items()} | {
    name: (2048 >> 3) + at for name, at in _CONSUMER.items()
}


class RingError(Exception):
    """The file is no ring of this format, or somebody else uses it."""


class Segment(NamedTuple):
    """Rows of request `rid` at positions start..start+length of its token ids."""

    rid: str
    start: int
    length: int


class Layout(NamedTuple):
    """What a row holds: 3 aux states and the final state of one token, encoded as `tap.encode` does."""

    hidden_size: int
    encoding: str
    final_encoding: str


class Counters(NamedTuple):
    """Totals since the ring was made.

    Attributes:
        capacity_bytes, used_bytes: of the blocks' memory; used: published and not released.
        reserved_rows: rows that found room. While it exceeds `rows` some are still on their way from the GPU.
        rows, blocks: published.
        released_rows: given back by consumers.
        dropped_rows: rows that found none, whatever the reason.
        waited_s: time the engine's forward path spent waiting for room.
        producer_pid, consumer_pid: 0 where there is none.
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


class Slot(NamedTuple):
    """A reserved block: its tensors, as views on the ring, to be filled before it is published.

    Attributes:
        rows: number of rows n.
        token_ids: int32 [n].
        aux: values [n, 3, H], scales and error as in Encoded ([n, 3] and [n, 3, 2]; None for bf16), faults [n, 3].
        final: values [n, H], scales [n], faults [n], error [n, 2].
        begin, end: place in the ring, in bytes since it was made; a filler before the block is included.
    """

    rows: int
    token_ids: Tensor
    aux: Encoded
    final: Encoded
    begin: int
    end: int


class Block:
    """A published block, as the consumer sees it. Its tensors are views on the ring, valid until it is released.

    Attributes:
        segments: whose rows these are, in order.
        rows: the sum of their lengths.
        token_ids, aux, final: all rows, as in Slot.
    """

    def __init__(self, segments: list[Segment], slot: Slot) -> None:
        self.segments, self.rows, self.end = segments, slot.rows, slot.end
        self.token_ids, self.aux, self.final = slot.token_ids, slot.aux, slot.final
        self._firsts = [0]
        for segment in segments:
            self._firsts.append(self._firsts[-1] + segment.length)

    def piece(self, i: int, mask_rows: Tensor | None = None) -> tuple[Tensor, Encoded, Encoded]:
        """Token ids, aux states and final states of segment `i`: views, valid until the block is released.

        Args:
            mask_rows: bool [length]: the rows whose final states are wanted, which then are a copy; None: all.
        """
        rows = slice(self._firsts[i], self._firsts[i + 1])
        final = _cut(self.final, rows)
        return self.token_ids[rows], _cut(self.aux, rows), final if mask_rows is None else _cut(final, mask_rows)


class Ring:
    """A mapped ring. Make the file with `Ring.create`, map it with `Ring.attach`.

    Attributes:
        layout, capacity: as it was created with.
        memory: uint8 [4096 + capacity], all of the file; for registering it with CUDA.
        dropping: why the last `reserve` returned None; empty after one that found room.
    """

    def __init__(self, path: str, mapped: mmap.mmap) -> None:
        self.path, self.dropping = path, ""
        self.layout, self.capacity = _read_header(path, mapped)
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._bytes = memoryview(mapped)
        self._words = self._bytes.cast("Q")
        self._reserved = self._published = self._get("head")
        self._number = self._get("blocks")
        self._gave_up_at = -1
        self._lock_file = -1
        self._cursor = 0
        self._outstanding: dict[int, bool] = {}  # end of each block that is read, in order: is it released?
        self._lock = threading.Lock()

    @staticmethod
    def create(path: str, capacity_bytes: int, layout: Layout) -> None:
        """Make the file, all its memory taken now: a full /dev/shm fails here and not with SIGBUS later.

        Args:
            capacity_bytes: room for blocks, rounded up to whole pages; at least `least_capacity(layout)`.
        Raises: OSError (ENOSPC, EEXIST); ValueError for a capacity too small.
        """
        capacity = _up(capacity_bytes, mmap.PAGESIZE)
        if capacity < least_capacity(layout):
            raise ValueError(f"a ring of {capacity_bytes} bytes; at least {least_capacity(layout)} for {layout}")
        text = json.dumps(layout._asdict()).encode()
        header = _MAGIC + struct.pack("<QQQ", FORMAT, capacity, len(text)) + text
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + capacity)
            os.pwrite(descriptor, header, 0)
        except BaseException:
            Path(path).unlink()
            raise
        finally:
            os.close(descriptor)

    @staticmethod
    def attach(path: str) -> "Ring":
        """Map a ring.

        Raises: OSError; RingError where the file is no whole ring of this format.
        """
        descriptor = os.open(path, os.O_RDWR)
        try:
            if os.fstat(descriptor).st_size <= HEADER_BYTES:
                raise RingError(f"{path}: no ring")
            return Ring(path, mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Detach: a reader's place is free again. The memory is unmapped when the last view on it is gone."""
        if self._lock_file >= 0:
            self._set("consumer_pid", 0)
            os.close(self._lock_file)
            self._lock_file = -1

    def counters(self) -> Counters:
        """Totals, read by anyone, also while others write."""
        get = self._get
        tail = get("tail")  # before head: a tail that is read later might be past it
        return Counters(
            self.capacity,
            get("head") - tail,
            get("reserved_rows"),
            get("rows"),
            get("blocks"),
            get("released_rows"),
            get("dropped_rows"),
            get("waited_ns") / 1e9,
            get("producer_pid"),
            get("consumer_pid"),
        )

    # The producer's side.

    def open_writer(self) -> None:
        """Become the producer."""
        self._set("producer_pid", os.getpid())

    def most_rows(self, segments: list[Segment]) -> int:
        """Rows that a block may have with these segments or some of them: no block takes over a quarter of the ring."""
        return (self.capacity // 4 - _table_bytes(segments) - _ALIGN * 12) // row_bytes(self.layout)

    def reserve(self, rows: int, segments: list[Segment], patience_s: float) -> Slot | None:
        """Room for `rows` rows, or None where there is none: they are counted as dropped, `dropping` says why.

        Without a consumer, or with one that has died, nothing is kept. A full ring is waited for, up to `patience_s`,
        and as long as the consumer shows that it lives. Once given up, blocks are dropped at once until the consumer
        has released something.

        Raises: ValueError where the block would take over half of the ring.
        """
        size, starts = _place(self.layout, rows, _table_bytes(segments))
        if size > self.capacity // 2:
            raise ValueError(f"a block of {size} bytes in a ring of {self.capacity}")
        at = self._reserved % self.capacity
        filler = self.capacity - at if at + size > self.capacity else 0
        self.dropping = self._wait_for(filler + size, patience_s)
        if self.dropping:
            self._add("dropped_rows", rows)
            return None
        begin, first = self._reserved, self._reserved + filler
        if filler:
            self._write_block_header(begin, (filler, 0, 0, 0), b"")
        text = _table(segments)
        self._write_block_header(first, (size, rows, len(text), self._number), text)
        self._number += 1
        self._reserved = first + size
        self._add("reserved_rows", rows)
        return self._slot(begin, first, size, rows, starts)

    def publish(self, slot: Slot) -> None:
        """Show a filled block to the consumer.

        Raises: RuntimeError where an earlier one isn't published yet.
        """
        if slot.begin != self._published:
            raise RuntimeError(f"block {slot.begin}..{slot.end} published after {self._published}: out of order")
        self._published = slot.end
        self._add("rows", slot.rows)
        self._add("blocks", 1)
        self._set("head", slot.end)

    def abandon(self, slot: Slot) -> None:
        """Give back the block that was reserved last; its rows count as dropped."""
        if slot.end != self._reserved or slot.begin < self._published:
            raise RuntimeError(f"block {slot.begin}..{slot.end} is not the last of those that aren't published")
        self._reserved = slot.begin
        self._number -= 1
        self._add("reserved_rows", -slot.rows)
        self._add("dropped_rows", slot.rows)

    def _wait_for(self, size: int, patience_s: float) -> str:
        """Wait until `size` bytes are free; returns why they are not, or nothing."""
        began, pause = time.monotonic(), 0.0002
        while True:
            absent = self._consumer_absent()
            tail = self._get("tail")
            if absent or self._reserved + size - tail <= self.capacity:
                break
            waited = time.monotonic() - began
            beaten_s = (time.monotonic_ns() - self._get("heartbeat_ns")) / 1e9
            if tail == self._gave_up_at:
                absent = "the ring is full and its reader has released nothing since it was given up"
            elif waited >= patience_s:
                absent = f"the ring has been full for {waited:.1f} s"
            elif beaten_s * 1e9 > STALE_NS:
                absent = f"the ring is full and its reader has been silent for {beaten_s:.1f} s"
            if absent:
                self._gave_up_at = tail
                break
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)
        if pause > 0.0002:
            self._add("waited_ns", int((time.monotonic() - began) * 1e9))
        return absent

    def _consumer_absent(self) -> str:
        pid = self._get("consumer_pid")
        if pid == 0:
            return "nobody reads the ring"
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return f"the ring's reader, process {pid}, has ended"
        except PermissionError:  # it lives, under another user
            pass
        return ""

    # The consumer's side.

    def open_reader(self) -> None:
        """Become the consumer, at the oldest block that no consumer has released.

        Raises: RingError where another process reads this ring. A dead one's place is free at once.
        """
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise RingError(f"{self.path}: process {self._get('consumer_pid')} reads this ring") from error
        self._lock_file = descriptor
        self._cursor = self._get("tail")
        self.beat()
        self._set("consumer_pid", os.getpid())

    def beat(self) -> None:
        """Tell the producer that the consumer lives: at least every few seconds. `read` and `release` do it too."""
        self._set("heartbeat_ns", time.monotonic_ns())

    def read(self, timeout_s: float) -> Block | None:
        """The next block, waited for up to `timeout_s`; None where there is none. One thread reads.

        Raises: RingError where the memory doesn't hold what was published.
        """
        deadline, pause = time.monotonic() + timeout_s, 0.0002
        while True:
            self.beat()
            if self._get("head") > self._cursor:
                return self._next_block()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, 0.005)

    def release(self, block: Block) -> None:
        """Give a block's memory back; its views must no longer be used. Any thread, any order."""
        with self._lock:
            if self._outstanding.get(block.end, True):
                raise RuntimeError(f"the block that ends at {block.end} is released already")
            self._outstanding[block.end] = True
            self._add("released_rows", block.rows)
            for end, released in list(self._outstanding.items()):
                if not released:
                    break
                del self._outstanding[end]
                self._set("tail", end)
        self.beat()

    def _next_block(self) -> Block:
        begin, first = self._cursor, self._cursor
        size, rows, length, number = self._block_header(first)
        if rows == 0:  # a filler
            first += size
            size, rows, length, number = self._block_header(first)
        table = HEADER_BYTES + first % self.capacity + _ALIGN
        if size < _ALIGN + length or not 0 < first + size <= self._get("head"):
            raise RingError(
                f"{self.path}: block {number} of {size} bytes at {first}; published up to {self._get('head')}"
            )
        segments = [Segment(*entry) for entry in json.loads(bytes(self._bytes[table : table + length]))]
        planned, starts = _place(self.layout, rows, length)
        if planned != size or sum(segment.length for segment in segments) != rows:
            raise RingError(f"{self.path}: block {number} has {size} bytes and {rows} rows; {planned} by its segments")
        block = Block(segments, self._slot(begin, first, size, rows, starts))
        with self._lock:
            self._cursor = block.end
            self._outstanding[block.end] = False
        return block

    # Both.

    def _slot(self, begin: int, first: int, size: int, rows: int, starts: list[int]) -> Slot:
        base = HEADER_BYTES + first % self.capacity
        views: dict[str, Tensor] = {}
        for (name, dtype, shape), start in zip(_fields(self.layout), starts, strict=True):
            length = _bytes_of(dtype, shape) * rows
            views[name] = self.memory[base + start : base + start + length].view(dtype).view(rows, *shape)
        parts = [
            Encoded(*(views.get(f"{kind}_{name}") for name in ("values", "scales", "faults", "error")))  # type: ignore[arg-type]
            for kind in ("aux", "final")
        ]
        return Slot(rows, views["token_ids"], parts[0], parts[1], begin, first + size)

    def _write_block_header(self, place: int, values: tuple[int, int, int, int], table: bytes) -> None:
        at = HEADER_BYTES + place % self.capacity
        _BLOCK.pack_into(self._bytes, at, *values)
        self._bytes[at + _ALIGN : at + _ALIGN + len(table)] = table

    def _block_header(self, place: int) -> tuple[int, int, int, int]:
        size, rows, length, number = _BLOCK.unpack_from(self._bytes, HEADER_BYTES + place % self.capacity)
        return size, rows, length, number

    def _get(self, name: str) -> int:
        return self._words[_PLACES[name]]

    def _set(self, name: str, value: int) -> None:
        self._words[_PLACES[name]] = value

    def _add(self, name: str, value: int) -> None:
        self._words[_PLACES[name]] += value


def row_bytes(layout: Layout) -> int:
    """Bytes of one row in the ring."""
    return sum(_bytes_of(dtype, shape) for _, dtype, shape in _fields(layout))


def least_capacity(layout: Layout) -> int:
    """The smallest ring that makes sense: a quarter of it holds 16 rows and the segments of some requests."""
    return _up(4 * (16 * row_bytes(layout) + 16384), mmap.PAGESIZE)


def _fields(layout: Layout) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of a row of each tensor of a block, in the order they lie in it."""
    hidden, wide = layout.hidden_size, (AUX_LAYERS,)
    fields: list[tuple[str, torch.dtype, tuple[int, ...]]] = [("token_ids", torch.int32, ())]
    for kind, encoding, shape in (("aux", layout.encoding, wide), ("final", layout.final_encoding, ())):
        fields.append((f"{kind}_values", DTYPES[encoding], (*shape, hidden)))
        fields.append((f"{kind}_faults", torch.int8, shape))
        if encoding == "fp8":
            fields.append((f"{kind}_scales", torch.float32, shape))
            fields.append((f"{kind}_error", torch.float32, (*shape, 2)))
    return fields


def _place(layout: Layout, rows: int, table_bytes: int) -> tuple[int, list[int]]:
    """Bytes of a block, and where each of its tensors starts."""
    at, starts = _up(_ALIGN + table_bytes, _ALIGN), []
    for _, dtype, shape in _fields(layout):
        starts.append(at)
        at += _up(_bytes_of(dtype, shape) * rows, _ALIGN)
    return at, starts


def _bytes_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def _table(segments: list[Segment]) -> bytes:
    return json.dumps(segments, separators=(",", ":")).encode()


def _table_bytes(segments: list[Segment]) -> int:
    return len(_table(segments))


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _cut(part: Encoded, rows: slice | Tensor) -> Encoded:
    return Encoded(*(None if tensor is None else tensor[rows] for tensor in part))  # type: ignore[arg-type]


def _read_header(path: str, mapped: mmap.mmap) -> tuple[Layout, int]:
    magic, (form, capacity, length) = mapped[:8], struct.unpack_from("<QQQ", mapped, 8)
    if magic != _MAGIC or form != FORMAT or len(mapped) != HEADER_BYTES + capacity:
        raise RingError(
            f"{path}: {len(mapped)} bytes with {magic!r}, format {form}; expected a ring of format {FORMAT}"
        )
    return Layout(**json.loads(mapped[32 : 32 + length])), capacity
