"""Rows on their way from the engine's process to the capture worker: a byte ring in a file of shared memory.

One producer process (the tap) and one consumer process. What travels is a *block* (`tap.block`), contiguous and 64-byte
aligned. `head` and `tail` count bytes since the ring was made, so that their difference is what lies in it; a block
that would cross the end of the memory is preceded by a filler up to the end. The producer reserves blocks, writes them
and publishes them in that order; the consumer reads published blocks in order and releases them in any.

The first page holds the counters (`tap.page`), the rest the blocks. A block's header: size, rows, length of its
segments' JSON, running number; a filler has no rows.
"""

import errno
import fcntl
import json
import mmap
import os
import platform
import struct
import threading
import time
from pathlib import Path

import torch

from .block import ALIGN, Block, Layout, Rows, Segment, Slot, place, row_bytes, table, up, view
from .page import HEADER_BYTES, ORDERED_MACHINES, Counters, Page, RingError

__all__ = [
    "HEADER_BYTES",
    "ORDERED_MACHINES",
    "Block",
    "Counters",
    "Layout",
    "Ring",
    "RingError",
    "Rows",
    "Segment",
    "Slot",
    "least_capacity",
    "row_bytes",
]

STALE_S = 10.0  # a consumer that hasn't beaten for so long while the ring is full is taken for stopped

_BLOCK = struct.Struct("<QQQQ")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.005


class Ring:
    """A mapped ring. Make the file with `Ring.create`, map it with `Ring.attach`.

    Attributes:
        layout, capacity: as it was created with.
        memory: uint8 [4096 + capacity], all of the file; for registering it with CUDA.
        dropping: why the last `reserve` returned None; empty after one that found room.
    """

    def __init__(self, path: str, mapped: mmap.mmap) -> None:
        self.path, self.dropping = path, ""
        self._page = Page(path, mapped)
        self.layout, self.capacity = self._page.layout, self._page.capacity
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._bytes = memoryview(mapped)
        self._reserved = self._published = self._page.get("head")
        self._number = self._page.get("blocks")
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
        Raises: OSError (ENOSPC, EEXIST); ValueError for a capacity too small; RingError on a processor that shows
            stores to others in another order.
        """
        if platform.machine() not in ORDERED_MACHINES:
            raise RingError(f"{path}: a ring on {platform.machine()}; right on {', '.join(ORDERED_MACHINES)} alone")
        capacity = up(capacity_bytes, mmap.PAGESIZE)
        if capacity < least_capacity(layout):
            raise ValueError(f"a ring of {capacity_bytes} bytes; at least {least_capacity(layout)} for {layout}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + capacity)
            os.pwrite(descriptor, Page.fresh(capacity, layout), 0)
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
            self._page.set("consumer_pid", 0)
            os.close(self._lock_file)
            self._lock_file = -1

    def counters(self) -> Counters:
        """Totals; anyone may ask, also while others write."""
        return self._page.counters()

    # The producer's side. `reserve` and `abandon` belong to one thread, `publish` to one, the same or another.

    def open_writer(self) -> None:
        """Become the producer.

        Raises: RingError where another living process is it.
        """
        pid = self._page.get("producer_pid")
        if pid not in (0, os.getpid()) and _lives(pid):
            raise RingError(f"{self.path}: process {pid} writes this ring")
        self._page.set("producer_pid", os.getpid())

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
            self._page.add("dropped_rows", rows)
            return None
        begin, first = self._reserved, self._reserved + filler
        if filler:
            self._write_block_header(begin, (filler, 0, 0, 0), b"")
        self._write_block_header(first, (size, rows, len(text), self._number), text)
        self._number += 1
        self._reserved = first + size
        self._page.add("reserved_rows", rows)
        views = view(self.memory, HEADER_BYTES + first % self.capacity, self.layout, rows, starts)
        return Slot(rows, *views, begin, first + size)

    def publish(self, slot: Slot) -> None:
        """Show a filled block to the consumer.

        Raises: RuntimeError where an earlier one isn't published yet.
        """
        if slot.begin != self._published:
            raise RuntimeError(f"block {slot.begin}..{slot.end} published after {self._published}: out of order")
        self._published = slot.end
        self._page.add("rows", slot.rows)
        self._page.add("blocks", 1)
        self._page.set("head", slot.end)

    def abandon(self, slot: Slot) -> None:
        """Give back the block that was reserved last; its rows count as dropped."""
        if slot.end != self._reserved or slot.begin < self._published:
            raise RuntimeError(f"block {slot.begin}..{slot.end} is not the last of those that aren't published")
        self._reserved = slot.begin
        self._number -= 1
        self._page.add("reserved_rows", -slot.rows)
        self._page.add("dropped_rows", slot.rows)

    def _wait_for(self, size: int, patience_s: float) -> str:
        """Wait until `size` bytes are free; returns why they are not, or nothing."""
        began, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            why, tail = self._reader_absent(), self._page.get("tail")
            if why or self._reserved + size - tail <= self.capacity:
                break
            why = self._hopeless(tail, time.monotonic() - began, patience_s)
            if why:
                self._gave_up_at = tail
                break
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        if pause > _FIRST_PAUSE_S:
            self._page.add("waited_ns", int((time.monotonic() - began) * 1e9))
        return why

    def _reader_absent(self) -> str:
        pid = self._page.get("consumer_pid")
        if pid == 0:
            return "nobody reads the ring"
        return "" if _lives(pid) else f"the ring's reader, process {pid}, has ended"

    def _hopeless(self, tail: int, waited_s: float, patience_s: float) -> str:
        """Why a full ring is not waited for any longer."""
        silent_s = (time.monotonic_ns() - self._page.get("heartbeat_ns")) / 1e9
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
            raise RingError(f"{self.path}: process {self._page.get('consumer_pid')} reads this ring") from error
        self._lock_file = descriptor
        self._cursor = self._page.get("tail")
        self.beat()
        self._page.set("consumer_pid", os.getpid())

    def beat(self) -> None:
        """Tell the producer that the consumer lives: at least every few seconds, from a thread that nothing else holds
        up. `read` and `release` do it too."""
        self._page.set("heartbeat_ns", time.monotonic_ns())

    def read(self, timeout_s: float) -> Block | None:
        """The next block, waited for up to `timeout_s`; None where there is none. One thread reads.

        Raises: RingError where the memory doesn't hold what was published.
        """
        deadline, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while True:
            self.beat()
            if self._page.get("head") > self._cursor:
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
            self._page.add("released_rows", block.rows)
            for end, released in list(self._outstanding.items()):
                if not released:
                    break
                del self._outstanding[end]
                self._page.set("tail", end)
        self.beat()

    def _next_block(self) -> Block:
        first = self._cursor
        size, rows, length, number = self._block_header(first)
        if rows == 0:  # a filler
            first += size
            size, rows, length, number = self._block_header(first)
        base, head = HEADER_BYTES + first % self.capacity, self._page.get("head")
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
