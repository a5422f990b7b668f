"""Servers of several configurations of one run: as many at once as memory has room for."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from eyas.engine.server import OtherSettings, start_server, stop_server
from eyas.engine.state import ServerState, running
from eyas.errors import EngineError
from eyas.progress import say
from eyas.run import Run
from eyas.signals import Stop


class Pool:
    """Keeps at most `at_once` servers; the one that was used longest ago goes first.

    Args:
        runs: name -> the run whose server it is (engine.drafting.serving_run), each with an engine folder of its own.
        at_once: servers that may live together.

    Attributes:
        started: how many servers were started.
    """

    def __init__(self, runs: Mapping[str, Run], at_once: int, stop: Stop | None) -> None:
        self._runs, self._at_once, self._stop = dict(runs), at_once, stop
        self._living: dict[str, ServerState] = {}  # in order of use
        self.started = 0

    def add(self, runs: Mapping[str, Run]) -> None:
        """Name further servers."""
        self._runs |= runs

    def get(self, name: str) -> ServerState:
        """The server of this name, ready.

        Raises: EngineError where it can't be started, or has ended since.
        """
        state = self._living.get(name)
        if state is None:
            while len(self._living) >= self._at_once:
                self.drop(next(iter(self._living)))
            say(f"serving: starting {name}")
            state = self._start(name)
            self.started += 1
        elif not state.alive():
            raise EngineError(
                f"the server of {name} (pid {state.pid}) ended while it was measured",
                expected="a server that lives on",
                next=f"less {state.log}",
            )
        self._living.pop(name, None)
        self._living[name] = state
        return state

    def drop(self, name: str) -> None:
        """End the server of this name, where there is one."""
        if self._living.pop(name, None) is not None:
            _tell(name, stop_server(self._runs[name]))

    def prepare(self, names: Sequence[str]) -> dict[str, EngineError]:
        """Start several at the same time, as many as may live together; returns the errors of those that failed."""
        wanted = [name for name in names if name not in self._living][: self._at_once - len(self._living)]
        if len(wanted) < 2:
            return {}
        say(f"serving: starting {len(wanted)} servers at the same time: {', '.join(wanted)}")
        with ThreadPoolExecutor(len(wanted)) as threads:
            futures = {name: threads.submit(self._start, name) for name in wanted}
        errors = {name: future.exception() for name, future in futures.items()}
        self._living |= {name: future.result() for name, future in futures.items() if errors[name] is None}
        self.started += sum(error is None for error in errors.values())
        failed = {name: error for name, error in errors.items() if isinstance(error, EngineError)}
        for name, error in errors.items():
            if error is not None and name not in failed:
                raise error
        return failed

    @property
    def living(self) -> list[str]:
        """Names of servers that are up, the one used last at the end."""
        return list(self._living)

    def close(self) -> None:
        """End all at the same time: one after the other each would be seen to leave the others' GPU memory behind.
        Those that a call left which was killed are ended too, whether this one needed them or not."""
        names = [name for name, run in self._runs.items() if name in self._living or running(run)]
        self._living = {}
        if not names:
            return
        with ThreadPoolExecutor(len(names)) as threads:
            told = [(name, threads.submit(stop_server, self._runs[name])) for name in names]
        for name, future in told:
            _tell(name, future.result())

    def _start(self, name: str) -> ServerState:
        """A server that a killed call left is used where its settings are the same, and ended where they are not."""
        try:
            return start_server(self._runs[name], stop=self._stop)
        except OtherSettings:
            _tell(name, stop_server(self._runs[name]))
            return start_server(self._runs[name], stop=self._stop)


def _tell(name: str, lines: Sequence[str]) -> None:
    for line in lines:
        say(f"serving: {name}: {line}")


@contextlib.contextmanager
def pool(runs: Mapping[str, Run], at_once: int, stop: Stop | None) -> Iterator[Pool]:
    """A pool whose servers are ended when the block is left."""
    made = Pool(runs, at_once, stop)
    try:
        yield made
    finally:
        made.close()
