"""Matrices that are read many times in a pack: cast once, their gradient summed once, in fp32.

Every step of the training-time test reads the same weights. Left to autograd, each step would write a gradient of its
own in bf16 and add it to the others: with 7 steps at 8B shape that took 9 ms of 292. Here a use adds its product to one
fp32 sum inside the matrix product itself, and the masters receive that sum when all uses are done.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class SharedWeight:
    """Master weights stacked by rows in a compute dtype; with `split`, their columns before and after it apart.

    Attributes:
        values: the stacked matrices [rows, columns], one, or two with `split`; what `linear` multiplies with.
        sums: the gradient of each of them so far, at least fp32, made at its first use.
    """

    def __init__(self, masters: Sequence[Tensor], dtype: torch.dtype, split: int | None = None) -> None:
        self.sums: list[Tensor | None] = [None] if split is None else [None, None]
        self.values: tuple[Tensor, ...] = _Cast.apply(self.sums, dtype, split, *masters)


def linear(x: Tensor, weight: SharedWeight, part: int = 0, rows: slice = slice(None)) -> Tensor:
    """x [n, columns] times the transposed rows of a shared weight -> [n, rows]."""
    out: Tensor = _Linear.apply(x, weight.values[part], weight.sums, part, rows)
    return out


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, rounded once to `total`'s dtype, which may be wider than the factors'."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def zero_sum(like: Tensor) -> Tensor:
    """Where gradients of a tensor are added up: its shape, at least fp32."""
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


class _Cast(torch.autograd.Function):
    """Masters to stacked copies. Uses return no gradient for a copy: they add to the sums, which backward hands on."""

    @staticmethod
    def forward(
        ctx: Any, sums: list[Tensor | None], dtype: torch.dtype, split: int | None, *masters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.lengths = sums, [len(master) for master in masters]
        columns = masters[0].shape[1]
        bounds = [0, columns] if split is None else [0, split, columns]
        values = []
        for low, high in zip(bounds, bounds[1:], strict=False):
            value = masters[0].new_empty(sum(ctx.lengths), high - low, dtype=dtype)
            for place, master in zip(value.split(ctx.lengths), masters, strict=True):
                place.copy_(master[:, low:high])
            values.append(value)
        return tuple(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None
        if any(total is None for total in sums):
            raise AssertionError("every part of a shared weight must have been used")
        parts = [total.split(ctx.lengths) for total in sums]
        gradients = parts[0] if len(parts) == 1 else [torch.cat(pair, dim=1) for pair in zip(*parts, strict=True)]
        return None, None, None, *gradients


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, sums: list[Tensor | None], part: int, rows: slice) -> Tensor:
        ctx.save_for_backward(x, value)
        ctx.sums, ctx.part, ctx.rows = sums, part, rows
        return x @ value[rows].T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, value), (grad,) = ctx.saved_tensors, grads
        if ctx.needs_input_grad[1]:
            total = ctx.sums[ctx.part]
            if total is None:
                total = ctx.sums[ctx.part] = zero_sum(value)
            add_product(total[ctx.rows], grad.T, x)
        d_x = grad @ value[ctx.rows] if ctx.needs_input_grad[0] else None
        return d_x, None, None, None, None
