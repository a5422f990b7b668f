"""The training-time test: the drafter run on its own outputs, as it will be when it drafts.

At step 0 every row is a real position: features come from the target's aux states, and attention is causal within the
sample. At step k > 0 a row is the k-th draft made from position j: its feature is the row's own last output, its token
is t[j+1+k], and besides the step-0 keys of positions <= j it sees only the keys it made itself at steps 1..k, one
diagonal each. Rows that no step trains give step-0 keys and values and are not computed any further.

Source: EAGLE-3, arXiv:2503.01840, section 3; the diagonal form follows from its figure of the attention masks.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from eyas.drafter.eagle3 import Drafter, widen
from eyas.drafter.pack import Pack

# Rows attended in one piece. Samples lie side by side, so a chunk's keys span its own samples only: with samples of
# 150 tokens a chunk of 256 rows meets about 500 keys instead of a whole packed row.
CHUNK_ROWS = 256


def unroll(drafter: Drafter, embedding: Tensor, pack: Pack, steps: int) -> Iterator[Tensor]:
    """Features after each step at the rows that some step trains.

    Args:
        embedding: the target's embedding [V, H], any float dtype; no gradient flows into it.
        steps: how many steps; the pack must have been aligned for at least as many.
    Yields: pre-norm features [R, H], R = len(pack.alignment.rows), in the pack's dtype.
    """
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    device, dtype, last = pack.aux.device, pack.aux.dtype, len(pack.token_ids) - 1
    rows = torch.from_numpy(pack.alignment.rows).to(device)

    def embeds_at(positions: Tensor) -> Tensor:
        # Past the end of a pack lie only rows that nothing trains; any token serves there.
        return embedding[pack.token_ids[positions.clamp(max=last)]].to(dtype)

    features = drafter.fc(pack.aux)
    x = layer.attention_input(embeds_at(torch.arange(1, last + 2, device=device)), features)
    cos, sin = drafter.rope(pack.positions, features)
    context_keys, context_values = attention.key_value(x, cos, sin)
    chunks = _chunks(pack, device)
    x, features, cos, sin = x[rows], features[rows], cos[rows], sin[rows]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for step in range(steps):
        if step > 0:
            x = layer.attention_input(embeds_at(rows + 1 + step), features)
            cos, sin = drafter.rope(pack.positions[rows] + step, features)
            key, value = attention.key_value(x, cos, sin)
            own_keys.append(key)
            own_values.append(value)
        queries = attention.query(x, cos, sin)
        attended = [
            attend(
                queries[low:high],
                context_keys[first:end],
                context_values[first:end],
                [key[low:high] for key in own_keys],
                [value[low:high] for value in own_values],
                visible,
            )
            for low, high, first, end, visible in chunks
        ]
        features = layer.finish(features, torch.cat(attended))
        yield features


def _chunks(pack: Pack, device: torch.device) -> list[tuple[int, int, int, int, Tensor]]:
    """(rows low, high, keys first, end, visible bool [rows, keys]) for each chunk of computed rows."""
    rows, start = pack.alignment.rows, pack.alignment.start
    pieces = []
    for low in range(0, len(rows), CHUNK_ROWS):
        at = rows[low : low + CHUNK_ROWS]
        first, end = int(start[at[0]]), int(at[-1]) + 1
        keys = np.arange(first, end)
        visible = (keys <= at[:, None]) & (keys >= start[at][:, None])
        pieces.append((low, low + len(at), first, end, torch.from_numpy(visible).to(device)))
    return pieces


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: list[Tensor], own_values: list[Tensor], visible: Tensor
) -> Tensor:
    """Softmax over the visible context and the row's own later keys together.

    Shapes: queries [r, Hq, D]; keys, values [n, Hk, D]; own keys and values [r, Hk, D] each; visible [r, n].
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
