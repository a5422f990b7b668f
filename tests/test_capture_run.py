"""The capture stage: what it stores, what it rejects, what it refuses."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_capture import make_run, random_samples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eyas.capture.plan import batches
from eyas.capture.run import execute, inputs
from eyas.data.tokens import Sample
from eyas.errors import DataError, EngineError, ManifestMismatch, RecipeError, StoreError, StoreFull, TargetError
from eyas.record import load_record
from eyas.run import Run, open_run
from eyas.stages import run_stage
from eyas.store.reader import StoreReader

LENGTHS = [3, 64, 17, 1, 150, 32, 32, 90, 5, 41, 12, 77]


def written(run: Run) -> dict[str, np.ndarray]:
    store = StoreReader(run.store_url)
    return {ref.sample_id: store.read(ref.sample_id).aux_hidden_states for ref in store.samples()}


def poisoned(target: Path, to: Path, *, token: int, value: float) -> Path:
    """A copy of the target in which the embedding of one token is `value` throughout."""
    folder = Path(shutil.copytree(target, to / "poisoned"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_stored_states_equal_a_run_of_each_sample_alone(tiny_target: Path, tmp_path: Path) -> None:
    samples = random_samples(LENGTHS)
    run = make_run(tmp_path, tiny_target, samples)
    result = execute(run)
    store = StoreReader(run.store_url)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    assert store.manifest.aux_layer_ids == [2, 4, 5]
    assert [ref.sample_id for ref in store.samples("heldout")] == sorted(s.id for s in samples if s.split == "heldout")
    for sample in samples:
        stored = store.read(sample.id)
        with torch.inference_mode():
            alone = model(torch.from_numpy(sample.token_ids).long()[None], output_hidden_states=True)
        aux = torch.stack([alone.hidden_states[i][0] for i in (2, 4, 5)], dim=1)
        final = alone.hidden_states[-1][0][torch.from_numpy(sample.loss_mask)]
        # bfloat16 keeps 8 bits: half a step is 1/256 of the value.
        torch.testing.assert_close(stored.aux_hidden_states.float(), aux, rtol=1 / 200, atol=1e-5)
        torch.testing.assert_close(stored.final_hidden_states.float(), final, rtol=1 / 200, atol=1e-5)
        assert np.array_equal(stored.token_ids, sample.token_ids)
        assert np.array_equal(stored.loss_mask, sample.loss_mask)
    assert result.output == store.digest
    assert result.counts["samples"] == len(LENGTHS)
    assert result.counts["tokens"] == sum(LENGTHS)
    assert result.counts["supervised_tokens"] == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert result.counts["rejected"] == {}
    assert result.counts["bytes"] == sum(path.stat().st_size for path in Path(run.store_url).rglob("*.safetensors"))


def test_batch_size_changes_states_by_rounding_only(tiny_target: Path, tmp_path: Path) -> None:
    samples = random_samples([*LENGTHS, *range(60, 70)])
    runs = []
    for batch_tokens in (1, 4096):
        folder = tmp_path / str(batch_tokens)
        folder.mkdir()
        runs.append(make_run(folder, tiny_target, samples, overrides=[f"capture.batch_tokens={batch_tokens}"]))
        execute(runs[-1])
    assert inputs(runs[0]) == inputs(runs[1])
    alone, together = map(written, runs)
    for sample_id, states in alone.items():
        torch.testing.assert_close(states.float(), together[sample_id].float(), rtol=1 / 100, atol=1e-4)


@pytest.mark.parametrize(("value", "name"), [(float("nan"), "NaN"), (float("inf"), "Inf"), (0.0, "only zeros")])
def test_bad_states_are_rejected_with_the_reason(tiny_target: Path, tmp_path: Path, value: float, name: str) -> None:
    samples = random_samples(LENGTHS, first_tokens=[5] * 4)
    folder = poisoned(tiny_target, tmp_path, token=5, value=value)
    run = make_run(tmp_path, folder, samples, overrides=["drafter.aux_layer_ids=[0,4,5]"])
    result = execute(run)
    assert set(written(run)) == {sample.id for sample in samples[4:]}
    assert result.counts["rejected"] == {f"{name} in aux_hidden_states[0]": 4}
    assert result.counts["samples"] == len(samples) - 4


def test_more_than_half_rejected_fails_the_stage(
    tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = random_samples(LENGTHS, first_tokens=[5] * 7)
    run = make_run(tmp_path, poisoned(tiny_target, tmp_path, token=5, value=float("nan")), samples)
    for _ in range(2):  # also when everything is settled already
        with pytest.raises(EngineError, match=r"7 of 12 samples were rejected: 7 x NaN in aux_hidden_states\[0\]"):
            run_stage(run, "capture")
    assert load_record(run.dir, "capture") is None
    assert f"rejected: sample {samples[1].id}, position 0: aux_hidden_states[0] has NaN" in capsys.readouterr().err


def test_nan_in_the_padding_costs_no_sample(tiny_target: Path, tmp_path: Path) -> None:
    samples = random_samples(range(40, 60))  # of similar length, so that batches have padding
    folder = poisoned(tiny_target, tmp_path, token=0, value=float("nan"))  # 0 is what batches are padded with
    clean, bad = (tmp_path / name for name in ("clean", "bad"))
    states = []
    for place, target in ((clean, tiny_target), (bad, folder)):
        place.mkdir()
        run = make_run(place, target, samples)
        assert execute(run).counts["rejected"] == {}
        states.append(written(run))
    for sample_id, expected in states[0].items():
        torch.testing.assert_close(states[1][sample_id].float(), expected.float(), rtol=1 / 100, atol=1e-4)


def test_a_second_run_skips_and_a_changed_input_is_refused(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    run = make_run(tmp_path, tiny_target, random_samples(LENGTHS))
    first = run_stage(run, "capture")
    assert run_stage(run, "capture").finished == first.finished
    other = open_run(tmp_path / "recipe.toml", ["engine.dtype=bfloat16"])
    with pytest.raises(RecipeError, match='engine.dtype was "float32" and is now "bfloat16"'):
        run_stage(other, "capture")
    with pytest.raises(ManifestMismatch, match=r"engine\.dtype is 'float32' in the store"):
        execute(other)
    assert run_stage(other, "capture", redo=True).output != first.output


def test_a_store_says_in_which_number_type_the_target_ran(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU that is slow in bfloat16 the states of that recipe are those of float32."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    samples, stored = random_samples(LENGTHS), []
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        folder.mkdir()
        make_run(folder, tiny_target, samples)
        run = open_run(folder / "recipe.toml", [f"engine.dtype={dtype}"])
        execute(run)
        assert StoreReader(run.store_url).manifest.engine.dtype == "float32"
        stored.append(written(run))
    assert "float32 on cpu, in the place of bfloat16, in which this CPU is slow" in capsys.readouterr().err
    assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])


def test_an_upgraded_engine_goes_on_with_the_store(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = random_samples(LENGTHS)
    run = make_run(tmp_path, tiny_target, samples)
    first = execute(run)
    monkeypatch.setattr("eyas.capture.run._version", lambda run: "transformers 99.0")
    Path(run.store_url, "shards/000001.safetensors").unlink()
    second = execute(run)
    assert second.output == first.output and second.counts["samples"] == len(samples)
    assert second.counts["releases"] == [*first.counts["releases"], "transformers 99.0"]
    assert StoreReader(run.store_url).manifest.engine.version == first.counts["releases"][0]


def test_redo_removes_the_stores_own_files_only(tiny_target: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, tiny_target, random_samples(LENGTHS))
    first = run_stage(run, "capture")
    note = Path(run.store_url) / "note.txt"
    note.write_text("mine")
    shard = next(Path(run.store_url).rglob("*.safetensors"))
    made = shard.stat().st_mtime_ns
    with pytest.raises(StoreError, match=r"note\.txt"):  # the writer doesn't mix with other people's files
        run_stage(run, "capture", redo=True)
    assert note.read_text() == "mine"
    note.unlink()
    again = run_stage(run, "capture")
    assert again.output == first.output
    assert shard.stat().st_mtime_ns != made


def test_missing_target_wrong_tokenizer_and_cut_weights(tiny_target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    run = make_run(tmp_path, folder, random_samples(LENGTHS))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TargetError, match="not a whole safetensors file"):
        run_stage(run, "capture")
    weights.write_bytes(whole)
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"model_max_length": 5}))
    with pytest.raises(DataError, match="made with a tokenizer of digest"):
        run_stage(run, "capture")
    shutil.rmtree(folder)
    with pytest.raises(TargetError, match="no such folder"):
        run_stage(run, "capture")
    assert not list(Path(run.store_url).rglob("*.safetensors"))


def test_the_budget_stops_capture(tiny_target: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, tiny_target, random_samples(LENGTHS), overrides=["store.max_bytes=70000"])
    with pytest.raises(StoreFull, match="12 samples needs"):
        run_stage(run, "capture")
    full = open_run(tmp_path / "recipe.toml", [f"store.min_free_bytes={1 << 60}"])
    with pytest.raises(StoreFull, match="left free"):
        run_stage(full, "capture")


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200))
def test_batches_hold_every_sample_once_within_the_budget(lengths: list[int], budget: int) -> None:
    samples = [
        Sample(f"{i:032x}", "s", "train", np.zeros(n, np.int32), np.ones(n, bool)) for i, n in enumerate(lengths)
    ]
    made = list(batches(samples, budget))
    assert sorted(s.id for s in itertools.chain(*made)) == [s.id for s in samples]
    for batch in made:
        widths = [len(s.token_ids) for s in batch]
        assert len(batch) == 1 or len(batch) * max(widths) <= budget
        assert min(widths) >= 0.85 * max(widths)
    widths = [len(s.token_ids) for s in itertools.chain(*made)]
    assert widths == sorted(widths, reverse=True)
