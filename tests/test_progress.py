"""What tells how far a stage is never holds it up and never ends it."""

import os
from pathlib import Path
from typing import Any

import pytest

from eyas import fs
from eyas.progress import Progress, read_status


class CountingOs:
    """The `os` module, with its fsyncs counted."""

    def __init__(self) -> None:
        self.fsyncs = 0

    def __getattr__(self, name: str) -> Any:
        self.fsyncs += name == "fsync"
        return getattr(os, name)


def test_status_is_written_without_waiting_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.progress._STATUS_EVERY_S", 0.0)
    counting = CountingOs()
    monkeypatch.setattr(fs, "os", counting)
    with Progress("capture", 10, "tokens", tmp_path / "logs") as progress:
        progress.advance(4, "so far")
        assert read_status(tmp_path / "logs")["done"] == 4
    assert counting.fsyncs == 0
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["status.json"]


def test_a_status_that_cannot_be_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.progress._STATUS_EVERY_S", 0.0)
    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(ZeroDivisionError), Progress("capture", 10, "tokens", tmp_path / "logs") as progress:
        progress.advance(4)
        raise ZeroDivisionError


def test_an_empty_status_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    (tmp_path / "status.json").write_bytes(b"")
    assert read_status(tmp_path) is None
