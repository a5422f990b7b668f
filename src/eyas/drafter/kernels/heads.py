"""From projected features to heads: add the token's share, rotate by position; and back."""

import triton
import triton.language as tl
from torch import Tensor


def forward(
    projected: Tensor,
    column: int,
    share: Tensor,
    share_column: int,
    token: Tensor | None,
    offset: int,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    head_dim: int,
    out: Tensor,
) -> None:
    """out[r] = rotate(projected[r, column:] + share[token[r] + offset, share_column:]), `heads` of `head_dim` each.

    Args:
        projected, share: [R, width] and [S, share width].
        token: int64 [R]; None: row r's own number. A token beyond S has no share.
        cos, sin: [R, 1, head_dim], both halves alike; None: no rotation.
        out: [R, heads, head_dim], written.
    """
    cos, sin, rotated = _angles(projected, cos, sin)
    _forward[(len(projected),)](
        projected[:, column:], share[:, share_column:], token, cos, sin, out,
        projected.stride(0), share.stride(0), cos.stride(0), len(share), offset, heads, head_dim // 2,
        HEADS=triton.next_power_of_2(heads), BLOCK=triton.next_power_of_2(head_dim // 2),
        TOKEN=token is not None, ROTATED=rotated, num_warps=_warps(heads, head_dim),
    )  # fmt: skip


def backward(
    d_out: Tensor,
    token: Tensor | None,
    offset: int,
    cos: Tensor | None,
    sin: Tensor | None,
    d_projected: Tensor,
    column: int,
    d_share: Tensor,
    share_column: int,
) -> None:
    """Writes d_projected[:, column:], adds to d_share[:, share_column:] at each row's token; no two rows share one."""
    rows, heads, head_dim = d_out.shape
    cos, sin, rotated = _angles(d_projected, cos, sin)
    _backward[(rows,)](
        d_out, token, cos, sin, d_projected[:, column:], d_share[:, share_column:],
        d_out.stride(0), d_projected.stride(0), d_share.stride(0), cos.stride(0), len(d_share), offset, heads,
        head_dim // 2, HEADS=triton.next_power_of_2(heads), BLOCK=triton.next_power_of_2(head_dim // 2),
        TOKEN=token is not None, ROTATED=rotated, num_warps=_warps(heads, head_dim),
    )  # fmt: skip


def _angles(like: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, bool]:
    if cos is None or sin is None:
        return like, like, False
    return cos, sin, True


def _warps(heads: int, head_dim: int) -> int:
    return min(8, max(1, triton.next_power_of_2(heads) * triton.next_power_of_2(head_dim) // 512))


@triton.jit(do_not_specialize=["tokens", "offset"])
def _forward(
    projected_ptr, share_ptr, token_ptr, cos_ptr, sin_ptr, out_ptr, stride, share_stride, angle_stride, tokens, offset,
    heads, half, HEADS: tl.constexpr, BLOCK: tl.constexpr, TOKEN: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = row + offset
    if TOKEN:
        at = tl.load(token_ptr + row) + offset
    head, element = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (element < half)
    shared = inside & (at < tokens)
    low = head * 2 * half + element
    first = tl.load(projected_ptr + row * stride + low, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(projected_ptr + row * stride + low + half, mask=inside, other=0.0).to(tl.float32)
    first += tl.load(share_ptr + at * share_stride + low, mask=shared, other=0.0).to(tl.float32)
    second += tl.load(share_ptr + at * share_stride + low + half, mask=shared, other=0.0).to(tl.float32)
    if ROTATED:
        cos = tl.load(cos_ptr + row * angle_stride + element, mask=element < half, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + row * angle_stride + element, mask=element < half, other=0.0).to(tl.float32)
        first, second = first * cos - second * sin, second * cos + first * sin
    out = row * heads * 2 * half + low
    tl.store(out_ptr + out, first.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_ptr + out + half, second.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "offset"])
def _backward(
    d_out_ptr, token_ptr, cos_ptr, sin_ptr, d_projected_ptr, d_share_ptr, out_stride, stride, share_stride,
    angle_stride, tokens, offset, heads, half, HEADS: tl.constexpr, BLOCK: tl.constexpr, TOKEN: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = row + offset
    if TOKEN:
        at = tl.load(token_ptr + row) + offset
    head, element = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (element < half)
    shared = inside & (at < tokens)
    low = head * 2 * half + element
    first = tl.load(d_out_ptr + row * out_stride + low, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(d_out_ptr + row * out_stride + low + half, mask=inside, other=0.0).to(tl.float32)
    if ROTATED:
        cos = tl.load(cos_ptr + row * angle_stride + element, mask=element < half, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + row * angle_stride + element, mask=element < half, other=0.0).to(tl.float32)
        first, second = first * cos + second * sin, second * cos - first * sin
    tl.store(d_projected_ptr + row * stride + low, first.to(d_projected_ptr.dtype.element_ty), mask=inside)
    tl.store(d_projected_ptr + row * stride + low + half, second.to(d_projected_ptr.dtype.element_ty), mask=inside)
    share = d_share_ptr + at * share_stride + low
    tl.store(share, tl.load(share, mask=shared, other=0.0) + first, mask=shared)
    tl.store(share + half, tl.load(share + half, mask=shared, other=0.0) + second, mask=shared)
