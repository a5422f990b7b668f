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
from torch.utils.checkpoint import checkpoint

from eyas.drafter.attention import OwnEntries
from eyas.drafter.eagle3 import Drafter
from eyas.drafter.ops import Heads, Picked, TokenShare, add_norm, add_norms, norm, silu_mul, take_rows, to_heads
from eyas.drafter.pack import Pack
from eyas.drafter.weights import SharedWeight, linear


def unroll(drafter: Drafter, embedding: Tensor, pack: Pack, steps: int) -> Iterator[Tensor]:
    """What lm_head reads at the rows that are trained at each step.

    Args:
        embedding: the target's embedding [V, H], any float dtype; no gradient flows into it.
        steps: how many steps; the pack must have been aligned for at least as many.
    Yields: features after the last norm [n, H] in the pack's dtype, n = len(pack.alignment.steps[k].row).
    """
    layer, index = _Layer(drafter, pack.aux.dtype), pack.index
    share = layer.share(embedding[pack.token_ids].to(pack.aux.dtype))
    features = linear(drafter.fc_input(pack.aux), SharedWeight([drafter.fc.weight], pack.aux.dtype))
    normed = layer.norm_feature(features)
    keys, values = layer.context(normed, share, drafter.rope(pack.positions, features))
    keys, values = index.attention.context(keys, values)

    features, normed = take_rows(features, index.rows), take_rows(normed, index.rows)
    step_positions = pack.positions[index.rows] + torch.arange(steps, device=features.device)[:, None]
    cos, sin = (angle.unflatten(0, (steps, -1)) for angle in drafter.rope(step_positions.flatten(), features))
    own = OwnEntries(steps, len(features), layer.heads.keys, layer.heads.dim, features)
    for step in range(steps):
        queries = layer.queries(normed, share, index.rows, step, (cos[step], sin[step]), own)
        attended = index.attention(queries, keys, values, own, drafter.config.sliding_window)
        features, normed, picked = layer.finish(features, normed, attended, index.steps[step].picked, step == steps - 1)
        yield picked


class _Layer:
    """The drafter's layer over one pack: its weights cast once, and its forward cut where rows meet the context."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype) -> None:
        layer = drafter.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self.heads = Heads(attention.heads, attention.kv_heads, attention.head_dim)
        self.config, self.last_norm, self.layer, self.eps = drafter.config, drafter.norm, layer, drafter.norm.eps
        # Columns before the split read the embedding, those after it the feature.
        projections = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        self.qkv = SharedWeight(projections, dtype, split=self.config.hidden_size)
        self.out = SharedWeight([attention.o_proj.weight], dtype)
        self.gate_up = SharedWeight([mlp.gate_proj.weight, mlp.up_proj.weight], dtype)
        self.down = SharedWeight([mlp.down_proj.weight], dtype)
        # The MLP's inner activations are 3/5 of all that a step keeps (8B shape: 86 of 140 kB a row).
        self.recompute = drafter.recompute and torch.is_grad_enabled()
        self.query_width = self.heads.queries * self.heads.dim

    def share(self, embeds: Tensor) -> TokenShare:
        """A token adds the same to queries, keys and values whatever the step and row that read it."""
        return TokenShare(linear(norm(embeds, self.layer.input_layernorm.weight, self.eps), self.qkv, part=0))

    def norm_feature(self, features: Tensor) -> Tensor:
        return norm(features, self.layer.hidden_norm.weight, self.eps)

    def context(self, normed: Tensor, share: TokenShare, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Step-0 keys and values of all positions, [S, Hk, D]; position j has read token t[j+1]."""
        heads, first = Heads(0, self.heads.keys, self.heads.dim), self.query_width
        projected = linear(normed, self.qkv, part=1, rows=slice(first, None))
        _, keys, values = to_heads(projected, heads, share, first, None, 1, angles)
        return keys, values

    def queries(
        self, normed: Tensor, share: TokenShare, rows: Tensor, step: int, angles: tuple[Tensor, Tensor], own: OwnEntries
    ) -> Tensor:
        """Queries of the computed rows [R, Hq, D]; from step 1 on, keys and values too, which go to their own."""
        if step == 0:
            projected = linear(normed, self.qkv, part=1, rows=slice(self.query_width))
            return to_heads(projected, Heads(self.heads.queries, 0, self.heads.dim), share, 0, rows, 1, angles)[0]
        projected = linear(normed, self.qkv, part=1)
        queries, keys, values = to_heads(projected, self.heads, share, 0, rows, 1 + step, angles, (None, *own.place()))
        own.append(keys, values)
        return queries

    def _mlp(self, x: Tensor) -> Tensor:
        return linear(silu_mul(linear(x, self.gate_up)), self.down)

    def finish(
        self, features: Tensor, normed: Tensor, attended: Tensor, picked: Picked, last: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The next step's features and their norm [R, H], and what lm_head reads of the picked rows."""
        residual = normed if self.config.norm_before_residual else features
        hidden, mlp_input = add_norm(
            residual, linear(attended, self.out), self.layer.post_attention_layernorm.weight, self.eps
        )
        added = checkpoint(self._mlp, mlp_input, use_reentrant=False) if self.recompute else self._mlp(mlp_input)
        if self.config.norm_output:
            _, features = add_norm(hidden, added, self.last_norm.weight, self.eps)
            return features, self.norm_feature(features), take_rows(features, picked.rows)
        weight = None if last else self.layer.hidden_norm.weight
        features, next_normed, of_picked = add_norms(hidden, added, weight, self.last_norm.weight, picked, self.eps)
        return features, normed if next_normed is None else next_normed, of_picked
