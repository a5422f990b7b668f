"""The exported folder's form: config.json and the tensors that an engine builds from it.

Two things are left out on purpose. The embedding: SGLang always takes the target's, vLLM does where the folder has
none, and a copy could only differ. `target_hidden_size` and `num_aux_hidden_states`: both engines derive them, and
vLLM takes a null for a number.
"""

from typing import Any

from eyas import __version__
from eyas.drafter.eagle3 import DrafterConfig
from eyas.drafter.layer_ids import sglang_layer_ids, vllm_layer_ids
from eyas.target import Target

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Both engines read these; a drafter trained by Eyas feeds back the state before the norm and norms nothing else.
NORM_SWITCHES = ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm")
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


def engine_config(drafter: DrafterConfig, target: Target, *, dtype: str, sglang_version: str) -> dict[str, Any]:
    """config.json of the exported folder, for SGLang and vLLM alike.

    `rope_theta` and `rope_scaling` are the keys that every release reads (Transformers 5 makes `rope_parameters` of
    them). `draft_vocab_size` is a number also where the draft vocabulary is the target's whole one: null would make
    SGLang throw the trained lm_head away for the target's.

    Args:
        dtype: number type of the weights, as torch names it.
        sglang_version: release whose layer-id rule `eagle_config` follows; recorded there.
    """
    special = {key: target.text_config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "architectures": [ARCHITECTURE],
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
        "rope_theta": drafter.rope_theta,
        "rope_scaling": drafter.rope_scaling,
        "max_position_embeddings": drafter.max_position_embeddings,
        "vocab_size": drafter.vocab_size,
        "draft_vocab_size": drafter.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        **dict.fromkeys(NORM_SWITCHES, False),
        "eagle_aux_hidden_state_layer_ids": vllm_layer_ids(drafter.aux_layer_ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": sglang_layer_ids(
                drafter.aux_layer_ids, target.model_type, sglang_version, target.num_layers
            ),
            "use_aux_hidden_state": True,
            "sglang_version": sglang_version,
        },
        "eyas_version": __version__,
    } | {key: value for key, value in special.items() if value is not None}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, as the engines derive them from config.json.

    Raises: KeyError where config.json lacks a key (the check looks for those first).
    """
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, inner, drafts = config["head_dim"], config["intermediate_size"], config["draft_vocab_size"]
    aux = len(config["eagle_aux_hidden_state_layer_ids"])
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    return {f"{name}.weight": (hidden,) for name in norms} | {
        "fc.weight": (hidden, aux * hidden),
        "midlayer.self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (drafts, hidden),
        "d2t": (drafts,),
        "t2d": (config["vocab_size"],),
    }
