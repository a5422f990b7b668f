"""Rows on their way from the engine's process to the capture worker: a byte ring in a file of shared memory.

One producer process (the tap) and one consumer process. What travels is a *block* (`tap.block`), contiguous and 64-byte
aligned. `head` and `tail` count bytes since the ring was made, so that their difference is what lies in it; a block
that would cross the end of the memory is preceded by a filler up to the end. The producer reserves blocks, writes them
and publishes them in that order; the consumer reads published blocks in order and releases them in any.

Here is what both ends share; `tap.writer` is the producer's, `tap.reader` the consumer's.

The first page holds the counters (`tap.page`), the rest the blocks. A block's header: size, rows, length of its
segments' JSON, running number; a filler has no rows.
"""

import mmap
import os
import platform
import struct
from pathlib import Path
from typing import Self

import torch

from .block import Block, Layout, Rows, Segment, Slot, row_bytes, up
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

BLOCK_HEADER = struct.Struct("<QQQQ")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.005  # of one end that waits for the other


class Ring:
    """A mapped ring. Make the file with `Ring.create`, map it with `attach` of the end that is wanted.

    Attributes:
        layout, capacity: as it was created with.
        memory: uint8 [4096 + capacity], all of the file; for registering it with CUDA.
    """

    def __init__(self, path: str, mapped: mmap.mmap) -> None:
        self.path = path
        self._page = Page(path, mapped)
        self.layout, self.capacity = self._page.layout, self._page.capacity
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self._bytes = memoryview(mapped)

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

    @classmethod
    def attach(cls, path: str) -> Self:
        """Map a ring.

        Raises: OSError; RingError where the file is no whole ring of this format.
        """
        descriptor = os.open(path, os.O_RDWR)
        try:
            if os.fstat(descriptor).st_size <= HEADER_BYTES:
                raise RingError(f"{path}: no ring")
            return cls(path, mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    def counters(self) -> Counters:
        """Totals; anyone may ask, also while others write."""
        return self._page.counters()


def least_capacity(layout: Layout) -> int:
    """The smallest ring that makes sense: a quarter of it holds 16 rows and the segments of some requests."""
    return up(4 * (16 * row_bytes(layout) + 16384), mmap.PAGESIZE)
