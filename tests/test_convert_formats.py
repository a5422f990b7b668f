"""The converters against folders made here by the other tools' rules, and against what a user can get wrong."""

import gzip
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import typer
from helpers_convert import AUX_LAYER_IDS, Captured, capture, make_target, write_captured
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from eyas.cli import commands
from eyas.errors import ManifestMismatch, StoreError, TargetError
from eyas.store.convert import importer
from eyas.store.convert.exporter import export_store
from eyas.store.convert.formats import CONVENTIONS, open_sink, open_source
from eyas.store.convert.importer import ImportOptions, import_folder
from eyas.store.convert.peer import BadFile
from eyas.store.convert.tail import FinalNorm
from eyas.store.reader import StoreReader
from eyas.store.verify import verify_store
from eyas.target import Target

torch.set_num_threads(1)
OURS = ImportOptions(aux_layer_ids=AUX_LAYER_IDS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Target, list[Captured]]]:
    folder = tmp_path_factory.mktemp("convert")
    target = make_target(folder / "target")
    captured = capture(target, 14)
    write_captured(str(folder / "store"), target, captured)
    yield folder / "store", target, captured


# The folders, written in a few plain lines each by what reference/ says of the tools, not by the code under test.


def write_v1(folder: Path, captured: list[Captured]) -> None:
    folder.mkdir()
    for number, one in enumerate(captured):
        states = [one.layers[:, layer].clone() for layer in AUX_LAYER_IDS] + [one.pre_norm.clone()]
        sample = {"input_ids": torch.from_numpy(one.sample.token_ids).long(), "hidden_states": states}
        torch.save(sample | {"loss_mask": torch.from_numpy(one.sample.loss_mask).long()}, folder / f"data_{number}.pt")


def write_today(folder: Path, captured: list[Captured]) -> None:
    (folder / "hidden_states").mkdir(parents=True)
    columns = {
        "input_ids": [one.sample.token_ids.astype(np.int64) for one in captured],
        "loss_mask": [one.sample.loss_mask.astype(np.int64) for one in captured],
        "seq_len": [len(one.sample.token_ids) for one in captured],
    }
    table = pa.table(columns)
    for part, rows in enumerate((table.slice(0, 5), table.slice(5))):
        with pa.ipc.new_stream(str(folder / f"data-{part}.arrow"), table.schema) as stream:
            stream.write_table(rows)
    listed = [{"filename": f"data-{part}.arrow"} for part in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": listed}))
    for number, one in enumerate(captured):
        states = torch.cat([one.aux, one.pre_norm.unsqueeze(1)], 1)
        ids = torch.from_numpy(one.sample.token_ids).long()
        save_file({"hidden_states": states, "token_ids": ids}, folder / f"hidden_states/hs_{number}.safetensors")


def write_specforge(folder: Path, captured: list[Captured], pad_to: int = 0, pad_id: int = 0) -> None:
    """Every third file is gzipped; rows are padded to `pad_to`, their padding has states too."""
    (folder / "rows_0-2000").mkdir(parents=True)
    for number, one in enumerate(captured):
        more = max(0, pad_to - len(one.sample.token_ids))
        noise = torch.ones(more, 4 * one.final.shape[1], dtype=torch.bfloat16)
        aux = torch.cat([one.aux.flatten(1), noise[:, : 3 * one.final.shape[1]]])
        final = torch.cat([one.final, noise[:, 3 * one.final.shape[1] :]])
        ids = np.append(one.sample.token_ids, np.full(more, pad_id)).astype(np.int64)
        mask = np.append(one.sample.loss_mask, np.zeros(more)).astype(np.int64)
        sample = {"input_ids": torch.from_numpy(ids), "loss_mask": torch.from_numpy(mask)}
        sample |= {"hidden_state": final.unsqueeze(0), "aux_hidden_state": aux.unsqueeze(0)}
        path = folder / f"rows_0-2000/data_{number}.ckpt"
        if number % 3:
            torch.save(sample, path)
        else:
            content = io.BytesIO()
            torch.save(sample, content)
            Path(f"{path}.gz").write_bytes(gzip.compress(content.getvalue()))
    (folder / "vocab_mapping").mkdir()
    torch.save({"d2t": torch.zeros(4, dtype=torch.int64)}, folder / "vocab_mapping/vocab_mapping.pt")


WRITERS: dict[str, Callable[[Path, list[Captured]], None]] = {
    "speculators-v1": write_v1,
    "speculators": write_today,
    "specforge": write_specforge,
}


def check_stored(url: str, captured: list[Captured], exact_final: bool) -> None:
    reader, report = StoreReader(url), verify_store(url)
    assert (report.faults, report.written, report.pending) == ([], len(captured), 0)
    assert reader.manifest.aux_layer_ids == AUX_LAYER_IDS and reader.manifest.final_state == "post_norm"
    for one in captured:
        stored = reader.read(one.sample.id)
        assert stored.token_ids.tolist() == one.sample.token_ids.tolist()
        assert stored.loss_mask.tolist() == one.sample.loss_mask.tolist()
        assert torch.equal(stored.aux_hidden_states, one.aux)
        final = one.final[torch.from_numpy(one.sample.loss_mask)]
        if exact_final:
            assert torch.equal(stored.final_hidden_states, final)
        else:  # the folder's were rounded to bf16 before the norm: 2^-8 of a value, and once more after it
            torch.testing.assert_close(stored.final_hidden_states.float(), final.float(), rtol=2**-6, atol=1e-3)


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_of_each_tool_is_read(world: tuple[Path, Target, list[Captured]], tmp_path: Path, name: str) -> None:
    _, target, captured = world
    WRITERS[name](tmp_path / "folder", captured)
    told = [1, 3, 4] if name != "speculators" else [2, 4, 5]  # 2, 4 and 5 layers deep, as each tool counts
    options = ImportOptions(tool_layer_ids=told, heldout=0.3, source="peer", shard_bytes=1 << 16)
    report = import_folder(name, tmp_path / "folder", str(tmp_path / "store"), target, options)
    assert (report.read, report.written, report.rejected, report.aux_layer_ids) == (14, 14, {}, AUX_LAYER_IDS)
    check_stored(str(tmp_path / "store"), captured, exact_final=name == "specforge")
    assert report.fit is not None and report.fit[0] > report.fit[1] + 0.1  # the right convention fits its own text
    refs = StoreReader(str(tmp_path / "store")).samples()
    assert {ref.source for ref in refs} == {"peer"} and {ref.split for ref in refs} == {"train", "heldout"}


@pytest.mark.parametrize("name", WRITERS)
def test_export_and_import_come_back(world: tuple[Path, Target, list[Captured]], tmp_path: Path, name: str) -> None:
    url, target, captured = world
    report = export_store(name, str(url), tmp_path / "folder", target=target)
    total = sum(len(one.sample.token_ids) for one in captured)
    supervised = sum(int(one.sample.loss_mask.sum()) for one in captured)
    assert (report.samples, report.tokens, report.empty_rows) == (14, total, total - supervised)
    assert report.tool_layer_ids == ([1, 3, 4] if name != "speculators" else [2, 4, 5])
    import_folder(name, tmp_path / "folder", str(tmp_path / "back"), target, OURS)
    check_stored(str(tmp_path / "back"), captured, exact_final=name == "specforge")
    again = StoreReader(str(tmp_path / "back"))
    head = load_file(target.path / "model.safetensors")["lm_head.weight"]
    for one in captured:  # what training sees of them: the target's distribution
        stored = again.read(one.sample.id).final_hidden_states.float() @ head.T
        truth = one.final[one.sample.loss_mask].float() @ head.T
        assert (stored.softmax(-1) - truth.softmax(-1)).abs().max() < 0.01


def test_v1_files_are_what_speculators_0_3_wrote(world: tuple[Path, Target, list[Captured]], tmp_path: Path) -> None:
    url, target, captured = world
    export_store("speculators-v1", str(url), tmp_path / "v1", target=target)
    by_ids = {tuple(one.sample.token_ids): one for one in captured}
    lengths = json.loads((tmp_path / "v1/sample_lengths.json").read_text())
    for number in range(14):
        sample = torch.load(tmp_path / f"v1/data_{number}.pt", weights_only=True)
        one = by_ids[tuple(sample["input_ids"].tolist())]
        assert sample["input_ids"].dtype == sample["loss_mask"].dtype == torch.int64
        assert isinstance(sample["hidden_states"], list) and lengths[str(number)] == len(sample["input_ids"])
        assert all(state.is_contiguous() and state.dtype == torch.bfloat16 for state in sample["hidden_states"])
        assert torch.equal(torch.stack(sample["hidden_states"][:3], 1), one.aux)
        normed = FinalNorm(target).to_post(sample["hidden_states"][3])[one.sample.loss_mask]
        torch.testing.assert_close(normed.float(), one.final[one.sample.loss_mask].float(), rtol=2**-6, atol=1e-3)
        size = sum(tensor.nbytes for tensor in (sample["input_ids"], sample["loss_mask"], *sample["hidden_states"]))
        assert (tmp_path / f"v1/data_{number}.pt").stat().st_size < size + 8192  # no view drags its shard along
    assert json.loads((tmp_path / "v1/data_config.json").read_text())["hidden_states"]["layer_ids"] == [1, 3, 4, 7]
    assert sum(path.name.endswith("pt") for path in (tmp_path / "v1").iterdir()) == 14  # 0.3 lists *pt, all of them


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(CONVENTIONS)))
def test_any_sample_comes_through_a_sink_and_its_source(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    folder = tmp_path_factory.mktemp("sink")
    hidden, count = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    sink, samples = open_sink(name, folder, compress=name == "specforge" and data.draw(st.booleans())), []
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    for _ in range(count):
        tokens = data.draw(st.integers(1, 7))
        ids = torch.tensor(data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens)))
        mask = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens)))
        states = torch.randn(tokens, 4, hidden, generator=generator).bfloat16()
        samples.append((ids, mask, states[:, :3], states[:, 3]))
    for row in data.draw(st.permutations(range(count))):
        sink.write(row, *samples[row])
    sink.finish(_heads([len(ids) for ids, *_ in samples], hidden))
    source = open_source(name, folder)
    assert len(source) == count
    for row, (ids, mask, aux, final) in enumerate(samples):
        head, states = source.head(row), source.states(row)
        assert (head.token_ids.tolist(), head.loss_mask.tolist()) == (ids.tolist(), mask.bool().tolist())
        assert head.hidden_size == hidden
        assert torch.equal(states[0], aux) and torch.equal(states[1], final)


def _heads(lengths: list[int], hidden: int) -> Any:
    from eyas.store.convert.peer import Heads

    return Heads(lengths, np.zeros(4, np.int64), [1, 3, 4], 8, hidden, "/models/tiny")


def test_the_norm_is_divided_out() -> None:
    """w * x / rms(x) divided by w has mean square 1, and the norm takes it to the same place."""

    class Norm(FinalNorm):
        def __init__(self) -> None:
            self.weight, self.eps = torch.rand(64) * 3 + 0.01, 1e-5

    norm, pre = Norm(), torch.randn(50, 64) * torch.logspace(-1, 3, 50).unsqueeze(1)
    post = norm.to_post(pre)
    divided = norm.to_pre(post)
    assert ((divided.float().square().mean(-1) - 1).abs() < 0.01).all()
    torch.testing.assert_close(norm.to_post(divided).float(), post.float(), rtol=2**-6, atol=0)


# What a user can get wrong


def test_layer_ids_are_asked_for_and_contradictions_named(
    world: tuple[Path, Target, list[Captured]], tmp_path: Path
) -> None:
    url, target, captured = world
    write_v1(tmp_path / "v1", captured)
    for name in ("speculators-v1", "speculators", "specforge"):
        if name != "speculators-v1":
            WRITERS[name](tmp_path / name, captured)
        folder = tmp_path / ("v1" if name == "speculators-v1" else name)
        with pytest.raises(StoreError, match="the folder doesn't say which layers") as told:
            import_folder(name, folder, str(tmp_path / "store"), target, ImportOptions())
        assert "--tool-layer-ids" in told.value.expected and not (tmp_path / "store").exists()
    export_store("speculators-v1", str(url), tmp_path / "recorded", target=target)
    report = import_folder("speculators-v1", tmp_path / "recorded", str(tmp_path / "store"), target, ImportOptions())
    assert report.aux_layer_ids == AUX_LAYER_IDS  # data_config.json has them
    seen = r"records the layers \[1, 3, 4\].*\nexpected: \[2, 4, 5\], which is \[3, 5, 6\]"
    with pytest.raises(StoreError, match=seen):
        import_folder(
            "speculators-v1",
            tmp_path / "recorded",
            str(tmp_path / "other"),
            target,
            ImportOptions(tool_layer_ids=[2, 4, 5]),
        )
    with pytest.raises(StoreError, match="what they meant depends on SGLang's version"):
        CONVENTIONS["specforge"].to_ours([1, 3, 4], "deepseek_v3")
    with pytest.raises(TargetError, match="the target has 8 layers"):
        options = ImportOptions(aux_layer_ids=[2, 4, 8])
        import_folder("speculators-v1", tmp_path / "v1", str(tmp_path / "other"), target, options)


def test_a_convention_that_the_text_contradicts_is_refused(
    world: tuple[Path, Target, list[Captured]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Post-norm states in speculators' files; a random target tells the two apart by less than a real one."""
    _, target, captured = world
    monkeypatch.setattr(importer, "_CONTRADICTED", 0.1)
    write_v1(tmp_path / "v1", captured)
    for number, one in enumerate(captured):
        sample = torch.load(tmp_path / f"v1/data_{number}.pt", weights_only=True)
        sample["hidden_states"][3] = one.final
        torch.save(sample, tmp_path / f"v1/data_{number}.pt")
    with pytest.raises(
        StoreError, match=r"taken as pre_norm give the text a log-probability of -\d.*as post_norm"
    ) as told:
        import_folder("speculators-v1", tmp_path / "v1", str(tmp_path / "store"), target, OURS)
    assert "--final-state post_norm" in told.value.next and not (tmp_path / "store").exists()
    options = ImportOptions(aux_layer_ids=AUX_LAYER_IDS, final_state="post_norm")
    import_folder("speculators-v1", tmp_path / "v1", str(tmp_path / "store"), target, options)
    check_stored(str(tmp_path / "store"), captured, exact_final=True)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Path(os.environ["EVIL"]) / "it-ran"),)


def test_no_code_in_a_file_is_run(
    world: tuple[Path, Target, list[Captured]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target, captured = world
    monkeypatch.setenv("EVIL", str(tmp_path))
    for name, path in (("speculators-v1", "data_2.pt"), ("specforge", "rows_0-2000/data_2.ckpt")):
        WRITERS[name](tmp_path / name, captured[:4])
        torch.save({"input_ids": _Evil(), "loss_mask": 1, "hidden_states": []}, tmp_path / name / path)
        with pytest.raises(BadFile, match=r"data_2\.\w+: unreadable \(.*[Ww]eights") as told:
            import_folder(name, tmp_path / name, str(tmp_path / "store"), target, OURS)
        assert "--skip-bad-files" in told.value.next
    assert not (tmp_path / "it-ran").exists()


def test_every_sample_is_accounted_for(world: tuple[Path, Target, list[Captured]], tmp_path: Path) -> None:
    _, target, captured = world
    folder = tmp_path / "v1"
    write_v1(folder, captured)
    shutil.copy(folder / "data_1.pt", folder / "data_20.pt")
    (folder / "data_2.pt").write_bytes((folder / "data_2.pt").read_bytes()[:3000])
    sample = torch.load(folder / "data_3.pt", weights_only=True)
    sample["hidden_states"][1][2, 5] = float("nan")
    torch.save(sample, folder / "data_3.pt")
    sample = torch.load(folder / "data_4.pt", weights_only=True)
    sample["hidden_states"] = sample["hidden_states"][:3]
    torch.save(sample, folder / "data_4.pt")
    with pytest.raises(BadFile, match=r"data_2\.pt: unreadable"):
        import_folder("speculators-v1", folder, str(tmp_path / "store"), target, OURS)
    options = ImportOptions(aux_layer_ids=AUX_LAYER_IDS, skip_bad_files=True)
    for _ in range(2):  # the second finds all done, and says the same
        report = import_folder("speculators-v1", folder, str(tmp_path / "store"), target, options)
        expected = {"unreadable": 1, "2 aux layers": 1, "duplicate": 1, "NaN in aux_hidden_states": 1}
        assert (report.read, report.written, dict(report.rejected)) == (15, 11, expected)
    assert verify_store(str(tmp_path / "store")).faults == []


def test_rows_without_states_and_with_other_tokens(world: tuple[Path, Target, list[Captured]], tmp_path: Path) -> None:
    _, target, captured = world
    folder = tmp_path / "today"
    write_today(folder, captured)
    (folder / "hidden_states/hs_6.safetensors").unlink()
    path = folder / "hidden_states/hs_7.safetensors"
    tensors = load_file(path)
    tensors["token_ids"][0] += 1
    save_file(tensors, path)
    with pytest.raises(BadFile, match=r"hs_6\.safetensors: no hidden states"):
        import_folder("speculators", folder, str(tmp_path / "store"), target, OURS)
    options = ImportOptions(aux_layer_ids=AUX_LAYER_IDS, skip_bad_files=True)
    report = import_folder("speculators", folder, str(tmp_path / "store"), target, options)
    assert dict(report.rejected) == {"no hidden states": 1, "token ids differ from the data set's": 1}
    assert report.read == report.written + 2 == 14


def test_padding_is_cut_where_it_is_named(world: tuple[Path, Target, list[Captured]], tmp_path: Path) -> None:
    _, target, captured = world
    write_specforge(tmp_path / "padded", captured, pad_to=40, pad_id=2)
    report = import_folder("specforge", tmp_path / "padded", str(tmp_path / "as-is"), target, OURS)
    padding = sum(40 - len(one.sample.token_ids) for one in captured)
    assert report.tokens == 40 * 14 and padding <= report.repeated_tail <= padding + 14
    report = import_folder(
        "specforge",
        tmp_path / "padded",
        str(tmp_path / "cut"),
        target,
        ImportOptions(aux_layer_ids=AUX_LAYER_IDS, pad_id=2),
    )
    assert report.repeated_tail == 0
    check_stored(str(tmp_path / "cut"), captured, exact_final=True)


def test_the_wrong_target_folder_or_place(world: tuple[Path, Target, list[Captured]], tmp_path: Path) -> None:
    from helpers_tiny import make_tiny_target

    from eyas.settings import Target as TargetTable
    from eyas.target import load_target

    url, target, captured = world
    other = load_target(TargetTable(path=str(make_tiny_target(tmp_path / "other-target", hidden=32))))
    write_v1(tmp_path / "v1", captured)
    with pytest.raises(StoreError, match=r"states of width 48.*\nexpected: width 32"):
        import_folder("speculators-v1", tmp_path / "v1", str(tmp_path / "store"), other, OURS)
    with pytest.raises(ManifestMismatch, match="target.model_digest"):
        export_store("speculators", str(url), tmp_path / "out", target=other)
    with pytest.raises(StoreError, match="keeps final states before the target's last norm") as told:
        export_store("speculators", str(url), tmp_path / "out", target=None)
    assert told.value.next == "--target DIR"
    with pytest.raises(StoreError, match="no sample\nexpected: a folder of SpecForge"):
        import_folder("specforge", tmp_path / "v1", str(tmp_path / "store"), target, OURS)
    with pytest.raises(StoreError, match="no such folder"):
        import_folder("specforge", tmp_path / "nowhere", str(tmp_path / "store"), target, OURS)
    with pytest.raises(StoreError, match="not empty"):
        export_store("specforge", str(url), tmp_path / "v1", target=None)
    assert not (tmp_path / "out").exists() and not (tmp_path / "store").exists()


@pytest.mark.parametrize("name, compress", [(name, False) for name in WRITERS] + [("specforge", True)])
def test_a_stopped_export_goes_on(
    world: tuple[Path, Target, list[Captured]], tmp_path: Path, name: str, compress: bool
) -> None:
    url, target, _ = world
    export_store(name, str(url), tmp_path / "whole", target=target, compress=compress)
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    samples = sorted(
        path for kind in ("data_*.pt", "data_*.ckpt*", "hs_*") for path in (tmp_path / "stopped").rglob(kind)
    )
    assert len(samples) == 14
    before = samples[0].stat().st_mtime_ns
    for path in samples[4:]:
        path.unlink()
    (samples[0].parent / ".partial-1-2-x.part").write_bytes(b"left by a kill")
    for path in (tmp_path / "stopped").glob("*.arrow"):
        path.unlink()
    export_store(name, str(url), tmp_path / "stopped", target=target, compress=compress)
    assert samples[0].stat().st_mtime_ns == before
    whole, again = (
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "whole", tmp_path / "stopped")
    )
    assert whole == again
    with pytest.raises(StoreError, match=r"an export with split '' is here\nexpected: 'train'"):
        export_store(name, str(url), tmp_path / "whole", target=target, compress=compress, split="train")


def test_the_commands_say_what_was_converted(world: tuple[Path, Target, list[Captured]], tmp_path: Path) -> None:
    url, target, captured = world
    cli = typer.Typer()
    commands.register(cli)

    def run(*arguments: object) -> str:
        done = CliRunner().invoke(cli, ["store", *map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    tokens = sum(len(one.sample.token_ids) for one in captured)
    empty = tokens - sum(int(one.sample.loss_mask.sum()) for one in captured)
    said = run("export", url, tmp_path / "v1", "--as", "speculators-v1", "--target", target.path)
    assert f"14 samples, {tokens:,} tokens; ids, masks and aux states are exact" in said
    assert "aux layers [2, 4, 5], which speculators-v1 calls [1, 3, 4]" in said
    assert f"zeros are written for {empty:,} final states outside answers" in said
    said = run("export", url, tmp_path / "sf", "--as", "specforge", "--compress")
    assert "SpecForge 0.2.0 learns from" in said and len(list((tmp_path / "sf").rglob("*.ckpt.gz"))) == 14
    said = run(
        *("import", tmp_path / "sf", tmp_path / "back", "--from", "specforge", "--target", target.path),
        *("--tool-layer-ids", "1,3,4", "--encoding", "fp8", "--heldout", "0.2"),
    )
    assert "14 read = 14 written + 0 rejected" in said
    assert "aux layers [2, 4, 5], which specforge calls [1, 3, 4]" in said
    assert "final states: after the norm in the folder, as they are stored here" in said
    assert "log-probability of the next supervised token" in said and "warning" not in said
    said = run(
        *("import", tmp_path / "v1", tmp_path / "wrong", "--from", "speculators-v1", "--target", target.path),
        *("--final-state", "post_norm"),
    )
    assert "warning: the other convention predicts the text better" in said
