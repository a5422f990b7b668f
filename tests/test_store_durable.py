"""A power cut at any moment loses nothing that was committed, and no fsync can be spared."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from helpers_disk import Disk, Event, RecordingOs, without
from helpers_store import Sample, make_manifest, make_samples, scratch_folder, write_rows

from eyas import fs
from eyas.capture.run import discard
from eyas.errors import EyasError
from eyas.run import Run
from eyas.store.format import MANIFEST
from eyas.store.reader import StoreReader
from eyas.store.verify import Report, repair_store, verify_store
from eyas.store.writer import StoreWriter

torch.set_num_threads(1)
SAMPLES = make_samples(5, longest=9)
STORE = make_manifest(shard_bytes=600)


def write_pending(url: str, most_shards: int, recorder: RecordingOs | None = None, reject: bool = False) -> None:
    by_id: dict[str, Sample] = {sample.id: sample for sample in SAMPLES}
    writer = StoreWriter.open(url, STORE, [sample.entry for sample in SAMPLES])
    done: list[str] = [] if recorder is None else list(recorder.log[-1].reported or []) if recorder.log else []
    for ids in writer.pending()[:most_shards]:
        for name in ids:
            if reject:
                writer.reject(name, "NaN")
            else:
                write_rows(writer, by_id[name], 0, len(by_id[name].token_ids))
        done += ids
        if recorder is not None:
            recorder.report(list(done))
    writer.close()
    if recorder is not None:
        recorder.report(list(done))


@pytest.fixture(scope="module")
def log() -> list[Event]:
    """All that four processes do on a disk: make a store and commit two shards; the rest; drop one; make it anew.

    The dropped shard comes back with other bytes (its samples are rejected), as a GPU would give them.
    """
    with scratch_folder() as folder, pytest.MonkeyPatch.context() as patch:
        recorder = RecordingOs(folder)
        patch.setattr(fs, "os", recorder)
        write_pending(str(folder / "runs" / "store"), 2, recorder)
        write_pending(str(folder / "runs" / "store"), 99, recorder)
        first = [ref.sample_id for ref in StoreReader(str(folder / "runs" / "store")).samples() if ref.shard == 0]
        recorder.report([name for name in recorder.log[-1].reported if name not in first])
        repair_store(str(folder / "runs" / "store"), Report(bad_shards=[0]))
        write_pending(str(folder / "runs" / "store"), 99, recorder, reject=True)
        assert verify_store(str(folder / "runs" / "store")).pending == 0
    return recorder.log


def faults_after_power_cuts(log: list[Event], seen: dict[object, str]) -> str:
    """What is wrong after a power cut at the first moment that goes wrong, or ""."""
    disk, promised = Disk(), []
    for event in log:
        disk.apply(event)
        promised = event.reported if event.kind == "reported" and event.reported is not None else promised
        for files in disk.after_power_cut():
            state = (tuple(sorted(files.items())), tuple(promised))
            if state not in seen:
                seen[state] = fault_in(files, promised)
            if seen[state]:
                return seen[state]
    return ""


def fault_in(files: dict[str, bytes], promised: list[str]) -> str:
    """What is wrong with a disk: a promised sample is gone, something committed is damaged, or capture can't go on."""
    with scratch_folder() as folder:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith("/"):
                (folder / name).mkdir(exist_ok=True)
            else:
                (folder / name).write_bytes(data)
        store = folder / "runs" / "store"
        try:
            if (store / MANIFEST).is_file():
                if report := verify_store(str(store)).faults:
                    return str(report[0])
                StoreReader(str(store)).plan.info()
            with StoreWriter.open(str(store), STORE, [sample.entry for sample in SAMPLES]) as writer:
                lost = set(promised) & {name for ids in writer.pending() for name in ids}
        except EyasError as error:
            return str(error)
        return f"lost {lost}" if lost else ""


def test_nothing_is_lost_at_any_moment(log: list[Event]) -> None:
    assert faults_after_power_cuts(log, {}) == ""


def test_every_fsync_is_needed(log: list[Event]) -> None:
    fsyncs = [place for place, event in enumerate(log) if event.kind.startswith("fsync")]
    assert len(fsyncs) > 20
    seen: dict[object, str] = {}
    spared = [log[place] for place in fsyncs if not faults_after_power_cuts(without(log, place), seen)]
    assert spared == []


def test_the_recorder_notes_what_the_writer_does(log: list[Event]) -> None:
    kinds = {event.kind for event in log}
    assert kinds == {"write", "fsync", "fsync_folder", "name", "unlink", "mkdir", "reported"}
    shards = [event.name for event in log if event.kind == "name" and Path(event.name).suffix == ".safetensors"]
    assert shards[:2] == [".partial-000000.safetensors", "000000.safetensors"]


def test_shards_of_a_store_that_is_made_anew_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--redo` of capture: the manifest that follows would take them for its own."""
    with scratch_folder() as folder:
        recorder = RecordingOs(folder)
        monkeypatch.setattr(fs, "os", recorder)
        write_pending(str(folder / "store"), 99)
        discard(cast(Run, SimpleNamespace(store_url=str(folder / "store"))))
    disk = Disk()
    for event in recorder.log:
        disk.apply(event)
    assert any(event.kind == "unlink" and event.name == MANIFEST for event in recorder.log)
    assert not {name for files in disk.after_power_cut(99) for name in files if name.endswith(".safetensors")}
