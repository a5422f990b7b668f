"""The first signal is noted, the second ends the process, and handlers come back."""

import os
import signal
from collections.abc import Iterator

import pytest

from eyas.signals import stop_on_signals


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as Python has it, also where the tests were started in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_first_signal_is_noted_and_the_second_acts(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stop_on_signals("this step") as stop:
        assert stop.signum is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signum == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert "SIGTERM: finishing this step, then stopping" in capsys.readouterr().err
