"""The diagonals of the training-time test: single keys of a row's own, merged with attention over its context.

One program for a row and a key-value head, that is, for G query heads; all that it reads is read once.
"""

import triton
import triton.language as tl
from torch import Tensor


def forward(
    out: Tensor, lse: Tensor, queries: Tensor, own_keys: Tensor, own_values: Tensor, place: Tensor | None
) -> None:
    """Turn attention over the context into the joint softmax, in place.

    Args:
        out: [spread rows, Hq, D]; lse: its log-sum-exp, fp32 [Hq, spread rows].
        queries: [spread rows, Hq, D].
        own_keys, own_values: [k, R, Hk, D], contiguous.
        place: of each of the R rows among the spread ones, int64 [R]; None: its own number.
    """
    entries, rows, kv_heads, head_dim = own_keys.shape
    group = queries.shape[1] // kv_heads
    _forward[(rows, kv_heads)](
        out, lse, queries, own_keys, own_values, place, head_dim**-0.5,
        entries, lse.stride(0), queries.stride(0), own_keys.stride(0), own_values.stride(0), kv_heads,
        group, GROUP=triton.next_power_of_2(group), DIM=triton.next_power_of_2(head_dim), head_dim=head_dim,
        PLACED=place is not None, num_warps=_warps(group, head_dim),
    )  # fmt: skip


def backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    place: Tensor | None,
    d_queries: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of own keys and values; adds to d_queries what passes through them. `grad` and d_queries are spread."""
    entries, rows, kv_heads, head_dim = own_keys.shape
    group = queries.shape[1] // kv_heads
    d_keys = own_keys.new_empty(own_keys.shape)
    d_values = own_values.new_empty(own_values.shape)
    _backward[(rows, kv_heads)](
        grad, out, lse, queries, own_keys, own_values, place, d_queries, d_keys, d_values, head_dim**-0.5,
        entries, lse.stride(0), queries.stride(0), own_keys.stride(0), own_values.stride(0), d_keys.stride(0), kv_heads,
        group, GROUP=triton.next_power_of_2(group), DIM=triton.next_power_of_2(head_dim), head_dim=head_dim,
        PLACED=place is not None, num_warps=_warps(group, head_dim),
    )  # fmt: skip
    return d_keys, d_values


def _warps(group: int, head_dim: int) -> int:
    return min(4, max(1, triton.next_power_of_2(group) * triton.next_power_of_2(head_dim) // 1024))


@triton.jit(do_not_specialize=["entries"])
def _forward(
    out_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, place_ptr, scale,
    entries, lse_stride, query_stride, key_stride, value_stride, kv_heads, group,
    GROUP: tl.constexpr, DIM: tl.constexpr, head_dim: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row
    if PLACED:
        at = tl.load(place_ptr + row)
    member, element = tl.arange(0, GROUP), tl.arange(0, DIM)
    head = kv_head * group + member
    column = element < head_dim
    inside = (member < group)[:, None] & column[None, :]
    tile = at * query_stride + head[:, None] * head_dim + element[None, :]
    own = (row * kv_heads + kv_head) * head_dim + element
    query = tl.load(query_ptr + tile, mask=inside, other=0.0).to(tl.float32) * scale
    total = tl.load(out_ptr + tile, mask=inside, other=0.0).to(tl.float32)
    top = tl.load(lse_ptr + head * lse_stride + at, mask=member < group, other=0.0)
    mass = tl.full((GROUP,), 1.0, tl.float32)
    key_at, value_at = key_ptr + own, value_ptr + own
    for _ in range(entries):
        key = tl.load(key_at, mask=column, other=0.0).to(tl.float32)
        value = tl.load(value_at, mask=column, other=0.0).to(tl.float32)
        score = tl.sum(query * key[None, :], axis=1)
        higher = tl.maximum(top, score)
        kept, weight = tl.exp(top - higher), tl.exp(score - higher)
        total = total * kept[:, None] + weight[:, None] * value[None, :]
        mass = mass * kept + weight
        top = higher
        key_at += key_stride
        value_at += value_stride
    tl.store(out_ptr + tile, (total / mass[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + head * lse_stride + at, top + tl.log(mass), mask=member < group)


@triton.jit(do_not_specialize=["entries"])
def _backward(
    grad_ptr, out_ptr, lse_ptr, query_ptr, key_ptr, value_ptr, place_ptr, d_query_ptr, d_key_ptr, d_value_ptr, scale,
    entries, lse_stride, query_stride, key_stride, value_stride, d_stride, kv_heads, group,
    GROUP: tl.constexpr, DIM: tl.constexpr, head_dim: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row
    if PLACED:
        at = tl.load(place_ptr + row)
    member, element = tl.arange(0, GROUP), tl.arange(0, DIM)
    head = kv_head * group + member
    column = element < head_dim
    inside = (member < group)[:, None] & column[None, :]
    tile = at * query_stride + head[:, None] * head_dim + element[None, :]
    own = (row * kv_heads + kv_head) * head_dim + element
    query = tl.load(query_ptr + tile, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + tile, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + tile, mask=inside, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + head * lse_stride + at, mask=member < group, other=0.0)
    delta = tl.sum(grad * out, axis=1)
    d_query = tl.load(d_query_ptr + tile, mask=inside, other=0.0).to(tl.float32)
    d_key_at, d_value_at = d_key_ptr + own, d_value_ptr + own
    key_at, value_at = key_ptr + own, value_ptr + own
    for _ in range(entries):
        key = tl.load(key_at, mask=column, other=0.0).to(tl.float32)
        value = tl.load(value_at, mask=column, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(query * key[None, :], axis=1) * scale - lse)
        d_score = weight * (tl.sum(grad * value[None, :], axis=1) - delta) * scale
        d_query += d_score[:, None] * key[None, :]
        d_key = tl.sum(d_score[:, None] * query, axis=0)
        d_value = tl.sum(weight[:, None] * grad, axis=0)
        tl.store(d_key_at, d_key.to(d_key_ptr.dtype.element_ty), mask=column)
        tl.store(d_value_at, d_value.to(d_value_ptr.dtype.element_ty), mask=column)
        key_at += key_stride
        value_at += value_stride
        d_key_at += d_stride
        d_value_at += d_stride
    tl.store(d_query_ptr + tile, d_query.to(d_query_ptr.dtype.element_ty), mask=inside)
