"""lm_head and loss in one: logits of a chunk of rows live only while its loss and gradients are made.

Gradients are computed in the forward (the loss is linear in what follows it), so the logits [rows, Vd] are never kept:
with 7 steps of 4,096 rows and Vd 32,000 they would take 1.8 GB in bf16 and twice that in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.attention import widen
from eyas.drafter.fusing import fused_on_cuda

CHUNK_ROWS = 4096

# logits [n, Vd], probs [n, Vd], weights [n] -> each row's loss [n], the gradient of their weighted sum by the logits
# (in the logits' dtype), and the argmax [n].
RowLosses = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class HeadLoss(torch.autograd.Function):
    """sum_r weight_r * loss(probs[teacher_r], lm_head @ hidden_r).

    Args (apply):
        hidden: normed features [n, H], compute dtype.
        lm_head: fp32 master weight [Vd, H]; frozen where it needs no gradient.
        probs: the target's distribution on the draft vocabulary [P, Vd], no gradient.
        teacher: int64 [n], the row of `probs` that each row learns.
        weights: [n], no gradient; 0 for rows that only count.
        row_losses: the loss of a chunk of rows, with its gradient.
    Returns: the weighted sum, a scalar; and the drafts by argmax, int64 [n].
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        probs: Tensor,
        teacher: Tensor,
        weights: Tensor,
        row_losses: RowLosses,
    ) -> tuple[Tensor, Tensor]:
        weight = lm_head.to(hidden.dtype)
        total = probs.new_zeros(())
        drafts = torch.empty_like(teacher)
        d_hidden, d_weight = torch.empty_like(hidden), None
        for low in range(0, len(hidden), CHUNK_ROWS):
            at = slice(low, low + CHUNK_ROWS)
            logits = hidden[at] @ weight.T
            losses, d_logits, drafts[at] = row_losses(logits, probs[teacher[at]], weights[at])
            total = total + (losses * weights[at]).sum()
            d_hidden[at] = d_logits @ weight
            if ctx.needs_input_grad[1]:
                part = widen(d_logits.T @ hidden[at])
                d_weight = part if d_weight is None else d_weight + part
        if d_weight is None and ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(lm_head)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(drafts)
        return total, drafts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        d_head = None if d_weight is None else d_weight * grads[0]
        return (d_hidden * grads[0]).to(d_hidden.dtype), d_head, None, None, None, None


@fused_on_cuda
def cross_entropy(logits: Tensor, probs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """RowLosses of soft cross-entropy."""
    wide = widen(logits)
    log_sum = wide.logsumexp(-1, keepdim=True)
    losses = log_sum[:, 0] - (probs * wide).sum(-1)
    d_logits = ((wide - log_sum).exp() - probs) * weights[:, None]
    return losses, d_logits.to(logits.dtype), logits.argmax(-1)
