"""Reference decoding on a tiny random target: speculation changes no token, and replay walks what decoding lived."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_drafter import Sample
from transformers import AutoModelForCausalLM

from eyas.drafter.eagle3 import Drafter, DrafterConfig
from eyas.drafter.target import load_target_head
from eyas.drafter.walk import Acceptance, replay
from eyas.evaluate.decode import DrafterSession, TargetSession, decode_along, decode_plain, decode_speculative
from eyas.settings import Drafter as DrafterTable
from eyas.settings import Target as TargetTable
from eyas.target import load_target

PROMPTS = [[1, 40, 41, 42, 43], [1, 50, 60, 70, 80, 90, 100, 110], [1, 7], [1, *range(100, 160, 3)]]
TOKENS, DRAFTS = 24, 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def parts(tiny_target: Path) -> tuple[TargetSession, Drafter, torch.Tensor]:
    """A session of the tiny target in fp64 and an untrained drafter that proposes what the target's own head says of
    its last aux layer, so that some drafts are accepted and some are not."""
    target = load_target(TargetTable(path=str(tiny_target)))
    ids = [2, 4, 7]
    config = DrafterConfig.for_target(target, DrafterTable(), target.vocab_size, ids)
    drafter = Drafter(config)
    drafter.initialise(3)
    head = load_target_head(target, torch.float64, CPU)
    hidden = target.hidden_size
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, 2 * hidden :] = torch.eye(hidden)
        drafter.lm_head.weight.copy_(head.lm_head)
    drafter.t2d.fill_(True)
    return TargetSession(target, torch.float64, CPU, ids), drafter.double(), head.embedding


def decode_both(parts, prompt: list[int], temperature: float = 0.0, seed: int = 0):
    target, drafter, embedding = parts
    session = DrafterSession(drafter, embedding, DRAFTS)
    generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
    plain = decode_plain(target, prompt, TOKENS, temperature, generators[0])
    return plain, decode_speculative(target, session, prompt, TOKENS, temperature, generators[1])


def test_speculation_changes_no_token_and_plain_decoding_is_generate(parts, tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float64)
    total = Acceptance.none(DRAFTS)
    for prompt in PROMPTS:
        plain, speculative = decode_both(parts, prompt)
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=2
        )
        assert plain.token_ids == generated[0, len(prompt) :].tolist()
        assert speculative.token_ids == plain.token_ids
        total.merge(speculative.acceptance)
    assert 0 < total.accepted_at.sum() < DRAFTS * total.verifications, "both outcomes must have been met"


def test_no_logits_of_a_whole_prompt_are_made(parts) -> None:
    target, rows = parts[0], []
    handle = target.model.lm_head.register_forward_hook(lambda module, inputs, logits: rows.append(logits.shape[1]))
    prompt = list(range(20, 60))
    _, decoded = decode_both(parts, prompt)
    decode_along(target, DrafterSession(*parts[1:], DRAFTS), prompt, decoded.token_ids)
    handle.remove()
    assert len(rows) > 3 and max(rows) <= DRAFTS + 1
    # ... unless they are wanted.
    target.start()
    assert target.forward(prompt)[0].shape == (40, 259)


def test_decoding_along_an_answer_counts_what_decoding_it_counted(parts) -> None:
    target, drafter, embedding = parts
    for prompt in PROMPTS:
        _, decoded = decode_both(parts, prompt)
        along = decode_along(target, DrafterSession(drafter, embedding, DRAFTS), prompt, decoded.token_ids)
        assert along.verifications == decoded.acceptance.verifications > 0
        assert along.accepted_at.tolist() == decoded.acceptance.accepted_at.tolist()


@pytest.mark.parametrize("window", [0, 6])
def test_replay_of_the_answers_counts_what_decoding_counted(window: int, parts) -> None:
    """A window of 6 is shorter than any of these prompts with its answer."""
    target, whole, embedding = parts
    drafter = Drafter(replace(whole.config, sliding_window=window)).double()
    drafter.load_state_dict(whole.state_dict())
    for prompt in PROMPTS:
        _, decoded = decode_both((target, drafter, embedding), prompt)
        tokens = prompt + decoded.token_ids
        target.start()
        _, aux = target.forward(tokens)
        mask = torch.tensor([False] * len(prompt) + [True] * len(decoded.token_ids))
        stored = Sample(
            "0" * 32,
            torch.tensor(tokens, dtype=torch.int32),
            mask,
            aux.unflatten(-1, (3, -1)),
            torch.zeros(int(mask.sum()), aux.shape[-1] // 3, dtype=aux.dtype),
        )
        ((_, _, replayed),) = replay(drafter, embedding, [[stored]], DRAFTS)
        assert replayed.verifications == decoded.acceptance.verifications
        assert replayed.accepted_at.tolist() == decoded.acceptance.accepted_at.tolist()


def test_end_of_turn_stops_both_and_is_counted_alike(parts) -> None:
    """Take a token of the plain answer as end-of-turn: decoding stops with it, drafts beyond it are not counted."""
    target, _, _ = parts
    plain, _ = decode_both(parts, PROMPTS[1])
    target.eos = {plain.token_ids[7]}
    try:
        stopped, speculative = decode_both(parts, PROMPTS[1])
    finally:
        target.eos = {2}
    first = plain.token_ids.index(plain.token_ids[7])
    assert stopped.token_ids == speculative.token_ids == plain.token_ids[: first + 1]
    emitted_after_first = len(stopped.token_ids) - 1
    counted = int(speculative.acceptance.accepted_at.sum()) + speculative.acceptance.verifications
    assert emitted_after_first <= counted <= emitted_after_first + 1  # the last bonus may lie beyond the end


def test_sampled_decoding_emits_whole_answers(parts) -> None:
    _, speculative = decode_both(parts, PROMPTS[0], temperature=1.0, seed=4)
    assert len(speculative.token_ids) == TOKENS or speculative.token_ids[-1] == 2
    assert speculative.acceptance.verifications > 0
