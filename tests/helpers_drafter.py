"""Small drafters, random stored samples, and the naive forms that fast paths are compared with."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eyas.drafter.eagle3 import Drafter, DrafterConfig, rotate
from eyas.drafter.vocab import to_d2t, to_t2d


@dataclass(frozen=True)
class Sample:
    """A stored sample as the reader gives it."""

    id: str
    token_ids: Tensor
    loss_mask: Tensor
    aux_hidden_states: Tensor
    final_hidden_states: Tensor


def make_drafter(
    *, seed: int = 0, vocab: int = 40, draft: int = 24, hidden: int = 16, heads: int = 4, kv: int = 2, **switches: int
) -> Drafter:
    """A drafter in fp64 with weights large enough that every path matters; switches as DrafterConfig has them."""
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=hidden // heads,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=512,
        vocab_size=vocab,
        draft_vocab_size=draft,
        aux_layer_ids=[2, 4, 5],
        **switches,
    )
    drafter = Drafter(config)
    drafter.initialise(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(10.0) if parameter.dim() == 2 else parameter.add_(
                0.2 * torch.randn(parameter.shape, generator=generator)
            )
    ids = np.sort(np.random.default_rng(seed).choice(vocab, draft, replace=False))
    drafter.d2t.copy_(torch.from_numpy(to_d2t(ids)))
    drafter.t2d.copy_(torch.from_numpy(to_t2d(ids, vocab)))
    return drafter.double()


def make_samples(masks: list[list[int]], *, vocab: int = 40, hidden: int = 16, seed: int = 0) -> list[Sample]:
    """Samples with these loss masks and random tokens and states, fp64."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for number, mask in enumerate(masks):
        length, supervised = len(mask), sum(mask)
        samples.append(
            Sample(
                id=f"{number:032x}",
                token_ids=torch.randint(vocab, (length,), generator=generator, dtype=torch.int32),
                loss_mask=torch.tensor(mask, dtype=torch.bool),
                aux_hidden_states=torch.randn(length, 3, hidden, generator=generator, dtype=torch.float64),
                final_hidden_states=torch.randn(supervised, hidden, generator=generator, dtype=torch.float64),
            )
        )
    return samples


def naive_feature(drafter: Drafter, embedding: Tensor, sample: Sample, row: int, step: int) -> Tensor:
    """The feature g after `step` of the training-time test at one row, written as the paper tells it: one vector at a
    time, no batch, no packing; token and position of every key spelled out."""
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    groups = attention.heads // attention.kv_heads
    switches = drafter.config

    def combine(aux: Tensor) -> Tensor:
        if switches.norm_before_fc:
            aux = drafter.input_norm(aux.flatten()).view_as(aux)
        if switches.fc_norm:
            aux = torch.stack([norm(layer_states) for norm, layer_states in zip(drafter.fc_norm, aux, strict=True)])
        return drafter.fc(aux.flatten())

    def finish(feature: Tensor, attended: Tensor) -> Tensor:
        residual = layer.hidden_norm(feature) if switches.norm_before_residual else feature
        hidden = residual + attention.o_proj(attended)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def project(feature: Tensor, token: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.cat([layer.input_layernorm(embedding[token][None]), layer.hidden_norm(feature[None])], dim=-1)
        cos, sin = drafter.rope(torch.tensor([position]), feature[None])
        q = rotate(attention.q_proj(x).view(1, attention.heads, -1), cos, sin)[0]
        k = rotate(attention.k_proj(x).view(1, attention.kv_heads, -1), cos, sin)[0]
        return q, k, attention.v_proj(x).view(attention.kv_heads, -1)

    def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """keys and values: of positions 0, 1 and so on; the newest is the query's own."""
        first = max(0, len(keys) - switches.sliding_window) if switches.sliding_window else 0
        heads = []
        for head in range(attention.heads):
            kv = head // groups
            scores = torch.stack([q[head] @ key[kv] for key in keys[first:]]) / q.shape[-1] ** 0.5
            heads.append(sum(w * value[kv] for w, value in zip(scores.softmax(0), values[first:], strict=True)))
        return torch.cat(heads)

    keys, values = [], []
    for position in range(row + 1):
        feature = combine(sample.aux_hidden_states[position])
        q, k, v = project(feature, sample.token_ids[position + 1].long(), position)
        keys.append(k)
        values.append(v)
    feature = finish(feature, attend(q, keys, values))
    for later in range(1, step + 1):
        feature = drafter.norm(feature) if switches.norm_output else feature
        q, k, v = project(feature, sample.token_ids[row + 1 + later].long(), row + later)
        keys.append(k)
        values.append(v)
        feature = finish(feature, attend(q, keys, values))
    return feature


def naive_loss(
    drafter: Drafter, embedding: Tensor, lm_head: Tensor, samples: list[Sample], *, steps: int, decay: float
) -> Tensor:
    """sum_k decay^k * sum_rows CE, row by row."""
    draft_ids = drafter.draft_ids
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        mask, length = sample.loss_mask.tolist(), len(sample.token_ids)
        final_at = np.cumsum(mask) - 1
        for row in range(length):
            for k in range(steps):
                if row + 2 + k >= length or not (mask[row + 1 + k] and mask[row + 2 + k]):
                    continue
                target_logits = lm_head @ sample.final_hidden_states[final_at[row + 1 + k]]
                if not drafter.t2d[target_logits.argmax()]:
                    continue
                probs = target_logits[draft_ids].softmax(0)
                feature = naive_feature(drafter, embedding, sample, row, k)
                logits = drafter.lm_head(drafter.norm(feature))
                total = total + decay**k * -(probs * logits.log_softmax(0)).sum()
    return total
