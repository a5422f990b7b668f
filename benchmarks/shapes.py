"""Targets of a known shape with random weights, and token sets for them: throughput needs no trained model."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from eyas.data.tokens import Sample, TokensWriter, sample_id
from eyas.record import Record, save_record
from eyas.run import Run
from eyas.target import load_target

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128009,
}
_LAYERS_PER_FILE = 8


def write_llama(folder: Path, config: dict[str, object], device: str = "cuda") -> None:
    """A Llama folder in Transformers' layout: seeded weights from N(0, 0.02), norms of one, bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    generator = torch.Generator(device=device).manual_seed(0)
    layers = int(str(config["num_hidden_layers"]))
    groups = [range(first, min(first + _LAYERS_PER_FILE, layers)) for first in range(0, layers, _LAYERS_PER_FILE)]
    weight_map: dict[str, str] = {}
    for number, group in enumerate([None, *groups]):
        shapes = _ends(config) if group is None else {k: v for layer in group for k, v in _layer(config, layer).items()}
        tensors = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator).cpu()
            for name, shape in shapes.items()
        }
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def _ends(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = int(str(config["hidden_size"])), int(str(config["vocab_size"]))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    return shapes | ({} if config["tie_word_embeddings"] else {"lm_head.weight": (vocab, hidden)})


def _layer(config: dict[str, object], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, wide = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
    heads, kv_heads, head_dim = (
        int(str(config[key])) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}


def write_tokens(run: Run, samples: int, tokens: int, supervised: float) -> None:
    """Finish the prepare stage with `samples` random samples of `tokens` tokens, the end of each supervised."""
    target, rng = load_target(run.recipe.target), np.random.default_rng(0)
    mask = np.arange(tokens) >= round(tokens * (1 - supervised))
    facts = {"tokenizer_digest": target.tokenizer_digest, "template_digest": "", "vocab_size": target.vocab_size}
    with TokensWriter(run.tokens_dir) as writer:
        for _ in range(samples):
            ids = rng.integers(0, target.vocab_size, tokens).astype(np.int32)
            writer.add(Sample(sample_id(ids, mask), "random", "train", ids, mask))
        manifest = writer.finish(facts)
    save_record(run.dir, Record("prepare", {}, manifest["digest"], {}, 0.0))
