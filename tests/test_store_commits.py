"""Shards that a thread of its own commits: nothing waits for it but its end, and what it failed with is told."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers_store import make_manifest, make_samples, write_rows, write_store

from eyas.errors import StoreFull
from eyas.store.commits import WAITING, Commits
from eyas.store.files import Files
from eyas.store.reader import StoreReader
from eyas.store.verify import verify_store
from eyas.store.writer import StoreWriter

SAMPLES = make_samples(40)
ENTRIES = [sample.entry for sample in SAMPLES]
BY_ID = {sample.id: sample for sample in SAMPLES}


def write(writer: StoreWriter, ids: list[str]) -> None:
    for name in ids:
        write_rows(writer, BY_ID[name], 0, len(BY_ID[name].token_ids))


def test_commits_come_in_order_and_few_wait() -> None:
    go, done = threading.Event(), list[int]()

    def commit(number: int) -> None:
        go.wait(20)
        done.append(number)

    with Commits() as commits:
        for number in range(1 + WAITING):
            commits.give(lambda number=number: commit(number))
        more = threading.Thread(target=commits.give, args=(lambda: commit(9),))
        more.start()
        more.join(0.2)
        assert more.is_alive() and not done
        go.set()
        more.join()
    assert done == [*range(1 + WAITING), 9]


def test_leaving_under_an_error_waits_and_tells_that_error() -> None:
    done = list[int]()

    def fail() -> None:
        time.sleep(0.1)
        raise OSError("disk")

    with pytest.raises(ZeroDivisionError), Commits() as commits:
        commits.give(fail)
        commits.give(lambda: done.append(1))
        raise ZeroDivisionError
    assert done == [1]


def test_rows_are_written_while_a_commit_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, committed, commit = threading.Event(), list[str](), Files.commit

    def slow(files: Files, staged: Path, name: str) -> None:
        assert go.wait(20)
        commit(files, staged, name)
        committed.append(name)

    monkeypatch.setattr(Files, "commit", slow)
    url = str(tmp_path / "store")
    with StoreWriter.open(url, make_manifest(), ENTRIES) as writer:
        shards = writer.pending()
        assert len(shards) > 4
        with writer.committing_behind():
            for ids in shards[: 1 + WAITING]:
                write(writer, ids)
            write(writer, shards[3][:-1])
            assert not committed and writer.pending() == [shards[3][-1:], *shards[4:]]
            assert writer.settled(shards[0][0]) and not writer.settled(shards[3][-1])
            go.set()
            write(writer, shards[3][-1:])
        assert committed == [f"shards/{number:06d}.safetensors" for number in range(4)]
        write(writer, sum(shards[4:], []))  # again as before: it is durable when `write` returns
        assert len(committed) == len(shards)
    write_store(str(tmp_path / "whole"), SAMPLES)
    assert StoreReader(url).digest == StoreReader(str(tmp_path / "whole")).digest
    assert verify_store(url).faults == []


@pytest.mark.parametrize("last", [False, True])
def test_a_commit_that_fails_is_told(last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next write, and where there is none, at the end; the other shards are kept."""
    url, commit = str(tmp_path / "store"), Files.commit
    writer = StoreWriter.open(url, make_manifest(), ENTRIES)
    shards = writer.pending()
    bad = len(shards) - 1 if last else 1

    def full(files: Files, staged: Path, name: str) -> None:
        if name == f"shards/{bad:06d}.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        commit(files, staged, name)

    monkeypatch.setattr(Files, "commit", full)
    written: list[Any] = []
    with pytest.raises(StoreFull, match="No space left"), writer, writer.committing_behind():
        for ids in shards:
            write(writer, ids)
            written.append(ids)
            time.sleep(0.05)
    assert (len(written) == len(shards)) is last
    assert {f"{bad:06d}"}.isdisjoint(path.stem for path in Path(url).glob("shards/*.safetensors"))
    assert not list(Path(url).rglob(".partial-*"))
    monkeypatch.undo()
    with StoreWriter.open(url, make_manifest(), ENTRIES) as writer:
        assert writer.pending()[0] == shards[bad]
        write(writer, sum(writer.pending(), []))
    assert verify_store(url).faults == []
