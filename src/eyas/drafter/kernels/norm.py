"""Residual addition and one or two RMS norms of the sum, in one pass over the row, forward and backward."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS_BACKWARD = 528  # four for each of an H200's 132 multiprocessors: each adds up its rows' weight gradients


def forward(
    x: Tensor,
    y: Tensor | None,
    weight: Tensor | None,
    picked_weight: Tensor | None,
    place: Tensor | None,
    picked_rows: int,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """x + y (x where y is None), its norm, the norm of its picked rows, and 1 / rms fp32 [R].

    Args:
        weight: of the norm over all rows, fp32 [H]; None: no such norm.
        picked_weight: of the norm over picked rows, fp32 [H]; None: no such norm.
        place: for each row its place among the picked ones, -1 where it is not picked, int64 [R]; None: all are.
    """
    rows, width = x.shape
    total = x if y is None else torch.empty_like(x)
    normed = None if weight is None else torch.empty_like(x)
    picked = None if picked_weight is None else x.new_empty(picked_rows, width)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _forward[(rows,)](
        x, y, total, weight, normed, picked_weight, picked, place, scale, width, eps,
        BLOCK=block, ADD=y is not None, NORM=weight is not None, PICK=picked is not None, PLACED=place is not None,
        num_warps=_warps(block),
    )  # fmt: skip
    return total, normed, picked, scale


def backward(
    d_total: Tensor | None,
    d_normed: Tensor | None,
    d_picked: Tensor | None,
    total: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    picked_weight: Tensor | None,
    place: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the sum (all that reaches it), of weight and of picked_weight."""
    rows, width = total.shape
    programs = min(rows, _PROGRAMS_BACKWARD)
    d_x = torch.empty_like(total)
    partial = torch.empty(2, programs, width, dtype=torch.float32, device=total.device)
    block = triton.next_power_of_2(width)
    _backward[(programs,)](
        d_total, d_normed, d_picked, total, scale, weight, picked_weight, place, d_x, partial[0], partial[1],
        rows, width, BLOCK=block, ADDED=d_total is not None, NORM=d_normed is not None, PICK=d_picked is not None,
        PLACED=place is not None, num_warps=_warps(block),
    )  # fmt: skip
    return (
        d_x,
        None if d_normed is None else partial[0].sum(0),
        None if d_picked is None else partial[1].sum(0),
    )


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit
def _forward(
    x_ptr, y_ptr, total_ptr, weight_ptr, normed_ptr, picked_weight_ptr, picked_ptr, place_ptr, scale_ptr, width, eps,
    BLOCK: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, PICK: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(y_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * width + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(scale_ptr + row, scale)
    x = x * scale
    if NORM:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
        tl.store(normed_ptr + row * width + column, (x * weight).to(normed_ptr.dtype.element_ty), mask=inside)
    if PICK:
        at = row
        if PLACED:
            at = tl.load(place_ptr + row)
        weight = tl.load(picked_weight_ptr + column, mask=inside, other=0.0)
        kept = inside & (at >= 0)
        tl.store(picked_ptr + at * width + column, (x * weight).to(picked_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["rows"])
def _backward(
    d_total_ptr, d_normed_ptr, d_picked_ptr, total_ptr, scale_ptr, weight_ptr, picked_weight_ptr, place_ptr, d_x_ptr,
    d_weight_ptr, d_picked_weight_ptr, rows, width,
    BLOCK: tl.constexpr, ADDED: tl.constexpr, NORM: tl.constexpr, PICK: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    d_weight = tl.zeros((BLOCK,), tl.float32)
    d_picked_weight = tl.zeros((BLOCK,), tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if PICK:
        picked_weight = tl.load(picked_weight_ptr + column, mask=inside, other=0.0)
    at = program.to(tl.int64) * width + column
    for row in range(program, rows, tl.num_programs(0)):
        scale = tl.load(scale_ptr + row)
        x = tl.load(total_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
        inner = tl.zeros((BLOCK,), tl.float32)
        if NORM:
            d = tl.load(d_normed_ptr + at, mask=inside, other=0.0).to(tl.float32)
            d_weight += d * x
            inner += d * weight
        if PICK:
            picked_at, kept = at, inside
            if PLACED:
                place = tl.load(place_ptr + row)
                picked_at, kept = place * width + column, inside & (place >= 0)
            d = tl.load(d_picked_ptr + picked_at, mask=kept, other=0.0).to(tl.float32)
            d_picked_weight += d * x
            inner += d * picked_weight
        d_x = (inner - x * (tl.sum(inner * x, axis=0) / width)) * scale
        if ADDED:
            d_x += tl.load(d_total_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x_ptr + at, d_x.to(d_x_ptr.dtype.element_ty), mask=inside)
        at += tl.num_programs(0) * width
    if NORM:
        tl.store(d_weight_ptr + program * width + column, d_weight, mask=inside)
    if PICK:
        tl.store(d_picked_weight_ptr + program * width + column, d_picked_weight, mask=inside)
