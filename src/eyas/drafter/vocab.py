"""The draft vocabulary: the target tokens that the drafter can propose.

Chosen by frequency among supervised tokens of the training split, end-of-turn tokens always included (stopping must be
drafted too), ties by the lower id. Kept as d2t, an offset: target id = draft id + d2t[draft id] (the engines' form).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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


def check_vocabulary(d2t: Tensor, t2d: Tensor) -> list[str]:
    """Faults of the tables of one draft vocabulary, as a drafter's folder holds them.

    Args:
        d2t: int64 [Vd], offsets: the target id of draft id i is i + d2t[i].
        t2d: bool [V], True for the target ids in the draft vocabulary.
    """
    targets = torch.arange(len(d2t)) + d2t
    flagged = t2d.nonzero().flatten()
    if len(d2t) == len(flagged) and len(d2t) and torch.equal(d2t, flagged) and not torch.equal(targets, flagged):
        return [
            "d2t holds target ids; expected offsets (target id minus draft id): every drafted token would be another"
        ]
    faults = []
    outside = ((targets < 0) | (targets >= len(t2d))).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        faults.append(
            f"d2t: draft id {first} stands for target id {int(targets[first])}; expected 0 to {len(t2d) - 1} "
            f"({len(outside)} such ids)"
        )
    falling = (targets[1:] <= targets[:-1]).nonzero().flatten()
    if len(falling):
        first = int(falling[0])
        faults.append(
            f"d2t: draft ids {first} and {first + 1} stand for target ids {int(targets[first])} and "
            f"{int(targets[first + 1])}; expected strictly rising ids ({len(falling)} such places)"
        )
    if not faults and not torch.equal(targets, flagged):
        faults.append(f"t2d flags {len(flagged)} target ids, which are not the {len(targets)} that d2t stands for")
    return faults
