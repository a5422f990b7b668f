"""The consumer's end of a ring (`tap.ring`)."""

import errno
import fcntl
import json
import mmap
import os
import threading
import time

from .block import ALIGN, Block, Segment, place, view
from .ring import BLOCK_HEADER, FIRST_PAUSE_S, HEADER_BYTES, LONGEST_PAUSE_S, Ring, RingError


class RingReader(Ring):
    """A ring to read from."""

    def __init__(self, path: str, mapped: mmap.mmap) -> None:
        super().__init__(path, mapped)
        self._lock_file = -1
        self._cursor = 0
        self._outstanding: dict[int, bool] = {}  # end of each block that is read, in order: is it released?
        self._lock = threading.Lock()

    def open(self) -> None:
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

    def close(self) -> None:
        """Detach: the reader's place is free again. The memory is unmapped when the last view on it is gone."""
        if self._lock_file >= 0:
            self._page.set("consumer_pid", 0)
            os.close(self._lock_file)
            self._lock_file = -1

    def beat(self) -> None:
        """Tell the producer that the consumer lives: at least every few seconds, from a thread that nothing else holds
        up. `read` and `release` do it too."""
        self._page.set("heartbeat_ns", time.monotonic_ns())

    def read(self, timeout_s: float) -> Block | None:
        """The next block, waited for up to `timeout_s`; None where there is none. One thread reads.

        Raises: RingError where the memory doesn't hold what was published.
        """
        deadline, pause = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while True:
            self.beat()
            if self._page.get("head") > self._cursor:
                return self._next_block()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, LONGEST_PAUSE_S)

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
        size, rows, length, number = self._header(first)
        if rows == 0:  # a filler
            first += size
            size, rows, length, number = self._header(first)
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

    def _header(self, where: int) -> tuple[int, int, int, int]:
        size, rows, length, number = BLOCK_HEADER.unpack_from(self._bytes, HEADER_BYTES + where % self.capacity)
        return size, rows, length, number
