"""The draft vocabulary: the target tokens that the drafter can propose.

Chosen by frequency among supervised tokens of the training split, end-of-turn tokens always included (stopping must be
drafted too), ties by the lower id. Kept as d2t, an offset: target id = draft id + d2t[draft id] (the engines' form).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def choose_draft_vocab(counts: IntArray, size: int, always: Sequence[int]) -> IntArray:
    """Target ids of the draft vocabulary, rising.

    Args:
        counts: how often each target token is supervised, int64 [V].
        size: wanted size Vd; the whole vocabulary where V is not larger.
        always: ids included whatever their count (end of turn).
    """
    if size >= len(counts):
        return np.arange(len(counts))
    ranked = counts.astype(np.float64)
    ranked[list(always)] = np.inf
    return np.sort(np.argsort(-ranked, kind="stable")[:size])


def to_d2t(draft_ids: IntArray) -> IntArray:
    """Offsets int64 [Vd] of rising target ids."""
    return draft_ids - np.arange(len(draft_ids))


def to_t2d(draft_ids: IntArray, vocab_size: int) -> npt.NDArray[np.bool_]:
    """bool [V]: which target tokens are in the draft vocabulary."""
    mask = np.zeros(vocab_size, dtype=bool)
    mask[draft_ids] = True
    return mask


def coverage(counts: IntArray, draft_ids: IntArray) -> float:
    """Share of the counted tokens that the draft vocabulary holds; a token outside it can never be accepted."""
    total = int(counts.sum())
    return float(counts[draft_ids].sum() / total) if total else 0.0
