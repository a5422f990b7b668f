"""Durable, atomic files and digests on the local file system.

A file is either whole or absent, also after a power cut: write a temporary sibling, fsync it, rename it, fsync the
folder. Temporary names start with `.partial-`, so a later start can sweep what a kill left behind.

Everything that changes the disk goes through this module's `os`: tests replace it by a recorder that forgets whatever
was not fsynced.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

PARTIAL_PREFIX = ".partial-"
_READ_BYTES = 8 << 20


def write_atomic(path: Path, data: bytes | str, durable: bool = True) -> None:
    """Write `data` to `path` so that a reader sees the old content or the new, never a part, also after a crash.

    Not `durable`: a crash soon after may bring the old content back; for what can be made again.
    """
    make_folder(path.parent)
    _replace(path, data.encode() if isinstance(data, str) else data, synced=True)
    if durable:
        fsync_folder(path.parent)


def write_json(path: Path, value: object) -> None:
    """`write_atomic` of indented JSON with sorted keys: equal values give equal bytes."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def write_passing(path: Path, text: str) -> None:
    """Replace a small file that is out of date in a second anyhow: readers see it whole, nothing waits for the disk.

    After a power cut it may be old or empty.
    """
    make_folder(path.parent, durable=False)
    _replace(path, text.encode(), synced=False)


def _replace(path: Path, raw: bytes, synced: bool) -> None:
    """Give a new file the place of `path`; not `synced`: its bytes may reach the disk after its name."""
    partial = path.with_name(f"{PARTIAL_PREFIX}{os.getpid()}-{path.name}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            pwrite_all(descriptor, raw, 0)
            if synced:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, path)
    except BaseException:
        remove(partial)
        raise


def make_folder(folder: Path, durable: bool = True) -> None:
    """Create a folder and its missing parents, each name durable.

    Not `durable`: for a folder whose parent is fsynced soon after anyhow.
    """
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        try:
            os.mkdir(path)
        except FileExistsError:  # another process was faster
            continue
        if durable:
            fsync_folder(path.parent)


def create_sized(path: Path, size: int) -> int:
    """Create (or empty) a file of `size` zero bytes, its room reserved; returns its descriptor, for reading too.

    Raises: OSError (ENOSPC) at once where the disk hasn't the room.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except BaseException:
        os.close(descriptor)
        remove(path)
        raise
    return descriptor


def pwrite_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; the kernel may take it in parts (2 GiB at most a call)."""
    view = memoryview(data).cast("B")
    while len(view):
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Have the disk begin with these bytes now, so that the fsync to come finds little left to do.

    Linux starts to write dirty pages when told that they aren't needed; it drops none that are still dirty.
    """
    os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (a rename is only on disk once its folder is)."""
    _fsync_path(folder)


def commit_file(partial: Path, final: Path) -> None:
    """Give a finished file that another library wrote its name, durably: fsync, rename, fsync of the folder."""
    _fsync_path(partial)
    os.replace(partial, final)
    fsync_folder(final.parent)


def commit_folder(partial: Path, final: Path) -> None:
    """Give a finished folder of files its name, durably. `final` must not exist."""
    for path in partial.iterdir():
        _fsync_path(path)
    fsync_folder(partial)
    os.rename(partial, final)
    fsync_folder(final.parent)


def _fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file; absent is fine."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def sweep_partials(folder: Path) -> int:
    """Remove temporary files that a killed process left in `folder`; returns how many."""
    leftovers = list(folder.glob(f"{PARTIAL_PREFIX}*")) if folder.is_dir() else []
    for path in leftovers:
        remove(path)
    return len(leftovers)


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write to the file system of `folder`."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def digest(*parts: bytes | memoryview | str) -> str:
    """xxh3-128 of the parts' bytes, as 32 hex digits. Integrity against accidents, not against an adversary."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part.encode() if isinstance(part, str) else part)
    return state.hexdigest()


def digest_json(value: object) -> str:
    """Digest of a JSON-able value, independent of key order."""
    return digest(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def digest_file(path: Path) -> str:
    """xxh3-128 of a file's content, read in 8 MiB pieces (7 GB/s on one thread, so the disk is the limit)."""
    state = xxhash.xxh3_128()
    with path.open("rb") as handle:
        while block := handle.read(_READ_BYTES):
            state.update(block)
    return state.hexdigest()


def digest_files(paths: Iterable[Path]) -> str:
    """Digest over names and contents of files, in the order given."""
    return digest_json([[path.name, digest_file(path)] for path in paths])
