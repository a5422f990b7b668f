"""The acceptance rules: exact at temperature 0; at temperature > 0 the target's distribution whatever the drafter."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.evaluate.accept import accept_greedy, accept_sampled, sample


@given(st.lists(st.integers(0, 4), min_size=0, max_size=5), st.integers(0, 2**31))
def test_greedy_accepts_the_longest_common_prefix(drafts: list[int], seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).standard_normal((len(drafts) + 1, 5)))
    wanted = logits.argmax(-1).tolist()
    accepted, following = accept_greedy(drafts, logits)
    assert drafts[:accepted] == wanted[:accepted]
    assert accepted == len(drafts) or drafts[accepted] != wanted[accepted]
    assert following == wanted[accepted]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("peaked", [0.2, 3.0])
def test_every_emitted_token_has_the_targets_distribution(temperature: float, peaked: float) -> None:
    """Two drafts on a first-order target of 6 tokens with a drafter that knows only 4 of them: over 20,000 trials the
    first and the second emitted token follow the target, by a chi-square test at p = 1e-4."""
    vocab, trials = 6, 20_000
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(vocab, vocab, generator=generator)  # logits of the next token, by the token before
    guesses = torch.randn(vocab, vocab, generator=generator) * peaked
    guesses[:, 4:] = -torch.inf
    q = (guesses / temperature).softmax(-1)
    p = (rows / temperature).softmax(-1)
    first, second = np.zeros(vocab), np.zeros((vocab, vocab))
    for _ in range(trials):
        a = sample(q[0], generator)
        b = sample(q[a], generator)
        logits = torch.stack([rows[0], rows[a], rows[b]])
        accepted, following = accept_sampled([a, b], torch.stack([q[0], q[a]]), logits, temperature, generator)
        emitted = [*[a, b][:accepted], following]
        first[emitted[0]] += 1
        if len(emitted) > 1:
            second[emitted[0], emitted[1]] += 1
    assert chi_square(first, p[0].numpy()) < 27.9  # 5 degrees of freedom, p = 4e-5
    for before in range(4):  # only tokens that can be drafted can be followed by another in the same round
        if second[before].sum() > 500:
            assert chi_square(second[before], p[before].numpy()) < 27.9


def test_a_rule_that_keeps_the_drafters_choice_is_caught() -> None:
    """The statistic above has the power to see a drafter's bias."""
    generator = torch.Generator().manual_seed(5)
    p = torch.tensor([0.5, 0.3, 0.2])
    q = torch.tensor([0.4, 0.4, 0.2])
    drawn = np.bincount([sample(q, generator) for _ in range(20_000)], minlength=3)
    assert chi_square(drawn, p.numpy()) > 200


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = counts.sum() * probs
    return float(((counts - expected) ** 2 / expected).sum())
