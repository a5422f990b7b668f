"""Stopping in good order: the first SIGINT, SIGTERM or SIGHUP is noted, a second one ends the process at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from eyas.progress import say_at_once

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stop:
    """Whether a signal asked this process to stop.

    Attributes:
        signum: the signal's number, None while none came. Look at it between pieces of work, save, then raise
            `errors.Interrupted(stop.signum, ...)`.
    """

    def __init__(self) -> None:
        self.signum: int | None = None


@contextmanager
def stop_on_signals(finishing: str, *, forwarded: bool = False) -> Iterator[Stop]:
    """Within the block SIGINT, SIGTERM and SIGHUP, a terminal that is closed, set `Stop.signum` instead of ending the
    process. Main thread only. One that the process was started to ignore (nohup) stays ignored.

    Args:
        finishing: what is finished before the process ends ("this batch"), for the message.
        forwarded: signals come through a launcher, which may send each again: later ones change nothing, until the end
            of the process where it stops.
    """
    stop = Stop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def note(signum: int, frame: FrameType | None) -> None:
        stop.signum = signum
        if signum == signal.SIGHUP:
            _hang_up(terminals)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if forwarded else handler)
        again = "" if forwarded else "; once more to stop at once"
        say_at_once(f"{signal.Signals(signum).name}: finishing {finishing}, then stopping{again}")

    try:
        for number in before:
            signal.signal(number, note)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if forwarded and stop.signum is not None else handler)


def _hang_up(terminals: list[int]) -> None:
    """What is said from now on goes nowhere: writing to a terminal that is gone is an error."""
    for descriptor in terminals:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
