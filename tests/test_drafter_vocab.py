"""The draft vocabulary: d2t and t2d are inverse, end-of-turn is always in, coverage counts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafter.vocab import choose_draft_vocab, coverage, to_d2t, to_t2d


@st.composite
def counted(draw: st.DrawFn) -> tuple[np.ndarray, int, list[int]]:
    counts = np.array(draw(st.lists(st.integers(0, 50), min_size=4, max_size=60)))
    size = draw(st.integers(2, len(counts) + 3))
    always = draw(st.lists(st.integers(0, len(counts) - 1), max_size=2, unique=True))
    return counts, size, always


@given(counted())
def test_d2t_and_t2d_are_inverse_and_hold_the_wanted_tokens(case: tuple[np.ndarray, int, list[int]]) -> None:
    counts, size, always = case
    ids = choose_draft_vocab(counts, size, always)
    d2t, t2d = to_d2t(ids), to_t2d(ids, len(counts))
    assert np.array_equal(np.arange(len(ids)) + d2t, ids)
    assert np.array_equal(np.flatnonzero(t2d), ids)
    assert len(ids) == min(size, len(counts)) == t2d.sum()
    assert set(always) <= set(ids.tolist())
    left_out = counts[~t2d]
    chosen_freely = [counts[i] for i in ids if i not in always]
    assert not len(left_out) or not chosen_freely or min(chosen_freely) >= max(left_out)


@given(counted())
def test_coverage_is_the_share_of_counted_tokens(case: tuple[np.ndarray, int, list[int]]) -> None:
    counts, size, always = case
    ids = choose_draft_vocab(counts, size, always)
    assert coverage(counts, ids) == (sum(int(counts[i]) for i in ids) / counts.sum() if counts.sum() else 0.0)


def test_a_larger_draft_vocabulary_never_covers_less() -> None:
    counts = np.random.default_rng(0).zipf(1.3, 500) % 97
    shares = [coverage(counts, choose_draft_vocab(counts, size, [3])) for size in (8, 64, 256, 500)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
