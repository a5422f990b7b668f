"""The producer's end of a ring (`tap.ring`).

`reserve` and `abandon` belong to one thread, `publish` to one, the same or another.
"""

import mmap
import os
import time

from .block import ALIGN, Segment, Slot, place, row_bytes, table, view
from .ring import BLOCK_HEADER, FIRST_PAUSE_S, HEADER_BYTES, LONGEST_PAUSE_S, Ring, RingError

STALE_S = 10.0  # a consumer that hasn't beaten for so long while the ring is full is taken for stopped


class RingWriter(Ring):
    """A ring to write into.

    Attributes:
        dropping: why the last `reserve` returned None; empty after one that found room.
    """

    def __init__(self, path: str, mapped: mmap.mmap) -> None:
        super().__init__(path, mapped)
        self.dropping = ""
        self._reserved = self._published = self._page.get("head")
        self._number = self._page.get("blocks")
        self._gave_up_at = -1

    def open(self) -> None:
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
            self._write_header(begin, (filler, 0, 0, 0), b"")
        self._write_header(first, (size, rows, len(text), self._number), text)
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
        began, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            why, tail = self._reader_absent(), self._page.get("tail")
            if why or self._reserved + size - tail <= self.capacity:
                break
            why = self._hopeless(tail, time.monotonic() - began, patience_s)
            if why:
                self._gave_up_at = tail
                break
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE_S)
        if pause > FIRST_PAUSE_S:
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

    def _write_header(self, where: int, values: tuple[int, int, int, int], text: bytes) -> None:
        at = HEADER_BYTES + where % self.capacity
        BLOCK_HEADER.pack_into(self._bytes, at, *values)
        self._bytes[at + ALIGN : at + ALIGN + len(text)] = text


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # under another user
        return True
    return True
