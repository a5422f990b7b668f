"""LK losses: what is trained is the acceptance rate itself, not only a divergence that bounds it.

At temperature 1 a draft is accepted with probability alpha = sum_v min(p_v, q_v) = 1 - TV(p, q); p is the target's
distribution, q the drafter's. Two forms, of each row by itself, so that neither packing nor ranks change them:

    lk-hybrid   w * KL(p, q) + (1 - w) * (1 - alpha),  w = exp(-eta * alpha) without gradient: far from the target the
                loss is KL, whose gradient does not vanish there, near it the share of refused drafts
    lk-alpha    -log(alpha)

p is renormalised on the draft vocabulary, as for cross-entropy (and in speculators 0.9.0); alpha over the whole
vocabulary would need the target's whole softmax and is smaller by about the draft vocabulary's coverage.

Source: LK Losses, arXiv:2602.23881; eta = 3 is its best hybrid. Gains told there are for temperature 1; at
temperature 0 about 2%.

Gradients by the logits z of q, with m = 1 where q < p and s = sum_v m_v q_v:  d(1 - alpha)/dz = q * (s - m).
"""

from functools import cache

import torch
from torch import Tensor

from eyas.drafter.ops import widen
from eyas.train.fused import RowLosses
from eyas.train.fusing import fused_on_cuda

# alpha below this counts as this much: the log stays finite, and its gradient points the same way.
_LEAST_ALPHA = 1e-6


@cache
def hybrid(eta: float) -> RowLosses:
    """RowLosses of lk-hybrid (see eyas.train.fused)."""

    @fused_on_cuda
    def losses(logits: Tensor, probs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_q, q, alpha, d_refused = _overlap(logits, probs)
        weight = (-eta * alpha).exp()
        divergence = (torch.xlogy(probs, probs) - probs * log_q).sum(-1)
        d_logits = weight[:, None] * (q - probs) + (1 - weight)[:, None] * d_refused
        row = weight * divergence + (1 - weight) * (1 - alpha)
        return row, (d_logits * weights[:, None]).to(logits.dtype), logits.argmax(-1)

    return losses


@fused_on_cuda
def log_acceptance(logits: Tensor, probs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """RowLosses of lk-alpha (see eyas.train.fused)."""
    _, _, alpha, d_refused = _overlap(logits, probs)
    alpha = alpha.clamp(min=_LEAST_ALPHA)
    d_logits = d_refused * (weights / alpha)[:, None]
    return -alpha.log(), d_logits.to(logits.dtype), logits.argmax(-1)


def _overlap(logits: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log q and q [n, Vd], alpha [n], and the gradient of 1 - alpha by the logits [n, Vd]; all at least fp32."""
    log_q = widen(logits).log_softmax(-1)
    q = log_q.exp()
    less = (q < probs).to(q.dtype)
    alpha = torch.minimum(q, probs).sum(-1)
    return log_q, q, alpha, q * ((less * q).sum(-1, keepdim=True) - less)
