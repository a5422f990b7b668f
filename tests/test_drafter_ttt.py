"""The vectorised training-time test, its loss and the walk against their naive forms, in fp64."""

import numpy as np
import pytest
import torch
from helpers_drafter import Sample, make_drafter, make_samples, naive_feature, naive_loss
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.drafter import attention
from eyas.drafter.align import align, teaching_positions, trained_rows
from eyas.drafter.pack import Pack, pack_samples
from eyas.drafter.ttt import unroll
from eyas.drafter.walk import answer_spans, replay, walk
from eyas.train.loss import pack_loss

CPU = torch.device("cpu")
MASKS = [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1], [0, 0, 1, 1, 0, 1, 0]]


def pack(samples: list[Sample], steps: int) -> Pack:
    return pack_samples(samples, steps, torch.float64, CPU)


def loss_of(samples: list[Sample], steps: int = 3, drafter=None):
    """Loss and gradients of a pack of samples."""
    drafter = drafter or make_drafter()
    embedding, lm_head = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    packed = pack(samples, steps)
    finals = torch.cat([sample.final_hidden_states for sample in samples])[packed.alignment.final_rows]
    argmax = (finals @ lm_head.T).argmax(-1)
    result = pack_loss(drafter, embedding, lm_head[drafter.draft_ids], packed, argmax, steps=steps, decay=0.8)
    drafter.zero_grad()
    result.total.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    return result, gradients, (drafter, embedding, lm_head)


# The narrowest that holds a row's own later keys, one that longer samples pass the edge of, one that none does; recipes
# allow 32 at least.
WINDOWS = [0, 3, 5, 64]


@pytest.mark.parametrize("chunk", [256, 3])
@pytest.mark.parametrize("window", WINDOWS)
def test_unroll_equals_one_row_at_a_time(window: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CHUNK_ROWS", chunk)
    drafter, samples = make_drafter(sliding_window=window), make_samples(MASKS)
    embedding = torch.randn(40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    packed = pack(samples, 3)
    starts = np.cumsum([0] + [len(mask) for mask in MASKS])
    compared = 0
    for k, hidden in enumerate(unroll(drafter, embedding, packed, 3)):
        step = packed.alignment.steps[k]
        for found, row in zip(hidden, step.row, strict=True):
            sample = np.searchsorted(starts, packed.alignment.rows[row], "right") - 1
            position = packed.alignment.rows[row] - starts[sample]
            expected = drafter.norm(naive_feature(drafter, embedding, samples[sample], int(position), k))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
            compared += 1
    assert compared == sum(trained_rows(np.array(mask, bool), k).sum() for mask in MASKS for k in range(3)) > 20


@pytest.mark.parametrize("window", WINDOWS)
def test_loss_and_gradients_equal_the_naive_loop(window: int) -> None:
    samples = make_samples(MASKS)
    result, gradients, (drafter, embedding, lm_head) = loss_of(samples, drafter=make_drafter(sliding_window=window))
    whole = loss_of(samples)[0].total
    assert torch.equal(result.total, whole) if window in (0, 64) else abs(result.total - whole) > 1e-3
    expected = naive_loss(drafter, embedding, lm_head, samples, steps=3, decay=0.8)
    torch.testing.assert_close(result.total, expected, rtol=1e-9, atol=1e-9)
    drafter.zero_grad()
    expected.backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9, msg=name)


def test_packing_changes_no_loss() -> None:
    samples = make_samples(MASKS, seed=4)
    together, gradients, _ = loss_of(samples)
    alone = [loss_of([sample]) for sample in samples if len(sample.token_ids) > 3 or sample.loss_mask.sum() > 1]
    torch.testing.assert_close(together.total, sum(each[0].total for each in alone), rtol=1e-9, atol=1e-9)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, sum(each[1][name] for each in alone), rtol=1e-9, atol=1e-9)


def test_a_neighbour_in_the_pack_is_never_seen() -> None:
    first, second = make_samples(MASKS[:2])
    before, _, _ = loss_of([first, second])
    changed = Sample(first.id, first.token_ids, first.loss_mask, first.aux_hidden_states * 7, first.final_hidden_states)
    alone, _, _ = loss_of([first])
    alone_changed, _, _ = loss_of([changed])
    after, _, _ = loss_of([changed, second])
    torch.testing.assert_close(after.total - before.total, alone_changed.total - alone.total, rtol=1e-9, atol=1e-9)


def test_a_mask_shifted_by_one_changes_the_loss_and_the_rows() -> None:
    mask = [0, 0, 0, 1, 1, 1, 1, 0, 0]
    shifted = mask[1:] + [0]
    right, wrong = make_samples([mask])[0], make_samples([shifted])[0]
    wrong = Sample(wrong.id, right.token_ids, wrong.loss_mask, right.aux_hidden_states, right.final_hidden_states)
    assert list(np.flatnonzero(trained_rows(np.array(mask, bool), 0))) == [2, 3, 4]
    assert list(np.flatnonzero(trained_rows(np.array(shifted, bool), 0))) == [1, 2, 3]
    assert abs((loss_of([right])[0].total - loss_of([wrong])[0].total).item()) > 1e-3


def test_the_rows_of_the_drawing() -> None:
    mask = np.array([0, 0, 0, 1, 1, 1], bool)
    assert list(np.flatnonzero(teaching_positions(mask))) == [3, 4]
    assert [list(np.flatnonzero(trained_rows(mask, k))) for k in range(3)] == [[2, 3], [1, 2], [0, 1]]


def test_rows_out_of_the_draft_vocabulary_stay_in_n_and_add_nothing() -> None:
    samples = make_samples([[0, 0, 1, 1, 1, 1]])
    drafter = make_drafter()
    result, _, _ = loss_of(samples, drafter=drafter)
    drafter.t2d.zero_()
    none, _, _ = loss_of(samples, drafter=drafter)
    assert result.total.item() > 0
    assert none.total.item() == 0
    assert none.rows.tolist() == result.rows.tolist()


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=5)


@given(masks, st.integers(1, 4))
def test_alignment_equals_the_definition(drawn: list[list[bool]], steps: int) -> None:
    alignment = align([np.array(mask, bool) for mask in drawn], steps)
    base, finals, expected = 0, 0, [set() for _ in range(steps)]
    for number, mask in enumerate(drawn):
        final_of = {base + i: finals + sum(mask[:i]) for i in range(len(mask)) if mask[i]}
        for j in range(len(mask)):
            for k in range(steps):
                if j + 2 + k < len(mask) and mask[j + 1 + k] and mask[j + 2 + k]:
                    expected[k].add((base + j, final_of[base + j + 1 + k], number))
        base, finals = base + len(mask), finals + sum(mask)
    sample_of = np.repeat(np.arange(len(drawn)), [len(mask) for mask in drawn])
    for k, step in enumerate(alignment.steps):
        rows = alignment.rows[step.row]
        found = zip(rows, alignment.final_rows[step.teacher], sample_of[rows], strict=True)
        assert {(int(a), int(b), int(c)) for a, b, c in found} == expected[k]


def naive_walk(hits: np.ndarray, mask: list[bool], drafts: int) -> tuple[int, int]:
    """(verifications, accepted drafts), told as a server would live it: token after token."""
    verifications = accepted = 0
    position = 0
    while position < len(mask):
        if not mask[position]:
            position += 1
            continue
        if position == 0:  # nothing stands before it that could have drafted the next token
            position += 1
            continue
        # `position` is known; draft from the row before it while the answer goes on.
        if position + 1 < len(mask) and mask[position + 1]:
            run = 0
            while run < drafts and position + 1 + run < len(mask) and all(mask[position : position + 2 + run]):
                if not hits[position - 1, run]:
                    break
                run += 1
            verifications += 1
            accepted += run
            position += run + 1
        else:
            position += 1
    return verifications, accepted


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 4), st.integers(0, 2**31))
@settings(max_examples=300)
def test_walk_equals_a_server_told_token_by_token(mask: list[bool], drafts: int, seed: int) -> None:
    hits = np.random.default_rng(seed).random((len(mask), drafts)) < 0.6
    result = walk(hits, answer_spans(np.array(mask, bool)))
    assert (result.verifications, int(result.accepted_at.sum())) == naive_walk(hits, mask, drafts)


def test_replay_counts_exactly_the_drafts_that_equal_the_answer() -> None:
    """Replay of a pack equals walking with drafts computed one row at a time."""
    drafter, samples = make_drafter(), make_samples(MASKS + [[0] + [1] * 25], seed=2)
    embedding = torch.randn(40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    for sample, walked in zip(samples, replay(drafter, embedding, [samples], 3), strict=True):
        result = walked.acceptance
        assert walked.sample is sample
        length = len(sample.token_ids)
        hits = np.zeros((length, 3), bool)
        for row in range(length):
            for k in range(3):
                if row + 2 + k < length:
                    logits = drafter.lm_head(drafter.norm(naive_feature(drafter, embedding, sample, row, k)))
                    hits[row, k] = int(drafter.draft_ids[logits.argmax()]) == int(sample.token_ids[row + 2 + k])
        expected = walk(hits, answer_spans(sample.loss_mask.numpy()))
        assert (result.verifications, result.accepted_at.tolist()) == (
            expected.verifications,
            expected.accepted_at.tolist(),
        )


def test_a_pack_that_trains_nothing_is_walked_without_a_verification() -> None:
    """One supervised token, or none next to another: nothing is drafted from it and nothing breaks."""
    drafter, samples = make_drafter(), make_samples([[0, 0, 1], [1], [0, 1, 0, 1, 0]])
    embedding = torch.randn(40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    walked = replay(drafter, embedding, [samples[:2], samples[2:]], 3)
    assert [each.acceptance.verifications for each in walked] == [0, 0, 0]
