"""The same work in this process or in many: chunks in, what they gave out, in order."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from eyas.data.make import Made, Maker
from eyas.data.read import Chunk
from eyas.errors import DataError

_maker: Maker | None = None


class Job(NamedTuple):
    """A chunk with what is known of its source.

    Attributes:
        source, file: places in the recipe's list of sources and in the list of all files.
        shape: of its records.
        split: the source's own, or "".
    """

    source: int
    file: int
    chunk: Chunk
    shape: str
    split: str


def run_jobs(maker: Maker, jobs: Iterator[Job], workers: int) -> Iterator[tuple[Job, Made]]:
    """Every job with what it gave, in order; with `workers` > 1 in so many processes.

    Processes start anew instead of forking: the tokenizer's threads don't survive a fork. At most three chunks a
    worker are under way, so memory stays bounded.
    """
    if workers <= 1:
        for job in jobs:
            yield job, maker.make(job.chunk, job.shape, job.split)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start, (maker, os.getpid())) as pool:
        under_way: deque[tuple[Job, Future[Made]]] = deque()
        try:
            for job in jobs:
                under_way.append((job, pool.submit(_work, job.chunk, job.shape, job.split)))
                if len(under_way) >= 3 * workers:
                    yield _finish(*under_way.popleft())
            while under_way:
                yield _finish(*under_way.popleft())
        finally:
            pool.shutdown(cancel_futures=True)


def _finish(job: Job, future: Future[Made]) -> tuple[Job, Made]:
    try:
        return job, future.result()
    except BrokenProcessPool:
        raise DataError(
            f"{job.chunk.path}, near record {job.chunk.first}: a worker process ended without a word",
            cause="the system ran out of memory, or it was killed",
            next="run again with --set data.workers=1; nothing was written",
        ) from None


def _start(maker: Maker, parent: int) -> None:
    global _maker
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # One core each: the tokenizer's own threads would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    _maker = maker


def _end_with(parent: int) -> None:
    """End this process when its parent was killed: it would wait for work for ever, as its siblings hold the queue."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _work(chunk: Chunk, shape: str, split: str) -> Made:
    assert _maker is not None
    return _maker.make(chunk, shape, split)
