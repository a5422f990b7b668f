"""Stopping in good order: the first SIGINT or SIGTERM is noted, a second one ends the process at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from eyas.progress import say


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
    """Within the block SIGINT and SIGTERM set `Stop.signum` instead of ending the process. Main thread only.

    Args:
        finishing: what is finished before the process ends ("this batch"), for the message.
        forwarded: signals come through a launcher, which may send each again: later ones change nothing, until the end
            of the process where it stops.
    """
    stop = Stop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(signum: int, frame: FrameType | None) -> None:
        stop.signum = signum
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if forwarded else handler)
        again = "" if forwarded else "; once more to stop at once"
        say(f"{signal.Signals(signum).name}: finishing {finishing}, then stopping{again}")

    try:
        for number in before:
            signal.signal(number, note)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if forwarded and stop.signum is not None else handler)
