"""Soft cross-entropy against teacher logits: loss, argmax and gradient in two passes over a row of logits, in place.

A row of 32,000 logits and its teacher's take 128 KB; the second pass finds most of it in the L2 cache. The plain form
is `fused.cross_entropy`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8


def cross_entropy(
    logits: Tensor, teacher_logits: Tensor, teacher_log_sum: Tensor, teacher: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's loss fp32 [n], the gradient of their weighted sum (written over `logits`), and the argmax int64 [n].

    Args:
        logits: [n, Vd]; teacher_logits: [P, Vd]; teacher_log_sum: fp32 [P].
        teacher: int64 [n], row of the teacher of each row; weights: fp32 [n].
    """
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    drafts = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _cross_entropy[(rows,)](
        logits, teacher_logits, teacher_log_sum, teacher, weights, losses, drafts, width, BLOCK=block, num_warps=_WARPS
    )
    return losses, logits, drafts


def log_sum(logits: Tensor) -> Tensor:
    """Log-sum-exp of each row, fp32 [P]."""
    rows, width = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _log_sum[(rows,)](logits, out, width, BLOCK=block, num_warps=_WARPS)
    return out


@triton.jit
def _log_sum(logits_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    top = tl.full((), float("-inf"), tl.float32)
    mass = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        x = tl.load(logits_ptr + row * width + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, axis=0))
        mass = mass * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
        top = higher
    tl.store(out_ptr + row, top + tl.log(mass))


@triton.jit
def _cross_entropy(
    logits_ptr, teacher_ptr, teacher_log_sum_ptr, index_ptr, weight_ptr, loss_ptr, draft_ptr, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    teacher = tl.load(index_ptr + row)
    weight = tl.load(weight_ptr + row)
    teacher_log_sum = tl.load(teacher_log_sum_ptr + teacher)
    logits_ptr += row * width
    teacher_ptr += teacher * width
    column = tl.arange(0, BLOCK)
    top = tl.full((), float("-inf"), tl.float32)
    best = tl.zeros((), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    dot = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + column < width
        x = tl.load(logits_ptr + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        y = tl.load(teacher_ptr + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        dot += tl.where(inside, tl.exp(y - teacher_log_sum) * x, 0.0)
        here = tl.max(x, axis=0)
        best = tl.where(here > top, start, best)
        higher = tl.maximum(top, here)
        mass = mass * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    log_sum = top + tl.log(tl.sum(mass, axis=0))
    tl.store(loss_ptr + row, log_sum - tl.sum(dot, axis=0))
    block = tl.load(logits_ptr + best + column, mask=best + column < width, other=float("-inf")).to(tl.float32)
    tl.store(draft_ptr + row, (best + tl.argmax(block, axis=0)).to(tl.int64))
    for start in range(0, width, BLOCK):
        inside = start + column < width
        x = tl.load(logits_ptr + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        y = tl.load(teacher_ptr + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        d_logits = (tl.exp(x - log_sum) - tl.exp(y - teacher_log_sum)) * weight
        tl.store(logits_ptr + start + column, d_logits.to(logits_ptr.dtype.element_ty), mask=inside)
