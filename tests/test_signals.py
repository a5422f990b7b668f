"""The first signal is noted, the second ends the process, and handlers come back."""

import io
import os
import pty
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eyas.progress import say
from eyas.signals import stop_on_signals


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as Python has it, also where the tests were started in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_first_signal_is_noted_and_the_second_acts(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stop_on_signals("this step") as stop:
        assert stop.signum is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signum == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert "SIGTERM: finishing this step, then stopping" in capfd.readouterr().err


class Interrupting(io.RawIOBase):
    """Standard error during whose first write a signal comes."""

    written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if not self.written:
            os.kill(os.getpid(), signal.SIGTERM)
        self.written += len(data)
        return len(data)


def test_a_signal_that_comes_amid_a_line_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler says so, while the buffer of standard error is in use."""
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Interrupting()), line_buffering=True))
    with stop_on_signals("this step") as stop:
        say("a line")
    assert stop.signum == signal.SIGTERM


CLOSED = """
import sys, time
from pathlib import Path
from eyas.progress import say
from eyas.signals import stop_on_signals
with stop_on_signals("this step") as stop:
    say("begun")
    deadline = time.monotonic() + 30
    while stop.signum is None and time.monotonic() < deadline:
        say("working")  # also at the very moment
    say("finishing"), print("finishing", flush=True)
    Path(sys.argv[1]).write_text(str(stop.signum))
"""


def test_work_is_finished_when_the_terminal_is_closed(tmp_path: Path) -> None:
    """A real terminal, which takes no more once its buffer is full: closed, it makes an error of what is written."""
    file = tmp_path / "finished"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", CLOSED, str(file)])
    assert b"begun" in os.read(terminal, 1000)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert file.read_text() == str(int(signal.SIGHUP))


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a process
    try:
        with stop_on_signals("this step") as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signum is None
    finally:
        signal.signal(signal.SIGHUP, before)
