"""The exported folder's two forms, each written from one description of the drafter: its DrafterConfig.

    flat          one folder for SGLang and vLLM (`LlamaForCausalLMEagle3`)
    speculators   speculators' form, which vLLM serves by the folder alone (`vllm serve FOLDER`); SGLang has no reader

Left out of the flat form on purpose: the embedding, unless `export.embedding` asks for it (SGLang always takes the
target's, vLLM does where the folder has none and the target isn't cut into pipeline stages); `target_hidden_size` and
`num_aux_hidden_states` (both engines derive them, and vLLM takes a null for a number). Left out of both: d2t and t2d
where the draft vocabulary is the target's whole one (vLLM stops at a table that it has no parameter for). The
speculators form holds the embedding: speculators 0.9.0 drafts from unset memory where it is missing, and vLLM shares
the target's where it is equal.

Read: SGLang 0.5.11 to 0.5.23 llama_eagle3.py, vLLM 0.32.0 llama_eagle3.py and
transformers_utils/configs/speculators, speculators 0.9.0 models/eagle3.
"""

from typing import Any

import torch
from torch import Tensor

from eyas import __version__
from eyas.drafter.eagle3 import NORM_SWITCHES, Drafter, DrafterConfig
from eyas.drafter.layer_ids import sglang_layer_ids, sglang_release, vllm_layer_ids
from eyas.target import Target

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
# vLLM knows this name too, SGLang does not: a folder that only vLLM serves right is refused there, not served wrong.
VLLM_ARCHITECTURE = "Eagle3LlamaForCausalLM"
EMBEDDING = "embed_tokens.weight"
SPECULATORS_VERSION = "0.9.0"
# The first SGLang release that reads a norm switch; earlier ones serve the drafter without it, in silence.
_SGLANG_READS = {"fc_norm": (0, 5, 12), "norm_output": (0, 5, 12), "norm_before_fc": (0, 5, 17)}


def sglang_reads(switch: str, version: str) -> bool:
    """Whether that SGLang release heeds a norm switch of a drafter's config."""
    return switch in _SGLANG_READS and sglang_release(version) >= _SGLANG_READS[switch]


def flat_config(drafter: DrafterConfig, target: Target, *, dtype: str, sglang_version: str) -> dict[str, Any]:
    """config.json of the flat form.

    `rope_theta` and `rope_scaling` are the keys that every release reads (Transformers 5 makes `rope_parameters` of
    them). `draft_vocab_size` is a number also where the draft vocabulary is the target's whole one: null would make
    SGLang throw the trained lm_head away for the target's.

    Args:
        dtype: number type of the weights, as torch names it.
        sglang_version: release whose layer-id rule `eagle_config` follows; recorded there. "": not for SGLang.
    """
    special = {key: target.text_config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "architectures": [ARCHITECTURE if sglang_version else VLLM_ARCHITECTURE],
        **_layer(drafter),
        "rope_theta": drafter.rope_theta,
        "rope_scaling": drafter.rope_scaling,
        "draft_vocab_size": drafter.draft_vocab_size,
        "torch_dtype": dtype,
        **{switch: getattr(drafter, switch) for switch in NORM_SWITCHES},
        "eagle_aux_hidden_state_layer_ids": vllm_layer_ids(drafter.aux_layer_ids),
        "eagle_config": _eagle_config(drafter, target, sglang_version),
        "eyas_version": __version__,
    } | {key: value for key, value in special.items() if value is not None}


def speculators_config(drafter: DrafterConfig, target: Target, *, dtype: str, drafts: int) -> dict[str, Any]:
    """config.json of speculators' form. It has no top-level `model_type`: Transformers would look that up and stop.

    Args:
        dtype: number type of the weights, as torch names it.
        drafts: tokens drafted in a row when the folder is served without saying how many.
    """
    rope = {"rope_type": "default"} | (drafter.rope_scaling or {}) | {"rope_theta": drafter.rope_theta}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": drafter.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": vllm_layer_ids(drafter.aux_layer_ids),
        **{switch: getattr(drafter, switch) for switch in NORM_SWITCHES},
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": str(target.path), "architectures": [target.architecture]},
        },
        "transformer_layer_config": _layer(drafter) | {"rope_parameters": rope},
        "eyas_version": __version__,
    }


def _layer(drafter: DrafterConfig) -> dict[str, Any]:
    """The decoder layer, the same in both forms."""
    return {
        "model_type": "llama",
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": drafter.num_attention_heads,
        "num_key_value_heads": drafter.num_key_value_heads,
        "head_dim": drafter.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": drafter.rms_norm_eps,
        "max_position_embeddings": drafter.max_position_embeddings,
        "vocab_size": drafter.vocab_size,
        "tie_word_embeddings": False,
        "use_cache": True,
    } | (
        {"sliding_window": drafter.sliding_window, "layer_types": ["sliding_attention"]}
        if drafter.sliding_window
        else {}
    )


def _eagle_config(drafter: DrafterConfig, target: Target, sglang_version: str) -> dict[str, Any]:
    if not sglang_version:
        return {"use_aux_hidden_state": True}
    ids = sglang_layer_ids(drafter.aux_layer_ids, target.model_type, sglang_version, target.num_layers)
    return {
        "eagle_aux_hidden_state_layer_ids": ids,
        "use_aux_hidden_state": True,
        "sglang_version": sglang_version,
    }


def tensor_shapes(drafter: DrafterConfig, *, embedding: bool) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the folder, by our names."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in Drafter(drafter).state_dict().items()}
    if drafter.draft_vocab_size == drafter.vocab_size:
        shapes = {name: shape for name, shape in shapes.items() if name not in ("d2t", "t2d")}
    return shapes | ({EMBEDDING: (drafter.vocab_size, drafter.hidden_size)} if embedding else {})


def folder_tensors(
    tensors: dict[str, Tensor], drafter: DrafterConfig, dtype: torch.dtype, embedding: Tensor | None
) -> dict[str, Tensor]:
    """What is written, by our names: weights in the export's number type, tables as they are. Tensors that the drafter
    has no place for stay, so that the check names them."""
    shapes = tensor_shapes(drafter, embedding=False)
    kept = {name: tensor for name, tensor in tensors.items() if name in shapes or name not in ("d2t", "t2d")}
    if embedding is not None:
        kept[EMBEDDING] = embedding
    order = [name for name in (*shapes, EMBEDDING) if name in kept]
    order += sorted(kept.keys() - set(order))
    return {name: kept[name].to(dtype) if kept[name].is_floating_point() else kept[name] for name in order}


def file_name(name: str, form: str) -> str:
    """Our tensor name -> the form's."""
    return name.replace("midlayer.", "layers.0.", 1) if form == "speculators" else name
