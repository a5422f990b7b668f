"""Rows on their way from the engine's process to the capture worker: a byte ring in a file of shared memory.

One producer process (the tap) and one consumer process. What travels is a *block* (`tap.block`), contiguous and 64-byte
aligned. `head` and `tail` count bytes since the ring was made, so that their difference is what lies in it; a block
that would cross the end of the memory is preceded by a filler up to the end. The producer reserves blocks, writes them
and publishes them in that order; the consumer reads published blocks in order and releases them in any.

    0     magic, format, capacity, length of the layout's JSON, the JSON          written once
    1024  the producer's counters, 8 bytes each, little-endian
    2048  the consumer's counters
    4096  the blocks: `capacity` bytes

A block's header: size, rows, length of its segments' JSON, running number; a filler has no rows. Nothing is locked
between the processes: each counter has one writer, 8 aligned bytes are stored at once, and x86-64 shows stores to other
cores in the order in which they were made.
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

from .block import ALIGN, Block, Layout, Rows, Segment, Slot, place, row_bytes, table, up, view

__all__ = ["Block", "Counters", "Layout", "Ring", "RingError", "Rows", "Segment", "Slot", "least_capacity", "row_bytes"]

FORMAT = 1
HEADER_BYTES = 4096
STALE_S = 10.0  # a consumer that hasn't beaten for so long while the ring is full is taken for stopped

_MAGIC = b"EYASRING"
_BLOCK = struct.Struct("<QQQQ")
_PRODUCER = ("head", "producer_pid", "reserved_rows", "rows", "blocks", "dropped_rows", "waited_ns")
_CONSUMER = ("tail", "consumer_pid", "heartbeat_ns", "released_rows")
_WORDS = {name: at for first, names in ((128, _PRODUCER), (256, _CONSUMER)) for at, name in enumerate(names, first)}
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.005


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
        capacity = up(capacity_bytes, mmap.PAGESIZE)
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
        """Totals; anyone may ask, also while others write."""
        get = self._get
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

    # The producer's side. `reserve` and `abandon` belong to one thread, `publish` to one, the same or another.

    def open_writer(self) -> None:
        """Become the producer.

        Raises: RingError where another living process is it.
        """
        pid = self._get("producer_pid")
        if pid not in (0, os.getpid()) and _lives(pid):
            raise RingError(f"{self.path}: process {pid} writes this ring")
        self._set("producer_pid", os.getpid())

    def most_rows(self, segments: list[Segment]) -> int:
        """Rows that a block may have with these segments or some of them, so that it takes a quarter of the ring."""
        return (self.capacity // 4 - len(table(segments)) - ALIGN * 12) // row_bytes(self.layout)

    def reserve(self, rows: int, segments: list[Segment], patience_s: float) -> Slot | None:
        """Room for `rows` rows, or None where there is none: they are counted as dropped, `dropping` says why.

        Without a consumer, or with one that has died, nothing is kept. A full ring is waited for, up to `patience_s`,
        and as long as the consumer shows that it lives. Once given up, blocks are dropped at once until the consumer
        has released something.

        Raises: ValueError where the block would take over half of the ring.
        """
        text = table(segments)
        size, starts = place(self.layout, rows, len(text))
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
        self._write_block_header(first, (size, rows, len(text), self._number), text)
        self._number += 1
        self._reserved = first + size
        self._add("reserved_rows", rows)
        views = view(self.memory, HEADER_BYTES + first % self.capacity, self.layout, rows, starts)
        return Slot(rows, *views, begin, first + size)

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
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            why, tail = self._reader_absent(), self._get("tail")
            if why or self._reserved + size - tail <= self.capacity:
                break
            why = self._hopeless(tail, time.monotonic() - began, patience_s)
            if why:
                self._gave_up_at = tail
                break
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        if pause > _FIRST_PAUSE_S:
            self._add("waited_ns", int((time.monotonic() - began) * 1e9))
        return why

    def _reader_absent(self) -> str:
        pid = self._get("consumer_pid")
        if pid == 0:
            return "nobody reads the ring"
        return "" if _lives(pid) else f"the ring's reader, process {pid}, has ended"

    def _hopeless(self, tail: int, waited_s: float, patience_s: float) -> str:
        """Why a full ring is not waited for any longer."""
        silent_s = (time.monotonic_ns() - self._get("heartbeat_ns")) / 1e9
        if tail == self._gave_up_at:
            return "the ring is full, and its reader has released nothing since that was waited for"
        if silent_s > STALE_S:
            return f"the ring is full and its reader has been silent for {silent_s:.1f} s"
        if waited_s >= patience_s:
            return f"the ring has been full for {waited_s:.1f} s"
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
        """Tell the producer that the consumer lives: at least every few seconds, from a thread that nothing else holds
        up. `read` and `release` do it too."""
        self._set("heartbeat_ns", time.monotonic_ns())

    def read(self, timeout_s: float) -> Block | None:
        """The next block, waited for up to `timeout_s`; None where there is none. One thread reads.

        Raises: RingError where the memory doesn't hold what was published.
        """
        deadline, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while True:
            self.beat()
            if self._get("head") > self._cursor:
                return self._next_block()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    def release(self, block: Block) -> None:
        """Give a block's memory back; its views must no longer be used. Any thread, any order, once."""
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
        first = self._cursor
        size, rows, length, number = self._block_header(first)
        if rows == 0:  # a filler
            first += size
            size, rows, length, number = self._block_header(first)
        base, head = HEADER_BYTES + first % self.capacity, self._get("head")
        planned, starts = place(self.layout, rows, length)
        if planned != size or first + size > head:
            raise RingError(f"{self.path}: at {first} a block of {size} bytes, {planned} by its header; head {head}")
        entries = json.loads(bytes(self._bytes[base + ALIGN : base + ALIGN + length]))
        block = Block(
            [Segment(*entry) for entry in entries], view(self.memory, base, self.layout, rows, starts), first + size
        )
        if block.rows != rows:
            raise RingError(f"{self.path}: block {number} has {rows} rows, {block.rows} by its segments")
        with self._lock:
            self._cursor = block.end
            self._outstanding[block.end] = False
        return block

    # Both.

    def _write_block_header(self, where: int, values: tuple[int, int, int, int], text: bytes) -> None:
        at = HEADER_BYTES + where % self.capacity
        _BLOCK.pack_into(self._bytes, at, *values)
        self._bytes[at + ALIGN : at + ALIGN + len(text)] = text

    def _block_header(self, where: int) -> tuple[int, int, int, int]:
        size, rows, length, number = _BLOCK.unpack_from(self._bytes, HEADER_BYTES + where % self.capacity)
        return size, rows, length, number

    def _get(self, name: str) -> int:
        return self._words[_WORDS[name]]

    def _set(self, name: str, value: int) -> None:
        self._words[_WORDS[name]] = value

    def _add(self, name: str, value: int) -> None:
        self._words[_WORDS[name]] += value


def least_capacity(layout: Layout) -> int:
    """The smallest ring that makes sense: a quarter of it holds 16 rows and the segments of some requests."""
    return up(4 * (16 * row_bytes(layout) + 16384), mmap.PAGESIZE)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # under another user
        return True
    return True


def _read_header(path: str, mapped: mmap.mmap) -> tuple[Layout, int]:
    magic, (form, capacity, length) = mapped[:8], struct.unpack_from("<QQQ", mapped, 8)
    if magic != _MAGIC or form != FORMAT or len(mapped) != HEADER_BYTES + capacity:
        raise RingError(
            f"{path}: {len(mapped)} bytes with {magic!r}, format {form}; expected a ring of format {FORMAT}"
        )
    return Layout(**json.loads(mapped[32 : 32 + length])), capacity
