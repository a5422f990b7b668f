"""Durable, atomic files and digests on the local file system.

A file is either whole or absent, also after a power cut: write a temporary sibling, fsync it, rename it, fsync the
folder. Temporary names start with `.partial-`, so a later start can sweep what a kill left behind.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import xxhash

PARTIAL_PREFIX = ".partial-"
_READ_BYTES = 8 << 20


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write `data` to `path` so that a reader sees the old content or the new, never a part, also after a crash."""
    raw = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{PARTIAL_PREFIX}{os.getpid()}-{path.name}")
    try:
        with partial.open("wb") as handle:
            handle.write(raw)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_json(path: Path, value: object) -> None:
    """`write_atomic` of indented JSON with sorted keys: equal values give equal bytes."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable (a rename is only on disk once its folder is)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_partials(folder: Path) -> int:
    """Remove temporary files that a killed process left in `folder`; returns how many."""
    leftovers = list(folder.glob(f"{PARTIAL_PREFIX}*")) if folder.is_dir() else []
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)


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
