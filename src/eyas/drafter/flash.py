"""Attention of the training-time test on a GPU: FlashAttention over the context, merged with a row's own later keys.

Merging through the log-sum-exp is exact, and so is the backward: given the output and log-sum-exp of the *joint*
softmax, the context's own backward kernel yields the context's share, since dS = P * (dP - rowsum(dO * O)) holds for
every entry of the joint softmax alike.

Two kernels attend over the context. On an H200 (32 query heads, 8 of keys, D 128, samples of 4,096 tokens, TFLOP/s
forward and backward):

    torch's FlashAttention   334, 276   all samples in one call, any lengths and share of computed rows
    cuDNN's                  630, 481   one call a sample; computes the whole triangle of a sample's keys

Shapes: R rows, S keys, Hq/Hk query/key-value heads, D head_dim, k later steps.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyas.drafter.align import Alignment, IntArray
from eyas.drafter.attention import OwnEntries, to_device
from eyas.drafter.ops import take_rows
from eyas.progress import say

_CUDNN_GAIN = 1.6  # how many more entries cuDNN may compute before torch's kernel wins
_CUDNN_LEAST_LENGTH = 1024  # mean length of samples from which a call each pays
_MOST_DIFFERENCE = 2e-2  # between two kernels in bf16, relative; seen: 0.4%
_NO_WEIGHT = 1e30  # a log-sum-exp under which every entry's weight is 0

Bounds = tuple[Tensor, Tensor, int, int]


class FlashAttention:
    """Called like EagerAttention, for bf16 and fp16 on CUDA.

    A sample's keys are all positions up to its last computed row. Its queries are the stretch from its first computed
    row to its last, or for cuDNN, whose triangle starts at the top left, from its first position. Rows of the stretch
    that nothing trains (prompts, other people's turns) get zero queries and are dropped again.
    """

    def __init__(self, alignment: Alignment, device: torch.device) -> None:
        rows, start = alignment.rows, alignment.start
        row_start = start[rows]
        starts, first_index = np.unique(row_start, return_index=True)
        last_index = np.append(first_index[1:], len(rows)) - 1
        first, last = rows[first_index], rows[last_index]
        key_lengths = last - starts + 1
        self.cudnn = _pays_for_cudnn(last - first + 1, key_lengths, device)
        if self.cudnn:
            first = starts
        query_lengths = last - first + 1
        query_offsets = np.concatenate([[0], np.cumsum(query_lengths)])
        sample = np.searchsorted(starts, row_start)
        place = rows - first[sample] + query_offsets[sample]
        keys_kept = np.concatenate([np.arange(a, b + 1) for a, b in zip(starts, last, strict=True)])
        self.queries = int(query_offsets[-1])
        places, kept, cu_queries, cu_keys = to_device(
            [place, keys_kept, query_offsets, np.concatenate([[0], np.cumsum(key_lengths)])], device
        )
        # None where the stretches hold computed rows only, as in samples with one answer: nothing to scatter then.
        self.place = None if self.queries == len(rows) else places
        self.keys_kept = None if len(keys_kept) == len(start) else kept
        self.cu_queries, self.cu_keys = cu_queries.int(), cu_keys.int()
        self.max_queries, self.max_keys = int(query_lengths.max()), int(key_lengths.max())
        self.samples = [(int(at), int(length)) for at, length in zip(query_offsets, query_lengths, strict=False)]

    def context(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values up to each sample's last computed row."""
        if self.keys_kept is None:
            return keys, values
        return take_rows(keys, self.keys_kept), take_rows(values, self.keys_kept)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, own: OwnEntries, window: int = 0) -> Tensor:
        """As EagerAttention."""
        # Keys that a row sees beside its own: one of step k stands k positions further on than its place. -1: all.
        left = window - 1 - len(own.keys) if window else -1
        attended: Tensor = _MergedFlash.apply(queries, keys, values, own.stacked, self, left, *own.keys, *own.values)
        return attended.flatten(1)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, left: int) -> tuple[Tensor, Tensor]:
        """Over the context alone: output [spread rows, Hq, D] and log-sum-exp, fp32 [Hq, spread rows]."""
        if self._takes_cudnn(queries, keys, left):
            return _cudnn_forward(queries, keys, values, self.samples)
        return _flash_forward(queries, keys, values, self.bounds, left)

    def backward(
        self, grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor, left: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values from output and log-sum-exp of the joint softmax."""
        if self._takes_cudnn(queries, keys, left):
            return _cudnn_backward(grad, queries, keys, values, out, lse, self.samples)
        return _flash_backward(grad, queries, keys, values, out, lse, self.bounds, left)

    @property
    def bounds(self) -> Bounds:
        return self.cu_queries, self.cu_keys, self.max_queries, self.max_keys

    def _takes_cudnn(self, queries: Tensor, keys: Tensor, left: int) -> bool:
        """torch's operator of it has no window; one that no sample fills is none."""
        if not self.cudnn or 0 <= left < self.max_keys - 1:
            return False
        return _cudnn_agrees(*queries.shape[1:], keys.shape[1], queries.dtype, queries.device)


def _window(left: int) -> dict[str, int]:
    """Keywords of torch's operators: each row sees `left` keys beside its own, or all where it is below 0."""
    return {} if left < 0 else {"window_size_left": left, "window_size_right": 0}


def _flash_forward(
    queries: Tensor, keys: Tensor, values: Tensor, bounds: Bounds, left: int = -1
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        queries, keys, values, *bounds, 0.0, True, False, **_window(left)
    )
    return out, lse


def _flash_backward(
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Bounds,
    left: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.zeros(2, dtype=torch.uint64, device=lse.device)  # the state of dropout's random numbers
    d_queries, d_keys, d_values = torch.ops.aten._flash_attention_backward(
        grad, queries, keys, values, out, lse, *bounds, 0.0, True, unused, lse.new_empty(0), **_window(left)
    )
    return d_queries, d_keys, d_values


def _pays_for_cudnn(query_lengths: IntArray, key_lengths: IntArray, device: torch.device) -> bool:
    if torch.cuda.get_device_capability(device)[0] not in (9, 10) or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    if torch.are_deterministic_algorithms_enabled() or key_lengths.mean() < _CUDNN_LEAST_LENGTH:
        return False
    needed = (query_lengths * (key_lengths - query_lengths / 2)).sum()
    whole = sum(_room(int(length)) ** 2 / 2 for length in key_lengths)
    return bool(whole < _CUDNN_GAIN * needed)


@lru_cache
def _cudnn_agrees(heads: int, dim: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN takes these heads, and gives what torch's kernel gives: seen on two short samples, once a process.

    It is reached through operators that torch keeps to itself, and plans differ by version of cuDNN and kind of GPU.
    """
    lengths = [200, 300]
    offsets = torch.tensor([0, 200, 500], dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(0)
    queries, grad, keys, values = (
        torch.randn(500, count, dim, generator=generator, device=device).to(dtype)
        for count in (heads, heads, kv_heads, kv_heads)
    )
    bounds, samples = (offsets, offsets, max(lengths), max(lengths)), [(0, 200), (200, 300)]
    out, lse = _flash_forward(queries, keys, values, bounds)
    # What merging leaves: a log-sum-exp beyond the context's own, here by as much as one more key of average weight.
    joint = torch.logaddexp(lse, torch.zeros_like(lse))
    expected = (out, lse, *_flash_backward(grad, queries, keys, values, out, joint, bounds))
    try:
        found = (
            *_cudnn_forward(queries, keys, values, samples),
            *_cudnn_backward(grad, queries, keys, values, out, joint, samples),
        )
    except (RuntimeError, TypeError) as error:
        say(f"attention: torch's kernel instead of cuDNN's, which failed: {str(error).splitlines()[0]}")
        return False
    errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)]
    if not max(errors) < _MOST_DIFFERENCE:
        say(f"attention: torch's kernel instead of cuDNN's, which differs from it by {max(errors):.2g}")
        return False
    return True


def _room(length: int) -> int:
    """A sample's rows rounded up, by an eighth at most: cuDNN takes 0.15 s to plan for a length that it hasn't seen."""
    step = max(128, 1 << max(0, (length - 1).bit_length() - 4))
    return -(-length // step) * step


def _rooms(samples: list[tuple[int, int]], *tensors: Tensor) -> Iterator[tuple[slice, int, list[Tensor]]]:
    """Of each sample its rows, its room, and the tensors' rows from its first on as [1, heads, room, D].

    Beyond a sample lie the next one's rows, beyond the last one zeros. No row of the sample looks there, as its keys
    end before; what is computed for them is dropped.
    """
    for start, length in samples:
        room, pieces = _room(length), []
        for tensor in tensors:
            piece = tensor[start : start + room]
            if len(piece) < room:
                piece = F.pad(piece, (0, 0, 0, 0, 0, room - len(piece)))
            pieces.append(piece[None].transpose(1, 2))
        yield slice(start, start + length), room, pieces


def _cudnn_forward(
    queries: Tensor, keys: Tensor, values: Tensor, samples: list[tuple[int, int]]
) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[1], len(queries), dtype=torch.float32)
    for rows, room, pieces in _rooms(samples, queries, keys, values):
        some, log_sum, *_ = torch.ops.aten._cudnn_attention_forward(
            *pieces, None, None, None, room, room, True, 0.0, True, False
        )
        length = rows.stop - rows.start
        out[rows] = some[0, :, :length].transpose(0, 1)
        lse[:, rows] = log_sum[0, :, :length, 0]
    return out, lse


def _cudnn_backward(
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    samples: list[tuple[int, int]],
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = tuple(torch.empty_like(each) for each in (queries, keys, values))
    unused = lse.new_empty(0)  # the state of dropout's random numbers
    for rows, room, (d_some, *pieces) in _rooms(samples, grad, queries, keys, values, out):
        length = rows.stop - rows.start
        log_sum = F.pad(lse[:, rows], (0, room - length), value=_NO_WEIGHT)[None, :, :, None]
        some = torch.ops.aten._cudnn_attention_backward(
            d_some, *pieces, log_sum.contiguous(), unused, unused, None, None, None, room, room, 0.0, True
        )
        for whole, part in zip(gradients, some, strict=True):
            whole[rows] = part[0, :, :length].transpose(0, 1)
    return gradients[0], gradients[1], gradients[2]


class _MergedFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        stacked: Tensor,
        at: FlashAttention,
        left: int,
        *own: Tensor,
    ) -> Tensor:
        from eyas.drafter.kernels import merge

        steps = len(own) // 2
        spread = _spread(queries, at)
        out, lse = at.forward(spread, keys, values, left)
        if steps:
            merge.forward(out, lse, spread, stacked[0, :steps], stacked[1, :steps], at.place)
        ctx.save_for_backward(spread, keys, values, stacked, out, lse)
        ctx.at, ctx.left, ctx.steps = at, left, steps
        return out if at.place is None else out[at.place]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from eyas.drafter.kernels import merge

        queries, keys, values, stacked, out, lse = ctx.saved_tensors
        at, steps = ctx.at, ctx.steps
        grad = _spread(grads[0].contiguous(), at)
        d_queries, d_keys, d_values = at.backward(grad, queries, keys, values, out, lse, ctx.left)
        d_own: tuple[Tensor, ...] = ()
        if steps:
            own_keys, own_values = stacked[0, :steps], stacked[1, :steps]
            d_own_keys, d_own_values = merge.backward(
                grad, out, lse, queries, own_keys, own_values, at.place, d_queries
            )
            d_own = (*d_own_keys.unbind(), *d_own_values.unbind())
        if at.place is not None:
            d_queries = d_queries[at.place]
        return d_queries, d_keys, d_values, None, None, None, *d_own


def _spread(rows: Tensor, at: FlashAttention) -> Tensor:
    return rows if at.place is None else rows.new_zeros(at.queries, *rows.shape[1:]).index_copy_(0, at.place, rows)
