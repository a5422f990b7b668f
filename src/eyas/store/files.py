"""Where a store's files lie. Everything above reads, writes and lists them through this class only.

A shard is always built and read as a local file: `stage` says where one is built, `commit` publishes it whole, `local`
gives it back as a local file. So a remote place (remote.py) stages in a local folder, uploads in `commit` and downloads
in `local`.
"""

import fcntl
import os
import re
from collections.abc import Iterable
from pathlib import Path

from eyas import fs
from eyas.errors import StoreError
from eyas.store.format import MANIFEST, SHARDS

_SHARD_FILE = re.compile(rf"{SHARDS}/(\d{{6,}})\.safetensors")


class Files:
    """A store in a local folder.

    Attributes:
        where: the folder, for messages.
        remote: True where `root` only stages shards that lie elsewhere.
    """

    remote = False

    def __init__(self, root: Path) -> None:
        self.root, self.where = root, str(root)
        self._lock: int | None = None

    def name(self, name: str) -> str:
        """A file of the store, for messages."""
        return f"{self.where}/{name}"

    def create(self) -> None:
        """Make the folders. The name of the inner one gets durable with the plan's, the next thing written."""
        fs.make_folder(self.root)
        fs.make_folder(self.root / SHARDS, durable=False)

    def lock(self) -> None:
        """Make this process the only writer, until `unlock` or its end."""
        descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StoreError(
                f"{self.where}: another process is writing this store",
                expected="one writing process at a time, with as many threads as you like",
                next="wait for it, or end it: what it has committed is kept",
            ) from None
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def sizes(self) -> dict[str, int]:
        """Name -> bytes of every file of the store, temporary ones left out."""
        found: dict[str, int] = {}
        for folder, prefix in ((self.root, ""), (self.root / SHARDS, f"{SHARDS}/")):
            if folder.is_dir():
                with os.scandir(folder) as entries:
                    found |= {prefix + entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        return {name: size for name, size in found.items() if not _base(name).startswith(fs.PARTIAL_PREFIX)}

    def others(self) -> list[str] | None:
        """Names of whatever lies in the store's folder, half-made files left out; None where there is no folder."""
        if not self.root.is_dir():
            return None
        return sorted(path.name for path in self.root.iterdir() if not path.name.startswith(fs.PARTIAL_PREFIX))

    def sweep(self) -> int:
        """Remove what a killed writer left half-made; returns how many files."""
        return fs.sweep_partials(self.root) + fs.sweep_partials(self.root / SHARDS)

    def read(self, name: str) -> bytes:
        """Raises: FileNotFoundError."""
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes | str, durable: bool = True) -> None:
        """Write a small file so that it is there whole or not at all; `durable`: also after a power cut from now on."""
        fs.write_atomic(self.root / name, data, durable)

    def remove(self, name: str) -> None:
        fs.remove(self.root / name)

    def drop(self, shards: Iterable[str]) -> None:
        """Remove shards for good: none may come back after a power cut and meet the index part of its successor."""
        for name in shards:
            self.remove(name)
        if not self.remote:
            fs.fsync_folder(self.root / SHARDS)

    def stage(self, name: str) -> Path:
        """Where the shard `name` is built, on a local disk."""
        place = self.root / name
        return place.with_name(f"{fs.PARTIAL_PREFIX}{place.name}")

    def commit(self, staged: Path, name: str) -> None:
        """Give the staged shard its name, durably: its bytes are on disk before its name is."""
        fs.commit_file(staged, self.root / name)

    def local(self, name: str) -> Path:
        """The shard `name` as a file on a local disk."""
        return self.root / name

    def free_bytes(self) -> int:
        """Bytes left where shards are built."""
        return fs.free_bytes(self.root)


def open_files(url: str) -> Files:
    """The files of the store at `url`: a local folder, or an fsspec URL (s3://BUCKET/PATH...).

    Raises: StoreError where no file system is known or installed for its scheme.
    """
    scheme, colon, rest = url.partition("://")
    if colon and scheme != "file":
        from eyas.store.remote import RemoteFiles

        return RemoteFiles(url)
    return Files(Path(rest if colon else url))


def refuse_foreign(files: Files) -> None:
    """Raises: StoreError where the folder is there with something else in it, or isn't there."""
    sizes = files.sizes()
    if MANIFEST in sizes:
        return
    others = files.others()
    seen = "no such folder" if others is None else f"no {MANIFEST} in it, but {', '.join(others[:5]) or 'nothing'}"
    raise StoreError(
        f"{files.where}: {seen}",
        expected=f"a store: {MANIFEST}, plan.parquet, index.parquet, {SHARDS}/",
        cause="another folder was meant" if others else "nothing was captured yet",
        next="eyas capture RECIPE",
    )


def shard_number(name: str) -> int | None:
    """The number in a shard file's name; None for other files."""
    match = _SHARD_FILE.fullmatch(name)
    return int(match.group(1)) if match else None


def _base(name: str) -> str:
    return name.rpartition("/")[2]
