"""What was written so far, kept so that a kill loses nothing that was answered.

    NNN.jsonl       one line a conversation of source NNN: what `prepare` reads, as it is (format `tokens`)
    refused.jsonl   one line a conversation that gave nothing: {"id", "source", "reason", "detail"}
    settings.json   what all of it depends on

Lines are only ever appended, each in one write. A last line that a crash tore is dropped, and its conversation asked
again. Lines lie in the order in which answers came; nothing depends on it.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from eyas import fs
from eyas.data.regenerate.transcript import Written
from eyas.errors import DataError, RecipeError
from eyas.record import Inputs, Record, changed_input

SETTINGS, REFUSED = "settings.json", "refused.jsonl"
# A kill of this process loses no line; a power cut at most those of the last seconds, which are asked again.
_FSYNC_EVERY_S = 2.0
_HEAD = re.compile(rb'\{"id":"([0-9a-f]{32})","answers":(\d+),"tokens":(\d+),"cut":(true|false),')


class Entry(NamedTuple):
    """A conversation that was written.

    Attributes:
        id: slots.conversation_id.
        answers, tokens: written by the target.
        cut: whether the last answer lacks its end-of-turn token.
    """

    id: str
    answers: int
    tokens: int
    cut: bool


class Journal:
    """Appends to the files of one run's folder. One process at a time.

    Args:
        folder: regenerated/ of a run.
        sources: how many the recipe has.
        inputs: what the answers depend on.
    Raises: RecipeError where the folder holds answers that depend on something else, or another process writes to it.

    Use as a context manager.
    """

    def __init__(self, folder: Path, sources: int, inputs: Inputs) -> None:
        self.folder = folder
        self._check_settings(inputs)
        self._names = [f"{source:03d}.jsonl" for source in range(sources)]
        # Unbuffered: a line is the kernel's once it is written, whatever becomes of this process.
        self._files = {name: (folder / name).open("ab", buffering=0) for name in (*self._names, REFUSED)}
        self._synced, self._dirty = time.monotonic(), set[str]()
        try:
            fcntl.flock(self._files[REFUSED], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RecipeError(
                f"{folder}: another process is writing answers to it",
                cause="`eyas regenerate` or `eyas run` of the same run is still going on",
                next="wait for it, or end it: what it wrote is kept",
            ) from None
        for name in self._files:
            _drop_torn_line(folder / name)
        fs.fsync_folder(folder)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sync()
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def written(self) -> Iterator[Entry]:
        """Conversations written so far, by any process."""
        for name in self._names:
            yield from entries(self.folder / name)

    def refused(self) -> Iterator[dict[str, Any]]:
        """Conversations that were asked and gave nothing."""
        for line in (self.folder / REFUSED).read_text(encoding="utf-8").splitlines():
            yield json.loads(line)

    def add(self, source: int, id: str, samples: list[Written], cut: bool, about: dict[str, str]) -> Entry:
        """Keep a conversation; `about` are keys that `prepare` takes over (split, kind)."""
        answers = [end - start for sample in samples for start, end in sample.answers]
        entry = Entry(id, len(answers), sum(answers), cut)
        first, *further = [{"input_ids": each.token_ids, "loss_mask": each.loss_mask} for each in samples]
        line: dict[str, Any] = {**entry._asdict(), **about, **first}
        self._append(self._names[source], line | ({"further": further} if further else {}))
        return entry

    def refuse(self, source: int, id: str, reason: str, detail: str) -> None:
        """Keep that a conversation gives nothing, so that it isn't asked again."""
        self._append(REFUSED, {"id": id, "source": source, "reason": reason, "detail": detail})

    def _append(self, name: str, line: dict[str, Any]) -> None:
        data = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        while len(data):
            data = data[self._files[name].write(data) :]
        self._dirty.add(name)
        if time.monotonic() - self._synced >= _FSYNC_EVERY_S:
            self._sync()

    def _sync(self) -> None:
        for name in sorted(self._dirty):
            os.fsync(self._files[name].fileno())
        self._synced, self._dirty = time.monotonic(), set()

    def _check_settings(self, inputs: Inputs) -> None:
        path = self.folder / SETTINGS
        if not path.is_file():
            fs.write_json(path, inputs)
            return
        # Both as JSON has them: a tuple and a list are the same there.
        now = json.loads(json.dumps(inputs))
        change = changed_input(Record("regenerate", json.loads(path.read_text(encoding="utf-8")), "", {}, 0.0), now)
        if change:
            raise RecipeError(
                f"{self.folder} holds answers of an unfinished run, but {change}",
                cause="the recipe, the data or the target changed since they were written",
                next="eyas regenerate RECIPE --redo   # drops them; --set name=OTHER keeps both",
            )


def entries(path: Path) -> Iterator[Entry]:
    """Whole lines of an answers file, by their beginnings: the rest of a line isn't parsed.

    Raises: DataError naming a line that is none of this journal's.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            head = _HEAD.match(line)
            if head is None or not line.endswith(b"}\n"):
                raise DataError(
                    f"{path}, line {number}: not a conversation that regenerate wrote",
                    cause="the file was edited, or the disk lost part of it",
                    next="remove that line: its conversation is asked again",
                )
            yield Entry(head[1].decode(), int(head[2]), int(head[3]), head[4] == b"true")


def content_digest(folder: Path) -> str:
    """Digest of all answers, whatever order they came in."""
    lines: list[str] = []
    for path in sorted(folder.glob("[0-9]*.jsonl")):
        with path.open("rb") as file:
            lines += sorted(f"{path.name} {fs.digest(line)}" for line in file)
    return fs.digest("\n".join(lines))


def _drop_torn_line(path: Path) -> None:
    """Cut a file behind its last line end."""
    with path.open("rb+") as file:
        size = position = file.seek(0, os.SEEK_END)
        while position:
            start = max(position - (1 << 20), 0)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                position = start + found + 1
                break
            position = start
        if position < size:
            file.truncate(position)
            os.fsync(file.fileno())
