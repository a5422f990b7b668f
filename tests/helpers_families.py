"""Tiny random models of every supported family, as Transformers saves them."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
}
MOE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 8}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "mistral-sliding": ("mistral", {"head_dim": 8, "sliding_window": 8}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe-mixed": ("qwen3_moe", MOE | {"mlp_only_layers": [4], "decoder_sparse_step": 2}),
    "deepseek_v2": ("deepseek_v2", MLA | {"n_group": 2, "topk_group": 1, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", MLA),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_scaling": None},
    ),
}


def make_family(folder: Path, name: str) -> Any:
    """A random model of that family, saved; returns the whole model."""
    kind, changes = FAMILIES[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**(SHAPE | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
