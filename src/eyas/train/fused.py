"""lm_head and loss in one: logits of a chunk of rows live only while its loss and gradients are made.

Gradients are computed in the forward (the loss is linear in what follows it), so the logits [rows, Vd] are never kept:
with 7 steps of 4,096 rows and Vd 32,000 they would take 1.8 GB in bf16 and twice that in fp32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyas.drafter.ops import has_kernels, widen
from eyas.drafter.weights import add_product, zero_sum

CHUNK_ROWS = 8192
# Of one fp32 [rows, Vd] where there is no kernel: plain torch keeps about eight of them for a chunk of an LK loss. With
# 8,192 rows they would take 43 GB at Vd 163,840.
PLAIN_BYTES = 256 << 20

# logits [n, Vd], probs [n, Vd], weights [n] -> each row's loss [n], the gradient of their weighted sum by the logits
# (in the logits' dtype), and the argmax [n].
RowLosses = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Teachers:
    """The target's distributions on the draft vocabulary, kept as logits in the compute dtype: half the bytes of fp32.

    Attributes:
        logits: [P, Vd], no gradient; all of a pack, 5 GB in bf16 for 16,384 positions at Vd 163,840.
        log_sum: their log-sum-exp, at least fp32 [P].
    """

    logits: Tensor
    log_sum: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, finals: Tensor, lm_head_draft: Tensor) -> "Teachers":
        """From final hidden states [P, H] and the target's lm_head rows of the draft vocabulary [Vd, H]."""
        logits = F.linear(finals, lm_head_draft.to(finals.dtype))
        if has_kernels(logits):
            from eyas.train import cross_entropy_kernel as kernel

            return cls(logits, kernel.log_sum(logits))
        return cls(logits, widen(logits).logsumexp(-1))

    def probs(self, rows: Tensor) -> Tensor:
        """Distributions of some rows, at least fp32 [n, Vd]."""
        return (widen(self.logits[rows]) - self.log_sum[rows, None]).exp()


@dataclass(frozen=True)
class Lesson:
    """What the rows of one step learn.

    Attributes:
        teacher: the row of the teachers that each row learns, int64 [n].
        weights: of each row's loss, at least fp32 [n]; 0 for rows that only count.
    """

    teacher: Tensor
    weights: Tensor


def cross_entropy(logits: Tensor, probs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """RowLosses of soft cross-entropy."""
    wide = widen(logits)
    log_sum = wide.logsumexp(-1, keepdim=True)
    losses = log_sum[:, 0] - (probs * wide).sum(-1)
    d_logits = ((wide - log_sum).exp() - probs) * weights[:, None]
    return losses, d_logits.to(logits.dtype), logits.argmax(-1)


def head_loss(
    hidden: Sequence[Tensor], lm_head: Tensor, teachers: Teachers, lessons: Sequence[Lesson], losses: RowLosses
) -> tuple[Tensor, Tensor]:
    """Weighted losses of all steps, sum_r weight_r * L(teacher_r, lm_head @ hidden_r), and what would be drafted.

    Args:
        hidden: of each step what lm_head reads, [n, H] in the compute dtype.
        lm_head: fp32 master weight [Vd, H]; frozen where it needs no gradient.
    Returns: the sum of each step [steps], with gradient; drafts by argmax of all steps' rows, one after another, int64.
    """
    sums, drafts = _HeadLoss.apply(lm_head, teachers, lessons, losses, *hidden)
    return sums, drafts


class _HeadLoss(torch.autograd.Function):
    """Gradients are exact for any function of the sums that weighs all steps alike, as their total does."""

    @staticmethod
    def forward(
        ctx: Any, lm_head: Tensor, teachers: Teachers, lessons: Sequence[Lesson], losses: RowLosses, *hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        weight = lm_head.to(hidden[0].dtype)
        d_weight = zero_sum(lm_head) if ctx.needs_input_grad[0] else None
        most = _rows_a_chunk(losses, weight)
        room = weight.new_empty(min(most, max(len(rows) for rows in hidden)), len(weight))
        sums, drafts, d_hidden = [], [], []
        for rows, lesson in zip(hidden, lessons, strict=True):
            d_rows = torch.empty_like(rows)
            total = lesson.weights.new_zeros(())
            for low in range(0, len(rows), most):
                at = slice(low, low + most)
                logits = torch.mm(rows[at], weight.T, out=room[: len(rows[at])])
                row_losses, d_logits, drafted = _losses(
                    logits, teachers, lesson.teacher[at], lesson.weights[at], losses
                )
                total = total + (row_losses * lesson.weights[at]).sum()
                drafts.append(drafted)
                torch.mm(d_logits, weight, out=d_rows[at])
                if d_weight is not None:
                    add_product(d_weight, d_logits.T, rows[at])
            sums.append(total)
            d_hidden.append(d_rows)
        ctx.gradients = d_weight, d_hidden
        all_drafts = torch.cat(drafts)
        ctx.mark_non_differentiable(all_drafts)
        return torch.stack(sums), all_drafts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d_weight, d_hidden), ctx.gradients = ctx.gradients, None
        scale = grads[0][0]
        if d_weight is not None:
            d_weight.mul_(scale)
        for rows in d_hidden:
            rows.mul_(scale)
        return d_weight, None, None, None, *d_hidden


def _rows_a_chunk(losses: RowLosses, weight: Tensor) -> int:
    """By lm_head [Vd, H] in the compute dtype."""
    if losses is cross_entropy and has_kernels(weight):
        return CHUNK_ROWS
    return max(1, min(CHUNK_ROWS, PLAIN_BYTES // (4 * len(weight))))


def _losses(
    logits: Tensor, teachers: Teachers, teacher: Tensor, weights: Tensor, losses: RowLosses
) -> tuple[Tensor, Tensor, Tensor]:
    if losses is cross_entropy and has_kernels(logits):
        from eyas.train import cross_entropy_kernel as kernel

        return kernel.cross_entropy(logits, teachers.logits, teachers.log_sum, teacher, weights)
    return losses(logits, teachers.probs(teacher), weights)
