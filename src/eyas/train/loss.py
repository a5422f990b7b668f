"""Loss of the drafter against the target on the draft vocabulary: soft cross-entropy, or an LK loss (`train.loss`).

    loss of an optimizer step = mean over its sequences of  sum_k decay^k * sum_rows L / n

n = rows of that sequence trained at step 0. However samples are packed, accumulated or spread over ranks, the sum is
the same. Rows whose target argmax is outside the draft vocabulary stay in n and add 0: the target would write a token
that the drafter can't propose, and its renormalised distribution teaches nothing about it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter.attention import widen
from eyas.drafter.eagle3 import Drafter
from eyas.drafter.pack import Pack
from eyas.drafter.ttt import unroll
from eyas.settings import Train
from eyas.train import lk
from eyas.train.fused import HeadLoss, RowLosses, cross_entropy


def row_losses(table: Train) -> RowLosses:
    """L of a row, as the recipe names it."""
    if table.loss == "lk-hybrid":
        return lk.hybrid(table.lk_eta)
    return lk.log_acceptance if table.loss == "lk-alpha" else cross_entropy


@dataclass(frozen=True)
class PackLoss:
    """Sums over a pack, so that packs and ranks add up exactly.

    Attributes:
        total: sum over sequences of sum_k decay^k * sum_rows L / n; a scalar with gradient.
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
    device = pack.aux.device
    alignment = pack.alignment
    with torch.no_grad():
        finals = pack.final[torch.from_numpy(alignment.final_rows).to(device)]
        target_probs = widen(F.linear(finals, lm_head_draft.to(finals.dtype))).softmax(-1)
        in_vocab = drafter.t2d[target_argmax].to(target_probs.dtype)
    per_sample = 1.0 / torch.from_numpy(alignment.trained_at_0).to(device).clamp(min=1).to(target_probs.dtype)
    total = target_probs.new_zeros(())
    per_step, hits, rows = [], [], []
    draft_ids = drafter.draft_ids
    with drafter.cast_once(pack.aux.dtype):
        for k, features in enumerate(unroll(drafter, embedding, pack, steps)):
            at = alignment.steps[k]
            row, teacher, sample = (torch.from_numpy(index).to(device) for index in (at.row, at.teacher, at.sample))
            weights = in_vocab[teacher] * per_sample[sample]
            hidden = drafter.norm(features[row])
            lm_head = drafter.lm_head.weight
            step_loss, drafts = HeadLoss.apply(hidden, lm_head, target_probs, teacher, weights, losses)
            total = total + decay**k * step_loss
            per_step.append(step_loss.detach())
            hits.append((draft_ids[drafts] == target_argmax[teacher]).sum())
            rows.append(torch.tensor(len(row), device=device))
    return PackLoss(total, torch.stack(per_step), torch.stack(hits), torch.stack(rows))
