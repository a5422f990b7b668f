"""A disk that forgets what was not fsynced: records what the writer does, and says what a power cut would leave.

The model is POSIX at its least kind. A file's bytes are on disk as of its last fsync, before it nothing is. Of the
names that were made, changed or removed in a folder since the folder's last fsync, any may be there and any not.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """kind: write, size, fsync, fsync_folder, name (a link or rename in `folder`), unlink, mkdir, or reported."""

    kind: str
    inode: int = -1
    data: bytes = b""
    offset: int = 0
    folder: str = ""
    name: str = ""
    was: str = ""
    reported: Any = None


class RecordingOs:
    """The `os` module for eyas.fs, noting every change below `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, list[Event]()
        self._inodes: dict[str, int] = {}
        self._open: dict[int, str] = {}
        self._count = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def report(self, value: Any) -> None:
        """Note what the writer has promised by now."""
        self.log.append(Event("reported", reported=value))

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        known, descriptor = self._name(path), os.open(path, flags, mode)
        if flags & os.O_CREAT and (known not in self._inodes or flags & os.O_TRUNC):
            self._inodes[known] = next(self._count)  # an emptied file is as good as a new one here
            self.log.append(Event("name", self._inodes[known], **self._split(known)))
        self._open[descriptor] = known
        return descriptor

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        os.close(descriptor)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.log.append(Event("write", self._inodes[self._open[descriptor]], bytes(data), offset))
        return os.pwrite(descriptor, data, offset)

    def posix_fallocate(self, descriptor: int, offset: int, size: int) -> None:
        self.log.append(Event("write", self._inodes[self._open[descriptor]], bytes(size), offset))
        os.posix_fallocate(descriptor, offset, size)

    def fsync(self, descriptor: int) -> None:
        name = self._open[descriptor]
        if name in self._inodes:
            self.log.append(Event("fsync", self._inodes[name]))
        else:
            self.log.append(Event("fsync_folder", folder=name))

    def replace(self, was: Path, now: Path) -> None:
        Path(was).replace(now)
        inode = self._inodes[self._name(now)] = self._inodes.pop(self._name(was))
        assert was.parent == now.parent
        self.log.append(Event("name", inode, was=was.name, **self._split(self._name(now))))

    def unlink(self, path: Path) -> None:
        Path(path).unlink()
        self._inodes.pop(self._name(path), None)
        self.log.append(Event("unlink", **self._split(self._name(path))))

    def mkdir(self, path: Path) -> None:
        Path(path).mkdir()
        self.log.append(Event("mkdir", **self._split(self._name(path))))

    def _name(self, path: Path) -> str:
        return str(Path(path).relative_to(self.root))

    def _split(self, name: str) -> dict[str, str]:
        return {"folder": str(Path(name).parent), "name": Path(name).name}


@dataclass
class Disk:
    """What is surely on disk, and what may be."""

    content: dict[int, bytearray] = field(default_factory=dict)
    durable: dict[int, bytes] = field(default_factory=dict)
    names: dict[str, dict[str, int]] = field(default_factory=lambda: {".": {}})  # folder -> name -> inode, -1: folder
    pending: list[Event] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        if event.kind == "write":
            file = self.content.setdefault(event.inode, bytearray())
            file.extend(bytes(max(0, event.offset + len(event.data) - len(file))))
            file[event.offset : event.offset + len(event.data)] = event.data
        elif event.kind == "fsync":
            self.durable[event.inode] = bytes(self.content.get(event.inode, b""))
        elif event.kind == "fsync_folder":
            for waiting in [waiting for waiting in self.pending if waiting.folder == event.folder]:
                _rename(self.names, waiting)
                self.pending.remove(waiting)
        elif event.kind != "reported":
            self.pending.append(event)

    def after_power_cut(self, most: int = 5) -> Iterator[dict[str, bytes]]:
        """Every state in which the disk may be: files by name. Of the pending names the last `most` vary."""
        sure, varied = self.pending[: -most or None], self.pending[-most:]
        for chosen in itertools.product([False, True], repeat=len(varied)):
            names = {folder: dict(entries) for folder, entries in self.names.items()}
            for event in sure + list(itertools.compress(varied, chosen)):
                _rename(names, event)
            yield dict(self._files(names, "."))

    def _files(self, names: dict[str, dict[str, int]], folder: str) -> Iterator[tuple[str, bytes]]:
        for name, inode in names.get(folder, {}).items():
            path = name if folder == "." else f"{folder}/{name}"
            if inode < 0:
                yield path + "/", b""
                yield from self._files(names, path)
            else:
                yield path, self.durable.get(inode, b"")


def _rename(names: dict[str, dict[str, int]], event: Event) -> None:
    entries = names.setdefault(event.folder, {})
    if event.kind == "unlink":
        entries.pop(event.name, None)
    else:
        entries.pop(event.was, None)
        entries[event.name] = -1 if event.kind == "mkdir" else event.inode


def without(log: list[Event], position: int) -> list[Event]:
    """The log as if that one fsync had not been called."""
    assert log[position].kind.startswith("fsync")
    return [*log[:position], replace(log[position], kind="reported", reported=None), *log[position + 1 :]]
