"""Commits in a thread of their own: whoever files rows waits for no fsync and no upload."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

WAITING = 2  # beside the one under way; each is a whole shard on the local disk


class Commits:
    """Runs commits one after another, in the order in which they are given. Use as a context manager.

    Leaving waits for all that were given, also under an error: whole shards are kept. A commit that fails doesn't keep
    the ones behind it from being tried.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="eyas-commit")
        self._room = threading.Semaphore(1 + WAITING)
        self._lock = threading.Lock()
        self._given: list[Future[None]] = []

    def __enter__(self) -> "Commits":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._pool.shutdown()
        if kind is None:
            self.check()

    def give(self, commit: Callable[[], None]) -> None:
        """Have a commit done; waits while two others do. Raises: what an earlier one failed with."""
        self._room.acquire()
        with self._lock:
            given = self._pool.submit(commit)
            given.add_done_callback(lambda _: self._room.release())
            self._given.append(given)
        self.check()

    def check(self) -> None:
        """Raises what a commit failed with, each time."""
        with self._lock:
            done = [given for given in self._given if given.done()]
            self._given = [given for given in self._given if given not in done or given.exception() is not None]
        for given in done:
            given.result()
