"""Bad input and full disks: one clear error each, and nothing lost."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_store import Sample, make_manifest, make_samples, states, write_rows, write_store

from eyas import fs
from eyas.errors import CorruptStore, EyasError, ManifestMismatch, StoreError, StoreFull
from eyas.store.plan import PlanEntry, deal
from eyas.store.reader import StoreReader
from eyas.store.verify import verify_store
from eyas.store.writer import StoreWriter

torch.set_num_threads(1)
SAMPLES = make_samples(20)
ENTRIES = [sample.entry for sample in SAMPLES]
BY_ID = {sample.id: sample for sample in SAMPLES}


def go_on(url: str) -> None:
    """Resume, write the rest, and compare with an undisturbed store."""
    with StoreWriter.open(url, make_manifest(), ENTRIES) as writer:
        for name in sum(writer.pending(), []):
            write_rows(writer, BY_ID[name], 0, len(BY_ID[name].token_ids))
    write_store(url + "-whole", SAMPLES)
    assert StoreReader(url).digest == StoreReader(url + "-whole").digest
    assert verify_store(url).faults == []


def names_everything(error: EyasError) -> bool:
    return bool(error.seen and error.next)


def test_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "data_0.pt").write_bytes(b"?")
    for action in (StoreReader, verify_store, lambda url: StoreWriter.open(url, make_manifest(), ENTRIES)):
        with pytest.raises(StoreError, match=r"no manifest.json in it, but data_0.pt") as caught:
            action(str(tmp_path))
        assert names_everything(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["data_0.pt"]
    with pytest.raises(StoreError, match="no such folder"):
        StoreReader(str(tmp_path / "nowhere"))


def test_a_future_format_version(tmp_path: Path) -> None:
    write_store(str(tmp_path / "store"), SAMPLES)
    path = tmp_path / "store/manifest.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(StoreError, match="format version 2\nexpected: version 1") as caught:
        StoreReader(str(tmp_path / "store"))
    assert names_everything(caught.value)


def test_a_shard_of_another_encoding(tmp_path: Path) -> None:
    for encoding in ("bf16", "fp8"):
        write_store(str(tmp_path / encoding), SAMPLES[:3], make_manifest(encoding, shard_bytes=1 << 20))
    shard = "shards/000000.safetensors"
    (tmp_path / "bf16" / shard).write_bytes((tmp_path / "fp8" / shard).read_bytes())
    store = StoreReader(str(tmp_path / "bf16"))
    with pytest.raises(CorruptStore, match="encoding"):
        store.read(store.samples()[0].sample_id)
    assert [fault.file for fault in verify_store(str(tmp_path / "bf16")).faults] == [shard]


def test_a_store_of_another_encoding_is_not_resumed(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    write_store(url, SAMPLES)
    with pytest.raises(ManifestMismatch, match="final_encoding is 'bf16' in the store\nexpected: 'fp8'"):
        StoreWriter.open(url, make_manifest("bf16", "fp8"), ENTRIES)
    go_on(url)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("model_digest", "other", "target.model_digest is 'mmm.*\nexpected: 'other'"),
        ("hidden_size", 16, "target.hidden_size is 8 in the store\nexpected: 16"),
        ("vocab_size", 99, "target.vocab_size is 64 in the store\nexpected: 99"),
        ("tokenizer_digest", "other", "tokenizer_digest is 'ttt.*\nexpected: 'other'"),
        ("template_digest", "other", "template_digest is 'ppp.*\nexpected: 'other'"),
        ("aux_layer_ids", [1, 3, 5], r"aux_layer_ids is \[2, 4, 5\] in the store\nexpected: \[1, 3, 5\]"),
    ],
)
def test_a_store_of_another_target(tmp_path: Path, field: str, value: Any, message: str) -> None:
    write_store(str(tmp_path / "store"), SAMPLES[:3])
    store, ours = StoreReader(str(tmp_path / "store")), make_manifest()
    asked = ours.target.model_dump() | {
        "aux_layer_ids": [2, 4, 5],
        "tokenizer_digest": ours.tokenizer_digest,
        "template_digest": ours.template_digest,
    }

    def check() -> None:
        names = ("aux_layer_ids", "tokenizer_digest", "template_digest")
        store.check_target(SimpleNamespace(**asked), *(asked[name] for name in names))

    check()
    asked[field] = value
    with pytest.raises(ManifestMismatch, match=message) as caught:
        check()
    assert names_everything(caught.value)


def test_a_disk_that_fills_up_in_the_middle_of_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, writes = str(tmp_path / "store"), 0

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes == 150:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwrite(descriptor, data[:100], offset)  # the kernel may also write a part

    monkeypatch.setattr(fs, "os", Patched(pwrite=pwrite))
    with (
        pytest.raises(StoreFull, match="No space left") as caught,
        StoreWriter.open(url, make_manifest(), ENTRIES) as writer,
    ):
        for name in sum(writer.pending(), []):
            write_rows(writer, BY_ID[name], 0, len(BY_ID[name].token_ids))
    assert names_everything(caught.value)
    assert 0 < len(StoreReader(url).samples()) < len(SAMPLES)
    assert not list(tmp_path.rglob(".partial-*"))
    go_on(url)


@pytest.mark.parametrize("call", ["fsync", "replace", "posix_fallocate"])
def test_a_disk_that_is_full_at_any_other_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    url, calls = str(tmp_path / "store"), 0

    def full(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (3 if call == "posix_fallocate" else 9):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return getattr(os, call)(*arguments)

    monkeypatch.setattr(fs, "os", Patched(**{call: full}))
    with pytest.raises(StoreFull), StoreWriter.open(url, make_manifest(), ENTRIES) as writer:
        for name in sum(writer.pending(), []):
            write_rows(writer, BY_ID[name], 0, len(BY_ID[name].token_ids))
    monkeypatch.undo()
    assert verify_store(url).faults == []
    go_on(url)


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import resource
from test_store_errors import ENTRIES, BY_ID, make_manifest, write_rows
from eyas.store.writer import StoreWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
with StoreWriter.open({str(tmp_path / "store")!r}, make_manifest(shard_bytes=9000), ENTRIES) as writer:
    for name in sum(writer.pending(), []):
        write_rows(writer, BY_ID[name], 0, len(BY_ID[name].token_ids))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "StoreFull" in done.stderr and "File too large" in done.stderr, done.stderr


def test_a_plan_beyond_the_budget_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match="20 samples needs .* kB\nexpected: at most 3 kB, as store.max_bytes says"):
        StoreWriter.open(str(tmp_path / "store"), make_manifest(), ENTRIES, max_bytes=3000)
    assert not (tmp_path / "store").exists()


def test_a_plan_that_just_fits_the_budget_comes_to_its_end(tmp_path: Path) -> None:
    """Plan and index, of which nothing is known before, don't count."""
    plan = deal(ENTRIES, make_manifest())
    budget = sum(plan.layout(shard).size for shard in range(plan.shards))
    for _ in range(2):
        with StoreWriter.open(str(tmp_path / "store"), make_manifest(), ENTRIES, max_bytes=budget) as writer:
            for name in sum(writer.pending()[:3], []):
                write_rows(writer, BY_ID[name], 0, len(BY_ID[name].token_ids))
    go_on(str(tmp_path / "store"))


def test_the_free_space_floor_stops_before_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "store")
    free = iter([1 << 40] * 4 + [10_000] * 99)
    monkeypatch.setattr("eyas.store.files.fs.free_bytes", lambda folder: next(free))
    with (
        pytest.raises(StoreFull, match="10 kB free on the disk.*\nexpected: 9 kB left free") as caught,
        StoreWriter.open(url, make_manifest(), ENTRIES, min_free_bytes=9_000) as writer,
    ):
        for name in sum(writer.pending(), []):
            write_rows(writer, BY_ID[name], 0, len(BY_ID[name].token_ids))
    assert names_everything(caught.value)
    assert len(list((tmp_path / "store/shards").glob("*.safetensors"))) == 3
    go_on(url)


def test_a_disk_too_small_for_the_plan_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eyas.store.files.fs.free_bytes", lambda folder: 5_000)
    StoreWriter.open(str(tmp_path / "store"), make_manifest(), ENTRIES).close()
    assert "short of what the plan needs" in capsys.readouterr().err


def test_two_processes_do_not_write_one_store(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    with (
        StoreWriter.open(url, make_manifest(), ENTRIES),
        pytest.raises(StoreError, match="another process is writing this store"),
    ):
        StoreWriter.open(url, make_manifest(), ENTRIES)
    go_on(url)


def test_a_cut_shard_is_named_when_capture_goes_on(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    write_store(url, SAMPLES)
    shard = tmp_path / "store/shards/000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:700])
    with pytest.raises(CorruptStore, match="000001.safetensors: 700 bytes") as caught:
        StoreWriter.open(url, make_manifest(), ENTRIES)
    assert caught.value.exit_code == 3 and "--repair" in caught.value.next
    store = StoreReader(url)
    with pytest.raises(CorruptStore, match="000001.safetensors: 700 bytes"):
        store.read(next(ref.sample_id for ref in store.samples() if ref.shard == 1))


def test_an_uncommitted_sample_is_not_read(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    StoreWriter.open(url, make_manifest(), ENTRIES).close()
    with pytest.raises(StoreError, match=f"no sample {SAMPLES[0].id}\nlikely cause: it is not committed"):
        StoreReader(url).read(SAMPLES[0].id)


@pytest.mark.parametrize(
    "entry, message",
    [
        (lambda: [], "no samples to store"),
        (lambda: [ENTRIES[0], ENTRIES[0]], f"sample {SAMPLES[0].id} is planned twice"),
        (lambda: [PlanEntry("ab", "s", "train", 3, 1)], "sample id ab"),
        (lambda: [PlanEntry("a" * 32, "s", "train", 0, 0)], "0 tokens"),
        (lambda: [PlanEntry("a" * 32, "s", "train", 3, 4)], "3 tokens, 4 supervised"),
    ],
)
def test_an_impossible_plan(entry: Callable[[], list[PlanEntry]], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        deal(entry(), make_manifest())


def test_rows_that_are_not_planned(tmp_path: Path) -> None:
    sample = next(s for s in SAMPLES if len(s.token_ids) > 4 and s.loss_mask.any())
    aux, final = states(sample)
    stranger = make_samples(1, seed=9)[0]
    other_ids = Sample(sample.id, "chat", "train", sample.token_ids[::-1] + 1, sample.loss_mask)
    with StoreWriter.open(str(tmp_path / "store"), make_manifest(), ENTRIES) as writer:
        for message, arguments in [
            ("is not in the plan", (stranger, 0, *states(stranger))),
            ("aux states", (sample, 0, aux[:, :2], final)),
            ("final states", (sample, 0, aux, final[:-1])),
            ("positions 1 to", (sample, 1, aux, final)),
            ("another digest", (other_ids, 0, aux, final)),
            ("another digest", (other_ids, 1, aux[1:], final[int(sample.loss_mask[0]) :])),
        ]:
            with pytest.raises(StoreError, match=message):
                writer.write(*arguments)
        with pytest.raises(StoreError, match="a sample of the plan, and a reason"):
            writer.reject(stranger.id, "NaN")
        for name in sum(writer.pending(), []):
            write_rows(writer, BY_ID[name], 0, len(BY_ID[name].token_ids))
        with pytest.raises(StoreError, match="too late to reject"):
            writer.reject(sample.id, "NaN")
        writer.write(sample, 0, torch.full_like(aux, 7), torch.full_like(final, 7))  # late rows of a retracted request
    np.testing.assert_array_equal(
        StoreReader(str(tmp_path / "store")).read(sample.id).aux_hidden_states.float(), aux.float()
    )


class Patched:
    """The `os` module with some calls replaced."""

    def __init__(self, **calls: Any) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        return self.calls.get(name) or getattr(os, name)
