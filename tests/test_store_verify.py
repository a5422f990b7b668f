"""verify finds any damage, and repair + capture brings back the very same store."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers_store import make_manifest, make_samples, scratch_folder, states, write_rows, write_store
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from eyas.cli import app, commands
from eyas.errors import CorruptStore, StoreError, VerificationFailed
from eyas.store.reader import StoreReader
from eyas.store.verify import repair_store, verify_store
from eyas.store.writer import StoreWriter

torch.set_num_threads(1)
SAMPLES = make_samples(16)
REJECTED = {SAMPLES[5].id}


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def sound(request: pytest.FixtureRequest) -> Iterator[Path]:
    with scratch_folder() as folder:
        write_store(
            str(folder / "store"), SAMPLES, make_manifest(request.param, request.param, 2400), rejected=REJECTED
        )
        yield folder / "store"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def restore(folder: Path, files: dict[str, bytes]) -> None:
    for name in contents(folder).keys() - files.keys():
        (folder / name).unlink()
    for name, data in files.items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != data:
            (folder / name).write_bytes(data)


def capture(folder: Path) -> None:
    """Write what is pending, as the capture stage does."""
    by_id = {sample.id: sample for sample in SAMPLES}
    manifest = StoreReader(str(folder)).manifest.model_copy(update={"plan": None})
    with StoreWriter.open(str(folder), manifest, [sample.entry for sample in SAMPLES]) as writer:
        for name in sum(writer.pending(), []):
            if name in REJECTED:
                writer.reject(name, "NaN")
            else:
                write_rows(writer, by_id[name], 0, len(by_id[name].token_ids))


def check_found_and_mended(folder: Path, files: dict[str, bytes]) -> None:
    """The damage is found; unless it is the manifest, repair and a new capture restore every byte."""
    try:
        if contents(folder).get("manifest.json") != files["manifest.json"]:
            with pytest.raises(StoreError):
                verify_store(str(folder))
            return
        report = verify_store(str(folder))
        assert report.faults
        repair_store(str(folder), report)
        capture(folder)
        assert contents(folder) == files
        assert verify_store(str(folder)).faults == []
    finally:
        restore(folder, files)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_single_flipped_byte_is_found(sound: Path, data: st.DataObject) -> None:
    files = contents(sound)
    name = data.draw(st.sampled_from(sorted(files)))
    place, flip = data.draw(st.integers(0, len(files[name]) - 1)), data.draw(st.integers(1, 255))
    damaged = bytearray(files[name])
    damaged[place] ^= flip
    (sound / name).write_bytes(damaged)
    check_found_and_mended(sound, files)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_truncation_or_extension_is_found(sound: Path, data: st.DataObject) -> None:
    files = contents(sound)
    name = data.draw(st.sampled_from(sorted(files)))
    length = data.draw(st.integers(0, len(files[name]) + 9).filter(lambda n: n != len(files[name])))
    (sound / name).write_bytes((files[name] + bytes(9))[:length])
    check_found_and_mended(sound, files)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_two_swapped_files_are_found(sound: Path, data: st.DataObject) -> None:
    files = contents(sound)
    suffix = data.draw(st.sampled_from([".safetensors", ".parquet"]))
    names = [name for name in sorted(files) if name.endswith(suffix)]
    one, other = data.draw(st.lists(st.sampled_from(names), min_size=2, max_size=2, unique=True))
    (sound / one).write_bytes(files[other])
    (sound / other).write_bytes(files[one])
    check_found_and_mended(sound, files)


def test_any_missing_file_is_found(sound: Path) -> None:
    files = contents(sound)
    for name in sorted(files.keys() - {"index.parquet"}):
        (sound / name).unlink()
        if name.endswith(".parquet") and name != "plan.parquet":  # a part is the second copy of what the index has
            assert verify_store(str(sound)).faults == []
            restore(sound, files)
        else:
            check_found_and_mended(sound, files)


@pytest.mark.parametrize(
    "key, value",
    [
        ("aux_layer_ids", [1, 4, 5]),
        ("tokenizer_digest", "x"),
        ("shard_bytes", 5),
        ("format_version", 2),
        ("format_version", "1"),
        ("format", "zarr"),
        ("added", 1),
    ],
)
def test_an_edited_manifest_is_found(sound: Path, key: str, value: object) -> None:
    files = contents(sound)
    edited = json.loads(files["manifest.json"]) | {key: value}
    (sound / "manifest.json").write_text(json.dumps(edited, indent=1, sort_keys=True) + "\n")
    check_found_and_mended(sound, files)


def test_orphans_are_found(sound: Path) -> None:
    files = contents(sound)
    for name in ("shards/000999.safetensors", "shards/notes.txt", "data_0.pt"):
        (sound / name).write_bytes(b"?")
        assert name in {fault.file for fault in verify_store(str(sound)).faults}
        restore(sound, files)


def test_the_index_of_another_store_is_found(sound: Path, tmp_path: Path) -> None:
    files = contents(sound)
    reader = StoreReader(str(sound))
    write_store(
        str(tmp_path / "other"), SAMPLES, reader.manifest.model_copy(update={"plan": None, "tokens_digest": "x"})
    )
    for path in (tmp_path / "other").rglob("*.parquet"):  # nothing rejected there
        shutil.copy(path, sound / path.relative_to(tmp_path / "other"))
    check_found_and_mended(sound, files)


@pytest.mark.parametrize("value, fault", [(float("nan"), "NaN"), (float("inf"), "Inf"), (0.0, "only zeros")])
def test_bad_values_behind_a_right_checksum_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, fault: str
) -> None:
    monkeypatch.setattr("eyas.store.writer._check_values", lambda *args: None)
    sample = max(SAMPLES, key=lambda s: len(s.token_ids))
    with StoreWriter.open(str(tmp_path / "store"), make_manifest(), [sample.entry]) as writer:
        aux, final = states(sample)
        aux[4, 2] = value
        writer.write(sample, 0, aux, final)
    report = verify_store(str(tmp_path / "store"))
    assert [str(found) for found in report.faults] == [
        f"shards/000000.safetensors: sample {sample.id}: aux_hidden_states: 1 rows with {fault}, first at row 4"
    ]
    assert (report.bad_shards, report.recapture) == ([0], [sample.id])


def test_a_sample_of_the_store_is_read_from_every_shard(sound: Path) -> None:
    whole, part = verify_store(str(sound)), verify_store(str(sound), fraction=0.1)
    shards = len(list((sound / "shards").glob("*.safetensors")))
    assert part.checked == shards < whole.checked == len(SAMPLES)
    assert (part.faults, part.digest) == ([], whole.digest)


def test_the_command_lists_what_to_recapture_and_repairs(tmp_path: Path) -> None:
    commands.register(app)
    url = str(tmp_path / "store")
    write_store(url, SAMPLES, make_manifest(shard_bytes=1200), rejected=REJECTED)
    run = CliRunner()
    assert "no fault: 16 samples read, 15 written, 1 rejected" in run.invoke(app, ["verify", url]).output
    shard = tmp_path / "store/shards/000001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    result = run.invoke(app, ["verify", url])
    assert isinstance(result.exception, VerificationFailed) and result.exception.exit_code == 3
    assert "in these shards: 000001" in str(result.exception) and "--repair" in str(result.exception)
    result = run.invoke(app, ["verify", url, "--repair"])
    assert result.exit_code == 0 and "dropped 1 shards" in result.output
    result = run.invoke(app, ["verify", url])
    assert isinstance(result.exception, VerificationFailed) and "neither written nor rejected" in str(result.exception)


def test_a_reader_refuses_changed_bytes(sound: Path) -> None:
    files, reader = contents(sound), StoreReader(str(sound))
    name = "shards/000000.safetensors"
    (sound / name).write_bytes(files[name][:-40] + bytes(byte ^ 1 for byte in files[name][-40:]))
    first = next(ref.sample_id for ref in reader.samples() if ref.shard == 0)
    last = [ref.sample_id for ref in reader.samples() if ref.shard == 0][-1]
    assert first != last
    with pytest.raises(CorruptStore, match="has checksum [0-9a-f]{32}\nexpected: [0-9a-f]{32}, as the index says"):
        reader.read(last)
    restore(sound, files)
