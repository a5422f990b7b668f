"""Loss of the drafter against the target on the draft vocabulary: soft cross-entropy, or an LK loss (`train.loss`).

    loss of an optimizer step = sum_k decay^k * sum_rows L / n

n = rows trained at step 0, of all its samples. However samples are packed, accumulated or spread over ranks, the sum is
the same. Every token weighs the same, as acceptance counts it: with the mean over samples, in which those of short
answers weighed more, a drafter was accepted less far (LOG.md, 2026-11-30). Rows whose target argmax is outside the
draft vocabulary stay in n and add 0: the target would write a token that the drafter can't propose.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafter.eagle3 import Drafter
from eyas.drafter.pack import Pack
from eyas.drafter.ttt import unroll
from eyas.settings import Train
from eyas.train import lk
from eyas.train.fused import Lesson, RowLosses, Teachers, cross_entropy, head_loss


def row_losses(table: Train) -> RowLosses:
    """L of a row, as the recipe names it."""
    if table.loss == "lk-hybrid":
        return lk.hybrid(table.lk_eta)
    return lk.log_acceptance if table.loss == "lk-alpha" else cross_entropy


@dataclass(frozen=True)
class PackLoss:
    """Sums over a pack, so that packs and ranks add up exactly.

    Attributes:
        total: sum_k decay^k * sum_rows L; a scalar with gradient.
        per_step: the same for each step without its weight, fp32 [steps], detached.
        hits: rows of each step whose draft is the target's argmax, int64 [steps].
        rows: trained rows of each step, int64 [steps].
    """

    total: Tensor
    per_step: Tensor
    hits: Tensor
    rows: Tensor


def pack_loss(
    drafter: Drafter,
    embedding: Tensor,
    lm_head_draft: Tensor,
    pack: Pack,
    target_argmax: Tensor,
    *,
    steps: int,
    decay: float,
    losses: RowLosses = cross_entropy,
) -> PackLoss:
    """Loss of one pack.

    Args:
        embedding: the target's [V, H].
        lm_head_draft: the target's lm_head rows of the draft vocabulary [Vd, H].
        target_argmax: the target's argmax at each teaching position of the pack, int64 [P].
        decay: weight of step k is decay^k, unitless.
        losses: the loss L of a row.
    """
    index = pack.index
    with torch.no_grad():
        teachers = Teachers.of(pack.final[index.final_rows], lm_head_draft)
        in_vocab = drafter.t2d[target_argmax].to(teachers.log_sum.dtype)
    weights = [in_vocab[step.teacher] * decay**k for k, step in enumerate(index.steps[:steps])]
    lessons = [Lesson(step.teacher, weight) for step, weight in zip(index.steps, weights, strict=False)]
    hidden = list(unroll(drafter, embedding, pack, steps))
    sums, drafts = head_loss(hidden, drafter.lm_head.weight, teachers, lessons, losses)
    correct = drafter.draft_ids[drafts] == torch.cat([target_argmax[lesson.teacher] for lesson in lessons])
    hits = [step.sum() for step in correct.split([len(rows) for rows in hidden])]
    per_step = sums.detach() / decay ** torch.arange(steps, device=sums.device)
    return PackLoss(sums.sum(), per_step, torch.stack(hits), index.trained[:steps])
