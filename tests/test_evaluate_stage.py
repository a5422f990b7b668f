"""The evaluate stage on a tiny random target: figures by source, and which prompts are decoded."""

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_capture import make_run, random_samples
from safetensors.torch import save_file

from eyas.drafter.walk import answer_spans, walk
from eyas.evaluate import decode
from eyas.evaluate import stage as evaluate_stage
from eyas.evaluate.kinds import DIGITS, ENDS, OUTSIDE, PIECE, PUNCTUATION, RARE, SPACE, WORD, Kinds, kinds_of
from eyas.evaluate.stage import spread
from eyas.run import Run, open_run
from eyas.settings import Target as TargetTable
from eyas.stages import run_stage
from eyas.store.reader import StoredSample, StoreReader
from eyas.target import load_target

SETTINGS = ["train.draft_vocab_size=200", "train.epochs=1", "train.batch_tokens=128", "train.ttt_steps=2"]
SETTINGS += ["train.device=cpu", "train.precision=fp32", "train.lr=3e-3", "evaluate.decode_prompts=0"]


@pytest.fixture(scope="module")
def evaluated(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(
        tmp_path_factory.mktemp("evaluated"),
        tiny_target,
        random_samples([20 + 3 * i % 41 for i in range(40)]),
        overrides=SETTINGS,
    )
    for stage in ("capture", "verify", "train", "evaluate"):
        run_stage(run, stage)
    return run


def test_the_sources_add_up_to_the_whole(evaluated: Run) -> None:
    result = json.loads((evaluated.dir / "eval.json").read_text())
    assert sorted(result["by_source"]) == ["source0", "source1"]
    parts = result["by_source"].values()
    assert sum(part["verifications"] for part in parts) == result["verifications"] > 0
    accepted = sum((part["acceptance_length"] - 1) * part["verifications"] for part in parts)
    assert accepted == pytest.approx((result["acceptance_length"] - 1) * result["verifications"], abs=0.1)


def test_the_samples_add_up_to_the_whole(evaluated: Run) -> None:
    result = json.loads((evaluated.dir / "eval.json").read_text())
    heldout = StoreReader(evaluated.store_url).samples("heldout")
    assert sorted(result["by_sample"]) == sorted(ref.sample_id[:12] for ref in heldout)
    accepted, verifications = (
        sum(int(text.split("/")[place]) for text in result["by_sample"].values()) for place in range(2)
    )
    assert verifications == result["verifications"]
    assert 1 + accepted / verifications == pytest.approx(result["acceptance_length"], abs=1e-4)


def again(run: Run, *more: str) -> Run:
    """The run with these settings on top, to be evaluated anew."""
    return open_run(run.dir.parent.parent / "recipe.toml", [*SETTINGS, *more])


def test_a_target_too_large_for_the_memory_is_replayed_and_not_decoded(
    evaluated: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "available_memory", lambda: 1000)
    record = run_stage(again(evaluated, "evaluate.decode_prompts=2"), "evaluate", redo=True)
    result = json.loads((evaluated.dir / "eval.json").read_text())
    assert "the host has 1 kB free" in result["decode"]["skipped"] and "torch.float32" in result["decode"]["skipped"]
    assert f"no reference decoding of {evaluated.recipe.target.path}: its weights take" in capsys.readouterr().err
    assert record.counts["acceptance_length"] == result["replay"]["acceptance_length"]


def test_the_held_out_samples_of_one_pack_are_in_memory_at_a_time(
    evaluated: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two packs while the second is read. States of fp8 stores are decoded on the host: all at once were 86 GB for 2M
    tokens of a large target."""
    read, held, most = StoreReader.read, [], 0

    def counting(self: StoreReader, sample_id: str) -> StoredSample:
        nonlocal most
        sample = read(self, sample_id)
        held.append((weakref.ref(sample.aux_hidden_states), len(sample.token_ids)))
        most = max(most, sum(tokens for ref, tokens in held if ref() is not None))
        return sample

    monkeypatch.setattr(evaluate_stage, "_PACK_TOKENS", 64)
    monkeypatch.setattr(StoreReader, "read", counting)
    before = json.loads((evaluated.dir / "eval.json").read_text())
    run_stage(evaluated, "evaluate", redo=True)
    assert len(held) == len(StoreReader(evaluated.store_url).samples("heldout"))
    assert sum(tokens for _, tokens in held) > 3 * 64 and most <= 2 * 64
    after = json.loads((evaluated.dir / "eval.json").read_text())
    assert [after[key] for key in ("replay", "by_source", "kinds")] == [
        before[key] for key in ("replay", "by_source", "kinds")
    ]


def test_quantised_weights_are_not_decoded_with(tiny_target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    whole = load_target(TargetTable(path=str(folder)))
    assert decode.why_not(whole, torch.float32, torch.device("cpu")) == ""
    save_file({"packed": torch.zeros(4, 4, dtype=torch.int32)}, folder / "model.safetensors")
    packed = load_target(TargetTable(path=str(folder)))
    assert "packed is I32" in decode.why_not(packed, torch.float32, torch.device("cpu"))


def test_the_first_forward_of_neither_form_is_on_the_clock(evaluated: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("decode_plain", "decode_speculative"):
        original, first = getattr(evaluate_stage, name), [1000.0]

        def slow(
            *arguments: object, original: Callable[..., decode.Decoded] = original, first: list[float] = first
        ) -> decode.Decoded:
            decoded = original(*arguments)
            return replace(decoded, wall_s=decoded.wall_s + (first.pop() if first else 0.0))

        monkeypatch.setattr(evaluate_stage, name, slow)
    run_stage(again(evaluated, "evaluate.decode_prompts=2", "evaluate.decode_tokens=4"), "evaluate", redo=True)
    result = json.loads((evaluated.dir / "eval.json").read_text())
    assert result["lossless"] and result["decode"]["prompts"] == 2
    assert max(result["wall_s"].values()) < 1000


def test_the_replay_outlives_decoding_that_fails(evaluated: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = json.loads((evaluated.dir / "eval.json").read_text())["replay"]
    run = again(evaluated, "evaluate.decode_prompts=2")

    def killed(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(evaluate_stage, "_decode", killed)
        run_stage(run, "evaluate", redo=True)
    assert json.loads((evaluated.dir / "eval.json").read_text())["replay"] == before


def test_kinds_count_every_draft_that_met_a_token() -> None:
    # Tokens 4.. are the answer; drafts of 2: the first right, the second wrong, and so on.
    ids, mask = np.array([9, 9, 9, 1, 2, 3, 4, 5, 6, 7]), np.arange(10) >= 3
    hits = np.zeros((10, 2), dtype=bool)
    hits[2] = [True, False]  # after token 3: 2 right, 3 wrong -> bonus 3
    hits[4] = [True, True]  # after token 5: 4 and 5 right -> bonus 6
    hits[7] = [False, True]  # after token 8: 7 wrong
    kinds = Kinds(dict.fromkeys(range(10), WORD) | {3: DIGITS, 7: OUTSIDE})
    kinds.add(ids, mask, hits)
    assert kinds.as_json() == {
        DIGITS: {"met": 1, "right": 0},
        OUTSIDE: {"met": 1, "right": 0},
        WORD: {"met": 3, "right": 3},
    }
    walked = walk(hits, answer_spans(mask))
    assert int(walked.accepted_at.sum()) == sum(kinds.right.values())


def test_what_a_token_is() -> None:
    class Tokenizer:
        texts = (" the", "Hello", "ing", "42", " 7", "!", "...", "\n\n", " rarely", "<end>", "out")

        def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
            return self.texts[ids[0]]

    counts = np.full(11, 50)
    counts[8] = 3
    known = np.arange(11) != 10
    found = kinds_of(range(11), Tokenizer(), draft_vocabulary=known, ends=[9], training_counts=counts)
    expected = [WORD, WORD, PIECE, DIGITS, DIGITS, PUNCTUATION, PUNCTUATION, SPACE, RARE, ENDS, OUTSIDE]
    assert [found[token] for token in range(11)] == expected


def test_kinds_add_up_to_the_replay(evaluated: Run) -> None:
    result = json.loads((evaluated.dir / "eval.json").read_text())
    right = sum(kind["right"] for kind in result["kinds"].values())
    assert right == pytest.approx((result["acceptance_length"] - 1) * result["verifications"], abs=0.1)


def test_prompts_are_taken_from_the_sources_in_turn(evaluated: Run) -> None:
    reader = StoreReader(evaluated.store_url)
    samples = [reader.read(ref.sample_id) for ref in reader.samples("heldout")]
    chosen = spread(samples, 4)
    assert sorted(sample.source for sample in chosen) == ["source0", "source0", "source1", "source1"]
    assert [sample.source for sample in chosen][:2] in (["source0", "source1"], ["source1", "source0"])
    assert {sample.id for sample in spread(samples, 1000)} == {sample.id for sample in samples}
