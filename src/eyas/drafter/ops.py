"""What stands between the matrix products of a step: on CUDA in half precision one kernel each, elsewhere plain torch.

The plain form is the reference; the kernels compute the same with fewer roundings and passes (see `kernels`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyas.drafter.weights import zero_sum


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels serve this tensor."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def widen(x: Tensor) -> Tensor:
    """At least fp32: what norms, softmax and losses are computed in (fp64 stays fp64, for exact tests)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Picked:
    """Some rows of a matrix, each at most once.

    Attributes:
        rows: their numbers, rising, int64 [n].
        place: of every row of the matrix its place among them, -1 where it is not picked, int64 [R].
    """

    rows: Tensor
    place: Tensor

    @property
    def all(self) -> bool:
        return len(self.rows) == len(self.place)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] for rows that are picked once each."""
    out: Tensor = _TakeRows.apply(x, rows)
    return out


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm, computed in fp32, in x's dtype."""
    if has_kernels(x):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        normed: Tensor = _Norms.apply(rows, None, weight, None, None, eps)[1]
        return normed.view(x.shape)
    return F.rms_norm(widen(x), x.shape[-1:], weight, eps).to(x.dtype)


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y and its norm."""
    if has_kernels(x):
        total, normed, _ = _Norms.apply(x, y, weight, None, None, eps)
        return total, normed
    total = x + y
    return total, norm(total, weight, eps)


def add_norms(
    x: Tensor, y: Tensor, weight: Tensor | None, picked_weight: Tensor, picked: Picked, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x + y, its norm by `weight` (None without one), and the norm of its picked rows by `picked_weight`."""
    if has_kernels(x):
        total, normed, of_picked = _Norms.apply(x, y, weight, picked_weight, picked, eps)
        return total, normed, of_picked
    total = x + y
    normed = None if weight is None else norm(total, weight, eps)
    return total, normed, norm(take_rows(total, picked.rows), picked_weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [R, 2I] -> [R, I]."""
    if has_kernels(gate_up):
        out: Tensor = _SiluMul.apply(gate_up)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Llama's half-split form: x [R, heads, D], cos and sin [R, 1, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class TokenShare:
    """What each token's embedding adds to the queries, keys and values of every row that reads it, [S, columns].

    Projected once a pack; its gradient is summed over all steps in fp32 before it goes on.
    """

    def __init__(self, share: Tensor) -> None:
        self.sum: list[Tensor | None] = [None]
        self.value: Tensor = _Collect.apply(share, self.sum)


@dataclass(frozen=True)
class Heads:
    """Widths of what is projected together: `queries` and `keys` heads of `dim`; values are as many as keys."""

    queries: int
    keys: int
    dim: int

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.queries, self.keys, self.keys


def to_heads(
    projected: Tensor, heads: Heads, share: TokenShare, first: int, token: Tensor | None, offset: int,
    angles: tuple[Tensor, Tensor], out: Sequence[Tensor | None] = (None, None, None),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values [R, heads, D] of rows [R, columns]; queries and keys rotated.

    Args:
        share: added at token[r] + offset (rows without a token of their own: r + offset); beyond its end, nothing.
        first: the share's column that belongs to `projected`'s first.
        angles: cosines and sines of each row's position, [R, 1, D].
        out: where to write them, if anywhere.
    """
    if has_kernels(projected):
        return _ToHeads.apply(projected, share.value, heads, share.sum, first, token, offset, angles, out)
    return to_heads_plain(projected, heads, share.value, first, token, offset, angles)


def to_heads_plain(
    projected: Tensor, heads: Heads, share: Tensor, first: int, token: Tensor | None, offset: int,
    angles: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`to_heads` without kernels; a token beyond the share's end gets its last."""
    at = torch.arange(len(projected), device=projected.device) if token is None else token
    added = share[:, first : first + projected.shape[1]].index_select(0, (at + offset).clamp(max=len(share) - 1))
    whole = (projected + added).unflatten(-1, (-1, heads.dim))
    queries, keys, values = whole.split(heads.counts, dim=1)
    return rotate(queries, *angles), rotate(keys, *angles), values


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.length = len(x)
        return x[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (grad,) = ctx.saved_tensors, grads
        return grad.new_zeros(ctx.length, *grad.shape[1:]).index_copy_(0, rows, grad), None


class _Norms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor | None, picked_weight: Tensor | None,
        picked: Picked | None, eps: float,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        from eyas.drafter.kernels import norm as kernel

        ctx.set_materialize_grads(False)
        place = None if picked is None or picked.all else picked.place
        rows = 0 if picked is None else len(picked.rows)
        total, normed, of_picked, scale = kernel.forward(x, y, weight, picked_weight, place, rows, eps)
        ctx.save_for_backward(total, scale, weight, picked_weight, place)
        ctx.added = y is not None
        return total if ctx.added else x.new_empty(0), normed, of_picked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from eyas.drafter.kernels import norm as kernel

        total, scale, weight, picked_weight, place = ctx.saved_tensors
        d_total, d_normed, d_picked = (None if grad is None else grad.contiguous() for grad in grads)
        if not ctx.added:
            d_total = None
        d_x, d_weight, d_picked_weight = kernel.backward(
            d_total, d_normed, d_picked, total, scale, weight, picked_weight, place
        )
        return d_x, d_x if ctx.added else None, d_weight, d_picked_weight, None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        from eyas.drafter.kernels import gate

        ctx.save_for_backward(gate_up)
        return gate.forward(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        from eyas.drafter.kernels import gate

        return gate.backward(grads[0].contiguous(), *ctx.saved_tensors)


class _Collect(torch.autograd.Function):
    """Passes a tensor on to uses that add their gradients to a sum, and hands that sum back when all are done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: list[Tensor | None]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.dtype = sums, x.dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (total,), (grad,) = ctx.sums, grads
        ctx.sums[0] = None
        if total is None:
            return grad, None
        return total.to(ctx.dtype) if grad is None else (total + grad).to(ctx.dtype), None


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, share: Tensor, heads: Heads, sums: list[Tensor | None], first: int,
        token: Tensor | None, offset: int, angles: tuple[Tensor, Tensor], out: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        from eyas.drafter.kernels import heads as kernel

        made, column = [], 0
        for number, (count, given) in enumerate(zip(heads.counts, out, strict=True)):
            part = projected.new_empty(len(projected), count, heads.dim) if given is None else given
            cos, sin = (None, None) if number == 2 else angles
            if count:
                kernel.forward(
                    projected, column, share, first + column, token, offset, cos, sin, count, heads.dim, part
                )  # fmt: skip
            made.append(part)
            column += count * heads.dim
        ctx.save_for_backward(share, token, *angles)
        ctx.heads, ctx.sums, ctx.first, ctx.offset, ctx.shape = heads, sums, first, offset, projected.shape
        return made[0], made[1], made[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from eyas.drafter.kernels import heads as kernel

        share, token, *angles = ctx.saved_tensors
        if ctx.sums[0] is None:
            ctx.sums[0] = zero_sum(share)
        d_projected, column = share.new_empty(ctx.shape), 0
        for number, (count, grad) in enumerate(zip(ctx.heads.counts, grads, strict=True)):
            cos, sin = (None, None) if number == 2 else angles
            if count:
                kernel.backward(
                    grad.contiguous(), token, ctx.offset, cos, sin, d_projected, column, ctx.sums[0], ctx.first + column
                )  # fmt: skip
            column += count * ctx.heads.dim
        return d_projected, None, None, None, None, None, None, None, None
