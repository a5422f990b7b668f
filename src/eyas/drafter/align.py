"""Which row sees which token and learns which label: the one place where the shift is drawn.

One sample, tokens t[0..T-1]; loss_mask[i]: token i was written by the assistant; final[i]: the target's final hidden
state at i, which predicts t[i+1].

    row j, step 0:  aux[j] + t[j+1]    learns softmax(lm_head(final[j+1])),    whose label is t[j+2]
    row j, step k:  g_k[j] + t[j+1+k]  learns softmax(lm_head(final[j+1+k])),  whose label is t[j+2+k]
                    trained if and only if mask[j+1+k] and mask[j+2+k]

      i            0    1    2    3    4    5        prompt t0..t2, answer t3..t5
      mask         .    .    .    x    x    x
      teaches      .    .    .    x    x    .        mask[i] and mask[i+1]: final[i] may be learned from
      row (k=0)    .    .    x    x    .    .        row j learns from final[j+1]
      row (k=1)    .    x    x    .    .    .        row j learns from final[j+2]

Serving starts the same way: the target's prefill writes the first answer token t3, and the first draft is row 2.
Samples that share a packed row never see one another: a position outside row j's own sample teaches nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


def teaching_positions(loss_mask: BoolArray) -> BoolArray:
    """mask[i] and mask[i+1] of one sample: where final[i] is learned from. bool [T] -> bool [T]."""
    teaches = np.zeros_like(loss_mask)
    teaches[:-1] = loss_mask[:-1] & loss_mask[1:]
    return teaches


def trained_rows(loss_mask: BoolArray, step: int) -> BoolArray:
    """Rows of one sample that are trained at a step: row j where position j+1+step teaches. bool [T] -> bool [T]."""
    teaches = teaching_positions(loss_mask)
    rows = np.zeros_like(teaches)
    if step + 1 < len(teaches):
        rows[: len(teaches) - step - 1] = teaches[step + 1 :]
    return rows


@dataclass(frozen=True)
class StepRows:
    """The trained rows of one step of a packed row.

    Attributes:
        row: index into the computed rows, int64 [n].
        teacher: index into the packed teaching positions, int64 [n].
    """

    row: IntArray
    teacher: IntArray


@dataclass(frozen=True)
class Alignment:
    """All indices of one packed row of S tokens, for `steps` steps.

    Attributes:
        start: first position of each token's sample, int64 [S].
        rows: positions that some step trains, rising, int64 [R]; all others give step-0 keys and values only.
        teachers: positions that teach, rising, int64 [P].
        final_rows: for each teacher its index into the pack's final hidden states, int64 [P].
        steps: per step, its trained rows.
    """

    start: IntArray
    rows: IntArray
    teachers: IntArray
    final_rows: IntArray
    steps: list[StepRows]


def align(masks: list[BoolArray], steps: int) -> Alignment:
    """Indices for samples packed one after another, given their loss masks."""
    lengths = np.array([len(mask) for mask in masks])
    start = np.repeat(np.cumsum(lengths) - lengths, lengths)
    teachers = np.flatnonzero(np.concatenate([teaching_positions(each) for each in masks]))
    # A teaching position is learned from by the row 1 + k before it, where that lies in the same sample.
    taught = [np.flatnonzero(teachers - 1 - k >= start[teachers]) for k in range(steps)]
    computed = np.zeros(len(start), dtype=bool)
    for k, teacher in enumerate(taught):
        computed[teachers[teacher] - 1 - k] = True
    number = np.cumsum(computed) - 1
    step_rows = [StepRows(number[teachers[teacher] - 1 - k], teacher) for k, teacher in enumerate(taught)]
    return Alignment(
        start=start,
        rows=np.flatnonzero(computed),
        teachers=teachers,
        final_rows=(np.cumsum(np.concatenate(masks)) - 1)[teachers],
        steps=step_rows,
    )
