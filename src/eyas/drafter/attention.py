"""Attention of the training-time test: causal over step 0 plus one diagonal per later step.

A row of step k sees the step-0 keys of positions <= its own in its sample, and the keys it made itself at steps 1..k.
That is one softmax over a causal block and k single entries a row, so no mask over all steps is ever made:

    eager   chunks of rows against the keys of their samples; any device and dtype, the reference: here
    flash   FlashAttention over the causal block, merged with the diagonals: flash.py

Shapes: R rows, S keys, Hq/Hk query/key-value heads, G = Hq / Hk, D head_dim, k later steps.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.drafter.align import Alignment, IntArray
from eyas.drafter.ops import has_kernels, widen

# Rows attended in one piece by the eager form. Samples lie side by side, so a chunk's keys span its own samples only:
# with samples of 150 tokens a chunk of 256 rows meets about 500 keys instead of a whole packed row.
CHUNK_ROWS = 256


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


class OwnEntries:
    """Keys and values that each row has made at steps 1..k, so far.

    Attributes:
        keys, values: one tensor [R, Hk, D] a step.
        stacked: where kernels read and write them, [2, steps - 1, R, Hk, D]; None for the eager form.
    """

    def __init__(self, steps: int, rows: int, kv_heads: int, head_dim: int, like: Tensor) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.stacked = like.new_empty(2, steps - 1, rows, kv_heads, head_dim) if has_kernels(like) else None

    def place(self) -> tuple[Tensor | None, Tensor | None]:
        """Where the next step's are to be written; None: anywhere."""
        if self.stacked is None:
            return None, None
        step = len(self.keys)
        return self.stacked[0, step], self.stacked[1, step]

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.keys.append(keys)
        self.values.append(values)


class EagerAttention:
    """The reference: chunks of rows, each against the keys of its own samples."""

    def __init__(self, alignment: Alignment, device: torch.device) -> None:
        rows, start = alignment.rows, alignment.start
        self.chunks: list[tuple[slice, slice, Tensor, Tensor]] = []
        for low in range(0, len(rows), CHUNK_ROWS):
            at = rows[low : low + CHUNK_ROWS]
            first, end = int(start[at[0]]), int(at[-1]) + 1
            keys = np.arange(first, end)
            visible = (keys <= at[:, None]) & (keys >= start[at][:, None])
            numbers = torch.from_numpy(at).to(device), torch.from_numpy(visible).to(device)
            self.chunks.append((slice(low, low + len(at)), slice(first, end), *numbers))

    def context(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that rows see; the same for every step, so taken once."""
        return keys, values

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, own: OwnEntries, window: int = 0) -> Tensor:
        """[R, Hq, D] queries of the computed rows, step-0 keys and values as `context` gave them -> [R, Hq * D].

        Args:
            window: a row of step k, which stands k positions beyond its place, sees the keys of that many positions up
                to its own, its k later ones among them; 0: all. At least the number of steps.
        """
        pieces = []
        for rows, seen, at, visible in self.chunks:
            if window:
                position = torch.arange(seen.start, seen.stop, device=at.device)
                visible = visible & (position > at[:, None] + len(own.keys) - window)
            own_keys, own_values = [k[rows] for k in own.keys], [v[rows] for v in own.values]
            pieces.append(attend(queries[rows], keys[seen], values[seen], own_keys, own_values, visible))
        return torch.cat(pieces)


def to_device(arrays: Sequence[IntArray], device: torch.device) -> list[Tensor]:
    """Index arrays on a device, in one copy that the host does not wait for."""
    flat = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        flat = flat.pin_memory()
    return list(flat.to(device, non_blocking=True).split([len(array) for array in arrays]))
