"""Packed rows, made ahead of time: read, checked, laid out and copied to the device while the step before computes.

One background thread reads the store's shards. On a GPU it copies what they hold (fp8 as it is) through pinned memory
on a stream of its own and decodes it there; on a CPU the same without pinning. At most AHEAD rows wait on the device.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.cpu import torch_threads
from eyas.drafter.align import IntArray, align
from eyas.drafter.pack import Pack, index_pack
from eyas.store.reader import StoreReader
from eyas.tap.encode import decode
from eyas.train.argmax import TargetArgmax
from eyas.train.batch import Schedule, StepPlan
from eyas.train.parallel import Parallel

AHEAD = 2
# Most threads of a copy on the CPU, beside a GPU. Of several trainings of SmolLM2's drafter on one host (32 cores, two
# H200) GPUs waited for data 80% of the time with 8 threads each (five trainings), 0.1% with 4 (four) and 0.0% with 1
# (three).
_COPYING_THREADS = 4
_LOOK_S = 0.001  # how often a step that waits for data looks whether the GPU has run dry


@dataclass(frozen=True)
class Row:
    """A packed row on the device.

    Attributes:
        target_argmax: the target's argmax at each teaching position of the pack, int64 [P].
    """

    pack: Pack
    target_argmax: Tensor


Item = tuple[StepPlan, Row | None]


class RowMaker:
    """Makes rows of the store's samples."""

    def __init__(
        self, reader: StoreReader, argmax: TargetArgmax, steps: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.reader, self.argmax, self.steps, self.dtype, self.device = reader, argmax, steps, dtype, device

    def row(self, samples: IntArray) -> Row:
        """One packed row of these samples (rows of the store's index)."""
        encoded = [self.reader.encoded(row) for row in samples.tolist()]
        masks = [sample.loss_mask.numpy() for sample in encoded]
        alignment = align(masks, self.steps)
        positions = np.concatenate([np.arange(len(mask)) for mask in masks])
        supervised = torch.cat([self.argmax.of(row) for row in samples.tolist()])
        pack = Pack(
            ids=[sample.id for sample in encoded],
            token_ids=self._move([sample.token_ids for sample in encoded]).long(),
            positions=self._move([torch.from_numpy(positions)]),
            loss_mask=np.concatenate(masks),
            aux=self._states([sample.aux for sample in encoded]).flatten(1),
            final=self._states([sample.final for sample in encoded]),
            alignment=alignment,
            index=index_pack(alignment, self.dtype, self.device),
        )
        return Row(pack, self._move([supervised[torch.from_numpy(alignment.final_rows)]]))

    def _states(self, parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
        """Values and scales of some samples -> their states in the compute dtype, decoded on the device."""
        values = self._move([values for values, _ in parts])
        scales = [scales for _, scales in parts if scales is not None]
        return decode(values, self._move(scales) if scales else None).to(self.dtype)

    def _move(self, parts: Sequence[Tensor]) -> Tensor:
        """Parts one after another on the device, by way of pinned memory where it is a GPU."""
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        whole = torch.empty(shape, dtype=parts[0].dtype, pin_memory=self.device.type == "cuda")
        start = 0
        for part in parts:
            whole[start : start + len(part)] = part
            start += len(part)
        return whole.to(self.device, non_blocking=True)


class Feed:
    """The rows of one process, from a step on, in order.

    Attributes:
        waited_s: seconds in which the device had nothing to do because a row was not there yet, the first one apart.
    """

    def __init__(self, schedule: Schedule, first: int, row: Callable[[IntArray], Row], parallel: Parallel) -> None:
        self._parallel = parallel
        self._items = self._make(schedule.from_step(first), row)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._stream = torch.cuda.Stream(parallel.device) if parallel.device.type == "cuda" else None
        self._coming: deque[Future[Item | None]] = deque()
        self._launched: Any = None
        self.waited_s = 0.0
        self._few_threads = ExitStack()

    def __enter__(self) -> "Feed":
        if self._stream is not None:
            self._few_threads.enter_context(torch_threads(_COPYING_THREADS))
        for _ in range(AHEAD):
            self._coming.append(self._thread.submit(self._next))
        wait([self._coming[0]])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._few_threads.close()

    def steps(self) -> Iterator[tuple[StepPlan, Iterator[Row | None]]]:
        """Each step with this process's rows of it, to be used up before the next; None: it has one row less."""
        while (item := self._take()) is not None:
            step, first = item
            yield step, self._rows(first, step.count(self._parallel.world))

    def _rows(self, first: Row | None, count: int) -> Iterator[Row | None]:
        yield first
        for _ in range(count - 1):
            item = self._take()
            assert item is not None
            yield item[1]

    def _make(self, steps: Iterator[StepPlan], row: Callable[[IntArray], Row]) -> Iterator[Item | None]:
        for step in steps:
            for samples in step.share(self._parallel.rank, self._parallel.world):
                yield step, None if samples is None else row(samples)
        while True:
            yield None

    def _next(self) -> Item | None:
        """In the thread: the next row, with all its copies done."""
        if self._stream is None:
            return next(self._items)
        torch.cuda.set_device(self._parallel.device)
        with torch.cuda.stream(self._stream):
            item = next(self._items)
            copied = self._mark()
        copied.synchronize()
        return item

    def _take(self) -> Item | None:
        """The next row, once the GPU is at the one before: that one is all that it has in its queue then."""
        before, self._launched = self._launched, self._mark()
        if before is not None:
            self._parallel.wait_for(before)
        future = self._coming.popleft()
        while not future.done():
            began = time.perf_counter()
            wait([future], None if self._launched is None else _LOOK_S)
            if self._launched is None or self._launched.query():
                self.waited_s += time.perf_counter() - began
        item = future.result()
        self._coming.append(self._thread.submit(self._next))
        if self._stream is not None:
            for tensor in tensors_of(item):
                tensor.record_stream(torch.cuda.current_stream())
        return item

    def _mark(self) -> Any:
        """The place in the current stream where everything is done that was launched so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in an object and what it holds."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)
    elif hasattr(value, "__dict__"):
        for part in vars(value).values():
            yield from tensors_of(part)
