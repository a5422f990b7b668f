"""The EAGLE-3 drafter: one decoder layer over the target's aux hidden states.

Source: EAGLE-3, arXiv:2503.01840; layout of `LlamaForCausalLMEagle3` as SGLang and vLLM load it.

    aux [.., 3H] --fc--> feature g            embedding of the next token e
    q, k, v read [input_layernorm(e), hidden_norm(g)], 2H wide
    h = g + o_proj(attention(q, k, v));  g' = h + mlp(post_attention_layernorm(h))
    logits over the draft vocabulary = lm_head(norm(g'));  g' (before the norm) is fed back as the next feature

Four switches change this; names, places and tensors are the engines' (vLLM 0.32.0 and SGLang 0.5.23, llama_eagle3.py):

    fc_norm                EAGLE-3.1: fc reads [fc_norm.i(aux i)], one norm for each aux layer
    norm_output            EAGLE-3.1: norm(g') is fed back
    norm_before_fc         fc reads input_norm(aux), one norm over all 3H
    norm_before_residual   h = hidden_norm(g) + o_proj(...)

Shapes: R rows, H hidden, Hq/Hk query/key-value heads, D head_dim, V target vocabulary, Vd draft vocabulary.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.drafter import ops
from eyas.drafter.ops import rotate, widen
from eyas.settings import Drafter as DrafterTable
from eyas.target import Target

NORM_SWITCHES = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
# Angles of these depend on a text's length: Transformers takes that of each call, SGLang and vLLM one length for all
# texts, from the config or a flag. A drafter turns by the plain angles, which are the same everywhere.
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter; `drafter.json` beside its weights.

    Attributes:
        hidden_size: H, equal to the target's (the drafter shares its embedding).
        rope_theta, rope_scaling, max_position_embeddings: the target's, so that long contexts work when served; no
            scaling where the target's is one of LENGTH_DEPENDENT_ROPES.
        aux_layer_ids: the layers it was trained on; id i = residual stream after i decoder layers.
        fc_norm, norm_output, norm_before_fc, norm_before_residual: see the module.
        sliding_window: a row at position p sees keys of positions > p - sliding_window, as engines count them: drafts
            stand on the positions after the newest known one. 0: all.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: list[int] = field(default_factory=list)
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    sliding_window: int = 0

    @classmethod
    def for_target(
        cls, target: Target, table: DrafterTable, draft_vocab_size: int, aux_layer_ids: list[int]
    ) -> "DrafterConfig":
        """The drafter that fits a target; the recipe's [drafter] table overrides widths and heads."""
        heads = table.num_attention_heads or target.num_attention_heads
        scaling = target.rope_scaling
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=table.intermediate_size or target.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=table.num_key_value_heads or min(target.num_key_value_heads, heads),
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            rope_theta=target.rope_theta,
            rope_scaling=None if scaling and scaling["rope_type"] in LENGTH_DEPENDENT_ROPES else scaling,
            max_position_embeddings=target.max_position_embeddings,
            vocab_size=target.vocab_size,
            draft_vocab_size=min(draft_vocab_size, target.vocab_size),
            aux_layer_ids=list(aux_layer_ids),
            **{switch: getattr(table, switch) for switch in NORM_SWITCHES},
            sliding_window=table.sliding_window,
        )

    def rope_config(self) -> LlamaConfig:
        """What Transformers' rotary embedding needs to know."""
        parameters = {"rope_type": "default"} | (self.rope_scaling or {}) | {"rope_theta": self.rope_theta}
        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=parameters,
        )


class Linear(nn.Linear):
    """A bias-free linear map; its fp32 master weight is cast to the input's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def cast(self, dtype: torch.dtype) -> Tensor:
        """The weight in a compute dtype."""
        return self.weight.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.cast(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32, returned in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Projections of the drafter's attention; the pattern over keys belongs to the caller (ttt.py, decoding)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = Linear(2 * config.hidden_size, self.heads * self.head_dim)
        self.k_proj = Linear(2 * config.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = Linear(2 * config.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size)

    def embed_half(self, normed_embeds: Tensor) -> tuple[Tensor, Tensor]:
        """What the embedding half [R, H] of the input adds to queries [R, Hq * D], keys and values [R, 2 * Hk * D].

        A token keeps its share whatever the step and row that read it, so it is projected once.
        """
        h, dtype = normed_embeds.shape[-1], normed_embeds.dtype
        key_value = torch.cat([self.k_proj.cast(dtype)[:, :h], self.v_proj.cast(dtype)[:, :h]])
        return F.linear(normed_embeds, self.q_proj.cast(dtype)[:, :h]), F.linear(normed_embeds, key_value)

    def query(self, embed_half: Tensor, normed_features: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [R, Hq, D] from both halves."""
        h = normed_features.shape[-1]
        projected = embed_half + F.linear(normed_features, self.q_proj.cast(normed_features.dtype)[:, h:])
        return rotate(projected.unflatten(-1, (self.heads, self.head_dim)), cos, sin)

    def key_value(self, embed_half: Tensor, normed_features: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, [R, Hk, D] each, from both halves."""
        h, dtype = normed_features.shape[-1], normed_features.dtype
        weight = torch.cat([self.k_proj.cast(dtype)[:, h:], self.v_proj.cast(dtype)[:, h:]])
        projected = embed_half + F.linear(normed_features, weight)
        keys, values = projected.unflatten(-1, (2 * self.kv_heads, self.head_dim)).chunk(2, dim=-2)
        return rotate(keys, cos, sin), values


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The one decoder layer. Its attention input is twice as wide: [norm(embedding), norm(feature)]."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.norm_before_residual = config.norm_before_residual

    def finish(self, features: Tensor, attended: Tensor) -> Tensor:
        """Attention output [R, Hq * D] and the features [R, H] it was made from -> the next ones [R, H] (pre-norm)."""
        residual = self.hidden_norm(features) if self.norm_before_residual else features
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Drafter(nn.Module):
    """EAGLE-3 drafter with fp32 master weights; activations have the dtype of the aux states it is given.

    Buffers: d2t int64 [Vd], an offset (target id = draft id + d2t[draft id]); t2d bool [V].
    The embedding is the target's, frozen, and not part of this module (both engines share the target's).

    Attributes:
        recompute: training makes the MLP's inner activations again in the backward instead of keeping them.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        aux_layers = len(config.aux_layer_ids)
        self.fc = Linear(aux_layers * config.hidden_size, config.hidden_size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(aux_layers))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(aux_layers * config.hidden_size, config.rms_norm_eps)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.rotary = LlamaRotaryEmbedding(config.rope_config())

    def initialise(self, seed: int) -> None:
        """Random weights N(0, 0.02) from a generator of their own, norms at one: equal seeds give equal drafters."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 [Vd], rising."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def rope(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for int64 positions [R], each [R, 1, D], in `like`'s dtype."""
        cos, sin = self.rotary(like, positions[None])
        return cos[0][:, None], sin[0][:, None]

    def combine(self, aux: Tensor) -> Tensor:
        """The target's aux states [.., 3H], layers side by side -> the features [.., H] of step 0."""
        return self.fc(self.fc_input(aux))

    def fc_input(self, aux: Tensor) -> Tensor:
        """Aux states as fc reads them, [.., 3H]."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            layers = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(layer) for norm, layer in zip(self.fc_norm, layers, strict=True)], dim=-1)
        return aux

    def feed_back(self, features: Tensor) -> Tensor:
        """What the next step takes as features, from this step's pre-norm ones."""
        return self.norm(features) if self.config.norm_output else features

    def logits(self, features: Tensor) -> Tensor:
        """Pre-norm features [R, H] -> logits over the draft vocabulary, fp32 [R, Vd]."""
        return widen(self.lm_head(self.norm(features)))
