"""Attention of the training-time test: causal over step 0 plus one diagonal per later step.

A row of step k sees the step-0 keys of positions <= its own in its sample, and the keys it made itself at steps 1..k.
That is one softmax over a causal block and k single entries a row, so no mask over all steps is ever made:

    eager   chunks of rows against the keys of their samples; any device and dtype, the reference
    flash   FlashAttention over the causal block, merged with the diagonals through the log-sum-exp. Its backward is
            exact: given the output and log-sum-exp of the *joint* softmax, the block's own backward kernel yields the
            block's share, since dS = P * (dP - rowsum(dO * O)) holds for every entry of the joint softmax alike

Shapes: R rows, S keys, Hq/Hk query/key-value heads, G = Hq / Hk, D head_dim, k later steps.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.drafter.align import Alignment
from eyas.drafter.fusing import fused_on_cuda

# Rows attended in one piece by the eager form. Samples lie side by side, so a chunk's keys span its own samples only:
# with samples of 150 tokens a chunk of 256 rows meets about 500 keys instead of a whole packed row.
CHUNK_ROWS = 256


def widen(x: Tensor) -> Tensor:
    """At least fp32: what norms, softmax and losses are computed in (fp64 stays fp64, for exact tests)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    visible: Tensor,
) -> Tensor:
    """Softmax over the visible context and the row's own later keys together.

    Shapes: queries [r, Hq, D]; keys, values [n, Hk, D]; own keys and values [r, Hk, D] each; visible bool [r, n].
    Returns: [r, Hq * D].
    """
    r, n, kv_heads = len(queries), len(keys), keys.shape[1]
    grouped = (queries * queries.shape[-1] ** -0.5).unflatten(1, (kv_heads, -1))  # [r, Hk, G, D]
    scores = widen(torch.einsum("rhgd,nhd->hgrn", grouped, keys)).masked_fill(~visible, -torch.inf)
    if not own_keys:
        weights = scores.softmax(dim=-1).to(values.dtype)
        return torch.einsum("hgrn,nhd->rhgd", weights, values).reshape(r, -1)
    own = widen(torch.stack([(grouped * key[:, :, None]).sum(-1) for key in own_keys], dim=-1))  # [r, Hk, G, k]
    weights = torch.cat([scores, own.permute(1, 2, 0, 3)], dim=-1).softmax(dim=-1).to(values.dtype)
    out = torch.einsum("hgrn,nhd->rhgd", weights[..., :n], values)
    for k, value in enumerate(own_values):
        out = out + weights[..., n + k].permute(2, 0, 1)[..., None] * value[:, :, None]
    return out.reshape(r, -1)


class EagerAttention:
    """The reference: chunks of rows, each against the keys of its own samples."""

    def __init__(self, alignment: Alignment, device: torch.device) -> None:
        rows, start = alignment.rows, alignment.start
        self.chunks = []
        for low in range(0, len(rows), CHUNK_ROWS):
            at = rows[low : low + CHUNK_ROWS]
            first, end = int(start[at[0]]), int(at[-1]) + 1
            keys = np.arange(first, end)
            visible = (keys <= at[:, None]) & (keys >= start[at][:, None])
            self.chunks.append((slice(low, low + len(at)), slice(first, end), torch.from_numpy(visible).to(device)))

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor]
    ) -> Tensor:
        """[R, Hq, D] queries of the computed rows, [S, Hk, D] step-0 keys and values -> [R, Hq * D]."""
        pieces = [
            attend(queries[r], keys[s], values[s], [k[r] for k in own_keys], [v[r] for v in own_values], visible)
            for r, s, visible in self.chunks
        ]
        return torch.cat(pieces)


class FlashAttention:
    """FlashAttention (variable length, aligned to the bottom right) over each sample's needed rows and keys.

    A sample's queries are the stretch from its first to its last computed row, its keys all positions up to that last
    row. Rows inside the stretch that nothing trains (between two answers) get zero queries and are dropped again.
    """

    def __init__(self, alignment: Alignment, device: torch.device) -> None:
        rows, start = alignment.rows, alignment.start
        row_start = start[rows]
        starts, first_index = np.unique(row_start, return_index=True)
        last_index = np.append(first_index[1:], len(rows)) - 1
        first, last = rows[first_index], rows[last_index]
        query_lengths, key_lengths = last - first + 1, last - starts + 1
        query_offsets = np.concatenate([[0], np.cumsum(query_lengths)])
        sample = np.searchsorted(starts, row_start)
        place = rows - first[sample] + query_offsets[sample]
        keys_kept = np.concatenate([np.arange(a, b + 1) for a, b in zip(starts, last, strict=True)])
        self.queries = int(query_offsets[-1])
        # None where the stretches hold computed rows only, as in samples with one answer: nothing to scatter then.
        self.place = None if self.queries == len(rows) else torch.from_numpy(place).to(device)
        self.keys_kept = None if len(keys_kept) == len(start) else torch.from_numpy(keys_kept).to(device)
        self.cu_queries = _cumulative(query_lengths, device)
        self.cu_keys = _cumulative(key_lengths, device)
        self.max_queries, self.max_keys = int(query_lengths.max()), int(key_lengths.max())

    def context(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The kept keys and values; the same for every step, so taken once."""
        if self.keys_kept is None:
            return keys, values
        return keys[self.keys_kept], values[self.keys_kept]

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, own_keys: Sequence[Tensor], own_values: Sequence[Tensor]
    ) -> Tensor:
        """As EagerAttention, with keys and values from `context`."""
        if own_keys:
            own = torch.stack([*own_keys]), torch.stack([*own_values])
        else:
            own = queries.new_empty(0, *keys.shape), queries.new_empty(0, *values.shape)
        return _MergedFlash.apply(queries, keys, values, *own, self).flatten(1)


class _MergedFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        at: FlashAttention,
    ) -> Tensor:
        spread = _spread(queries, at)
        out, lse, *random = torch.ops.aten._flash_attention_forward(
            spread, keys, values, at.cu_queries, at.cu_keys, at.max_queries, at.max_keys, 0.0, True, False
        )
        lse = lse.T  # [Hq, rows] -> [rows, Hq]
        if len(own_keys):
            merged, joint = _merge(_gather(out, at), _gather(lse, at), queries, own_keys, own_values)
            out, lse = _spread(merged, at), _spread(joint, at)
        ctx.save_for_backward(spread, keys, values, own_keys, own_values, out, lse, *random[:2])
        ctx.at = at
        return _gather(out, at)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        spread, keys, values, own_keys, own_values, out, lse, seed, offset = ctx.saved_tensors
        at, (grad,) = ctx.at, grads
        grad = grad.contiguous()
        d_queries, d_keys, d_values = torch.ops.aten._flash_attention_backward(
            _spread(grad, at),
            spread,
            keys,
            values,
            out,
            lse.T.contiguous(),
            at.cu_queries,
            at.cu_keys,
            at.max_queries,
            at.max_keys,
            0.0,
            True,
            seed,
            offset,
        )
        d_queries = _gather(d_queries, at)
        if not len(own_keys):
            return d_queries, d_keys, d_values, None, None, None
        queries, out, lse = _gather(spread, at), _gather(out, at), _gather(lse, at)
        own_d_queries, d_own_keys, d_own_values = _merge_backward(grad, queries, out, lse, own_keys, own_values)
        return d_queries + own_d_queries, d_keys, d_values, d_own_keys, d_own_values, None


@fused_on_cuda
def _merge(out: Tensor, lse: Tensor, queries: Tensor, own_keys: Tensor, own_values: Tensor) -> tuple[Tensor, Tensor]:
    """Joint softmax of a block (out [R, Hq, D], lse [R, Hq]) and k single entries a row ([k, R, Hk, D])."""
    scores = _own_scores(queries, own_keys)  # [k, R, Hk, G]
    grouped_lse = lse.unflatten(1, scores.shape[2:])
    joint = torch.logsumexp(torch.cat([grouped_lse[None], scores]), dim=0)  # [R, Hk, G]
    merged = (grouped_lse - joint).exp()[..., None] * out.unflatten(1, scores.shape[2:]).float()
    merged = merged + ((scores - joint).exp()[..., None] * own_values[:, :, :, None].float()).sum(0)
    return merged.flatten(1, 2).to(out.dtype), joint.flatten(1)


@fused_on_cuda
def _merge_backward(
    grad: Tensor, queries: Tensor, out: Tensor, lse: Tensor, own_keys: Tensor, own_values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that pass through the single entries: of queries, own keys and own values."""
    scores = _own_scores(queries, own_keys)
    shape = scores.shape[2:]
    wide = grad.float().unflatten(1, shape)  # [R, Hk, G, D]
    weights = (scores - lse.unflatten(1, shape)).exp()
    delta = (wide * out.float().unflatten(1, shape)).sum(-1)
    d_weights = (wide * own_values[:, :, :, None].float()).sum(-1)
    d_scores = weights * (d_weights - delta) * queries.shape[-1] ** -0.5  # [k, R, Hk, G]
    d_queries = (d_scores[..., None] * own_keys[:, :, :, None].float()).sum(0).flatten(1, 2)
    d_own_keys = (d_scores[..., None] * queries.float().unflatten(1, shape)).sum(3)
    d_own_values = (weights[..., None] * wide).sum(3)
    return d_queries.to(queries.dtype), d_own_keys.to(own_keys.dtype), d_own_values.to(own_values.dtype)


def _own_scores(queries: Tensor, own_keys: Tensor) -> Tensor:
    grouped = queries.float().unflatten(1, (own_keys.shape[2], -1)) * queries.shape[-1] ** -0.5
    return (grouped * own_keys[:, :, :, None].float()).sum(-1)


def _spread(rows: Tensor, at: FlashAttention) -> Tensor:
    return rows if at.place is None else rows.new_zeros(at.queries, *rows.shape[1:]).index_copy(0, at.place, rows)


def _gather(spread: Tensor, at: FlashAttention) -> Tensor:
    return spread if at.place is None else spread[at.place]


def _cumulative(lengths: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
