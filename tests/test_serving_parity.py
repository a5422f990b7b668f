"""Parity on a tiny target, with reference decoding in the place of the engine: right, and wrong in each way that the
causes name. Training, capture and replay are real; only the engine is played."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_capture import make_run
from transformers import AutoModelForCausalLM

from eyas.data.tokens import Sample, sample_id
from eyas.drafter.eagle3 import Drafter
from eyas.drafter.saved import load_drafter
from eyas.drafter.target import load_target_head
from eyas.drafter.walk import Acceptance
from eyas.engine.drafting import Drafting
from eyas.errors import VerificationFailed
from eyas.evaluate import decode, parity, serving
from eyas.evaluate.again import Exchange
from eyas.evaluate.decode import DrafterSession, TargetSession, decode_plain, decode_speculative
from eyas.evaluate.parity import Counted, choose_prompts, compare, counted
from eyas.evaluate.prompts import load_sets
from eyas.run import Run
from eyas.stages import run_stage
from eyas.target import Target, load_target

CPU, DRAFTS, TOKENS, LAYERS, PROMPTS = torch.device("cpu"), 3, 40, [2, 4, 6], 8
SETTINGS = [
    *("drafter.aux_layer_ids=[2,4,6]", "train.draft_vocab_size=200", "train.epochs=150", "train.batch_tokens=400"),
    *("train.ttt_steps=3", "train.lr=1e-2", "train.device=cpu", "train.precision=fp32", "train.eval_every=100000"),
    *("evaluate.decode_prompts=0", "export.dtype=float32", "serving.kind=vllm", "serving.max_new_tokens=40"),
]


def greedy(target: Path) -> list[Sample]:
    """Random prompts and the target's own greedy answers, to be learned by heart: held out are the same, a token
    shorter."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prompts = torch.randint(10, 259, (PROMPTS, 6), generator=torch.Generator().manual_seed(0))
    wrote = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
    )
    samples = []
    for ids in wrote.numpy().astype(np.int32):
        mask = np.arange(len(ids)) >= prompts.shape[1]
        samples.append(Sample(sample_id(ids, mask), "own/kind", "train", ids, mask))
        samples.append(Sample(sample_id(ids[:-1], mask[:-1]), "own/kind", "heldout", ids[:-1], mask[:-1]))
    return samples


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Run:
    """A run with a drafter that was trained on the target's answers and exported."""
    made = make_run(tmp_path_factory.mktemp("parity"), tiny_target, greedy(tiny_target), overrides=SETTINGS)
    for stage in ("capture", "verify", "train", "evaluate", "export"):
        run_stage(made, stage)
    return made


@pytest.fixture(scope="module")
def target(run: Run) -> Target:
    return load_target(run.recipe.target)


class FromStored(DrafterSession):
    """Drafts from states as the store holds them, so that a replay with the same thing wrong drafts the same."""

    def absorb(self, aux: torch.Tensor, next_tokens: Sequence[int]) -> None:
        super().absorb(aux.bfloat16(), next_tokens)


def play(
    run: Run,
    target: Target,
    layers: list[int] = LAYERS,
    session_of: type[DrafterSession] = DrafterSession,
    **wrong: Any,
) -> tuple[list[Exchange], Counted]:
    """What an engine answers and counts, that has these things wrong."""
    drafter = load_drafter(next(run.train_dir.glob("step-*")))
    embedding = load_target_head(target, torch.float32, CPU).embedding
    if wrong.get("norm_output"):
        other = Drafter(dataclasses.replace(drafter.config, norm_output=True))
        other.load_state_dict(drafter.state_dict())
        drafter = other
    if wrong.get("absolute"):
        rows = torch.arange(len(drafter.d2t))
        drafter.d2t.copy_((drafter.draft_ids + rows) % target.vocab_size - rows)
    if wrong.get("embedding"):
        embedding = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(1)) * embedding.std()
    session, generator = TargetSession(target, torch.float32, CPU, layers), torch.Generator()
    total, exchanges = Acceptance.none(DRAFTS), []
    for prompt in choose_prompts(load_sets(run, target), PROMPTS).sets[parity.SET]:
        ids = list(prompt.token_ids)
        drafted = decode_speculative(session, session_of(drafter, embedding, DRAFTS), ids, TOKENS, 0.0, generator)
        total.merge(drafted.acceptance)
        exchanges.append(Exchange(ids, drafted.token_ids, drafted.token_ids))
    return exchanges, counted(total, [exchange.answer for exchange in exchanges], [])


def decoding(run: Run, prompts: int) -> Run:
    """The run with reference decoding of so many prompts."""
    table = run.recipe.evaluate.model_copy(update={"decode_prompts": prompts})
    return dataclasses.replace(run, recipe=run.recipe.model_copy(update={"evaluate": table}))


def test_an_engine_that_is_right_agrees(run: Run, target: Target) -> None:
    exchanges, told_by = play(run, target)
    told = compare(decoding(run, PROMPTS), target, Drafting(run.export_dir, DRAFTS), exchanges, told_by, "float32")
    print(json.dumps(told))
    assert 1.3 < told_by.acceptance.length < DRAFTS + 1, "both outcomes must have been met"
    assert told["passed"] and told["gap"] < 0.01 and "causes" not in told
    assert told["decode"]["acceptance_length"] == told["engine"]["acceptance_length"]
    assert told["differences"] == {"answers": 0, "of": PROMPTS, "largest_tie": None}


def test_a_target_too_large_for_the_memory_is_left_out_of_parity(
    run: Run, target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exchanges, told_by = play(run, target)
    monkeypatch.setattr(decode, "available_memory", lambda: 1000)
    told = compare(decoding(run, PROMPTS), target, Drafting(run.export_dir, DRAFTS), exchanges, told_by, "float32")
    assert told["decode"] is None and told["passed"] and set(told["gaps"]) == {"replay"}
    assert "no reference decoding of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"layers": [1, 3, 5]}, "layer ids: the engine captures each aux layer one too low"),
        ({"layers": [3, 5, 7]}, "layer ids: the engine captures each aux layer one too high"),
        ({"norm_output": True}, "norm switches"),
        ({"absolute": True}, "draft vocabulary: d2t"),
        ({"embedding": True}, "embedding"),
    ],
)
def test_what_an_engine_has_wrong_is_named_first(run: Run, target: Target, wrong: dict[str, Any], named: str) -> None:
    exchanges, told_by = play(run, target, session_of=FromStored, **wrong)
    told = compare(run, target, Drafting(run.export_dir, DRAFTS), exchanges, told_by, "float32")
    print(wrong, json.dumps({key: told[key] for key in ("engine", "replay", "gap")}), told.get("causes"))
    assert not told["passed"]
    assert told["causes"][0]["cause"].startswith(named)
    with pytest.raises(VerificationFailed, match="a replay of its answers gives") as caught:
        serving.verdict(run, {"dtype": "bfloat16", "lossless": None, "parity": told})
    assert named in caught.value.cause and "export" in caught.value.next


def test_drafts_behind_the_ends_of_answers_name_no_other_cause(run: Run, target: Target) -> None:
    """Many short answers: an engine counts drafts behind their ends, which no replay sees."""
    exchanges, told_by = play(run, target, layers=[3, 5, 7], session_of=FromStored)
    counts = told_by.acceptance
    behind = Counted(
        Acceptance(counts.verifications, counts.accepted_at + counts.verifications), told_by.low, told_by.high
    )
    told = compare(run, target, Drafting(run.export_dir, DRAFTS), exchanges, behind, "float32")
    assert told["causes"][0]["cause"] == "layer ids: the engine captures each aux layer one too high"
    assert told["causes"][0]["from_engine"] < 0.01 < told["causes"][1]["from_engine"]


def test_answers_beyond_the_drafters_context_are_told(run: Run, target: Target, tmp_path: Path) -> None:
    exchanges, told_by = play(run, target, layers=[1, 3, 5])
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 40}))
    told = compare(run, target, Drafting(tmp_path, DRAFTS), exchanges, told_by, "float32")
    assert told["causes"][0]["cause"].startswith("context: max_position_embeddings is 40, and an answer reaches")


def test_answers_that_differ_are_told_with_how_near_a_tie_it_was(run: Run, target: Target) -> None:
    exchanges, told_by = play(run, target)
    session = TargetSession(target, torch.float32, CPU, LAYERS)
    assert decode_plain(session, exchanges[1].prompt, TOKENS, 0.0, torch.Generator()).token_ids == exchanges[1].answer
    other = exchanges[0].answer[:3] + [exchanges[0].answer[3] ^ 1, *exchanges[0].answer[4:]]
    changed = [dataclasses.replace(exchanges[0], plain=other), *exchanges[1:]]
    told = compare(run, target, Drafting(run.export_dir, DRAFTS), changed, told_by, "float32")
    assert told["differences"]["answers"] == 1 and told["differences"]["largest_tie"] > 0


def test_what_is_accepted_behind_an_answers_end_is_taken_out() -> None:
    """Two answers of 7 tokens, 3 drafts: the one ends with the token after the drafts, the other's last verification
    accepts three where one is left."""
    total = Acceptance.none(3)
    for accepted in (3, 1, 3, 0, 3):
        total.add(accepted)
    answers = [list(range(7)), list(range(7))]
    of_each = counted(total, answers, [(0, 1, 0, 1), (1, 0, 0, 2)])
    assert of_each.low == of_each.high == 1 + 8 / 5, "4 of the first; 3, 0 and 1 of the second"
    together = counted(total, answers, [])
    assert (together.low, together.high) == (1 + 7 / 5, 1 + 9 / 5) and together.low <= of_each.low <= together.high
    assert together.gap(2.5) == 0 and together.gap(2.0) == pytest.approx(2.0 / 2.4 - 1)
