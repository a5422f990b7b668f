"""The training-time test: the drafter run on its own outputs, as it will be when it drafts.

At step 0 every row is a real position: features come from the target's aux states, and attention is causal within the
sample. At step k > 0 a row is the k-th draft made from position j: its feature is the row's own last output, its token
is t[j+1+k], and besides the step-0 keys of positions <= j it sees only the keys it made itself at steps 1..k, one
diagonal each. Rows that no step trains give step-0 keys and values and are not computed any further.

Source: EAGLE-3, arXiv:2503.01840, section 3; the diagonal form follows from its figure of the attention masks.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from eyas.drafter.attention import EagerAttention, FlashAttention
from eyas.drafter.eagle3 import Drafter, MidLayer
from eyas.drafter.fusing import fused_on_cuda
from eyas.drafter.pack import Pack


def unroll(drafter: Drafter, embedding: Tensor, pack: Pack, steps: int) -> Iterator[Tensor]:
    """Features after each step at the rows that some step trains.

    Args:
        embedding: the target's embedding [V, H], any float dtype; no gradient flows into it.
        steps: how many steps; the pack must have been aligned for at least as many.
    Yields: pre-norm features [R, H], R = len(pack.alignment.rows), in the pack's dtype.
    """
    layer = drafter.midlayer
    device, dtype, last = pack.aux.device, pack.aux.dtype, len(pack.token_ids) - 1
    rows = torch.from_numpy(pack.alignment.rows).to(device)
    # Past the end of a pack lie only rows that nothing trains; any token serves there.
    token_of = (rows[None] + 1 + torch.arange(steps, device=device)[:, None]).clamp(max=last)  # [steps, R]
    after = torch.arange(1, last + 2, device=device).clamp(
        max=last
    )  # the token that each position's row sees at step 0

    embed_query, embed_kv = _embed_half(layer, embedding[pack.token_ids].to(dtype))
    features = drafter.combine(pack.aux)
    cos, sin = drafter.rope(pack.positions, features)
    keys, values = _key_value(layer, features, cos, sin, embed_kv[after])
    attend: FlashAttention | EagerAttention
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        attend = FlashAttention(pack.alignment, device)
        keys, values = attend.context(keys, values)
    else:
        attend = EagerAttention(pack.alignment, device)
    features, positions = features[rows], pack.positions[rows]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for step in range(steps):
        cos, sin = drafter.rope(positions + step, features)
        if step > 0:
            features = drafter.feed_back(features)
            key, value = _key_value(layer, features, cos, sin, embed_kv[token_of[step]])
            own_keys.append(key)
            own_values.append(value)
        queries = _query(layer, features, cos, sin, embed_query[token_of[step]])
        features = _finish(layer, features, attend(queries, keys, values, own_keys, own_values))
        yield features


@fused_on_cuda
def _embed_half(layer: MidLayer, embeds: Tensor) -> tuple[Tensor, Tensor]:
    return layer.self_attn.embed_half(layer.input_layernorm(embeds))


@fused_on_cuda
def _key_value(
    layer: MidLayer, features: Tensor, cos: Tensor, sin: Tensor, embed_half: Tensor
) -> tuple[Tensor, Tensor]:
    return layer.self_attn.key_value(embed_half, layer.hidden_norm(features), cos, sin)


@fused_on_cuda
def _query(layer: MidLayer, features: Tensor, cos: Tensor, sin: Tensor, embed_half: Tensor) -> Tensor:
    return layer.self_attn.query(embed_half, layer.hidden_norm(features), cos, sin)


@fused_on_cuda
def _finish(layer: MidLayer, features: Tensor, attended: Tensor) -> Tensor:
    return layer.finish(features, attended)
