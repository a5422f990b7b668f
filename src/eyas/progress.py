"""Progress that people can read: a bar on a terminal, plain lines elsewhere, and a file that `eyas status` reads.

Stages say how far they are; this module alone knows how it is shown.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from eyas import fs

STATUS_FILE = "status.json"
_PLAIN_EVERY_S = 10.0
_STATUS_EVERY_S = 1.0


_hushed = False


def hush() -> None:
    """From now on this process says and writes nothing of how far it is: another one, that it works with, does."""
    global _hushed
    _hushed = True


def say(text: str) -> None:
    """One line for the user, on standard error, so that standard output stays for results."""
    if _hushed:
        return
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def say_at_once(text: str) -> None:
    """The same from a signal handler, which may have come amid a line that is being written: past the buffer, in which
    Python would raise RuntimeError."""
    if not _hushed:
        with suppress(OSError):
            os.write(2, f"{text}\n".encode())


class Progress:
    """Counts work done against a total, shows rate and ETA.

    Args:
        stage: name of the stage, first word of every line.
        total: amount of work, in `unit`.
        unit: what is counted, plural ("tokens").
        logs_dir: the run's logs/ folder; status.json there is rewritten about once a second. None: no file.
        done: work already finished by an earlier run; it counts as progress but not for the rate.

    Use as a context manager; call `advance(n, note)`.
    """

    def __init__(self, stage: str, total: float, unit: str, logs_dir: Path | None = None, done: float = 0) -> None:
        self.stage, self.total, self.unit, self.logs_dir = stage, total, unit, logs_dir
        self.done, self._first = done, done
        self.note = ""
        self._start = self._said = self._saved = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> "Progress":
        if sys.stderr.isatty() and not _hushed:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[tail]}"),
            )
            self._bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.stage, total=self.total, completed=int(self.done), tail="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.elapsed_s > 2 or kind is not None:
            say(self.line())
        self._save()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def rate(self) -> float:
        """Units per second of this process's own work."""
        return (self.done - self._first) / max(self.elapsed_s, 1e-9)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present rate; None before anything is done."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None

    def advance(self, amount: float, note: str = "") -> None:
        """Count `amount` more units; `note` is shown behind the rate (loss, acceptance, disk left)."""
        self.done += amount
        self.note = note or self.note
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, tail=self._tail())
        elif now - self._said >= _PLAIN_EVERY_S:
            self._said = now
            say(self.line())
        if now - self._saved >= _STATUS_EVERY_S:
            self._save()

    def line(self) -> str:
        """The state in one plain line."""
        return f"{self.stage}: {self.done:,.0f} of {self.total:,.0f} {self.unit}, {self._tail()}"

    def _tail(self) -> str:
        eta = "" if self.eta_s is None or self.done >= self.total else f", {duration(self.eta_s)} left"
        return f"{self.rate:,.1f} {self.unit}/s{eta}" + (f", {self.note}" if self.note else "")

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self.logs_dir is None or _hushed:
            return
        state: dict[str, Any] = {"stage": self.stage, "done": self.done, "total": self.total, "unit": self.unit}
        state |= {"rate": self.rate, "eta_s": self.eta_s, "note": self.note, "updated": time.time()}
        # A disk that is full or slow must not end or hold up the work that this only tells about.
        with suppress(OSError):
            fs.write_passing(self.logs_dir / STATUS_FILE, json.dumps(state, ensure_ascii=False) + "\n")


def read_status(logs_dir: Path) -> dict[str, Any] | None:
    """The last state any stage wrote to this run's logs, or None; also where a power cut left the file empty."""
    try:
        return dict(json.loads((logs_dir / STATUS_FILE).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None


def duration(seconds: float) -> str:
    """75 -> "1 min 15 s"; 7300 -> "2 h 1 min"."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(amount: float) -> str:
    """Bytes in decimal units: 5.03e12 -> "5.03 TB"."""
    value, unit = scaled(amount, 1000, ("B", "kB", "MB", "GB", "TB"))
    return f"{value:.3g} {unit}" if value < 100 and unit != "B" else f"{value:.0f} {unit}"


def scaled(amount: float, base: int, units: Sequence[str]) -> tuple[float, str]:
    """An amount in the largest of `units` that leaves it at 1 or more; each is `base` times the one before."""
    power = 0
    while amount >= base and power < len(units) - 1:
        amount, power = amount / base, power + 1
    return amount, units[power]
