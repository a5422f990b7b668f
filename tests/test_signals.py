"""The first signal is noted, the second ends the process, and handlers come back."""

import os
import signal

import pytest

from eyas.signals import stop_on_signals


def test_first_signal_is_noted_and_the_second_acts(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stop_on_signals("this step") as stop:
        assert stop.signum is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signum == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert "SIGTERM: finishing this step, then stopping" in capsys.readouterr().err
