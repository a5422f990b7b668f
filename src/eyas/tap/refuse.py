"""Engines and layouts in which collected states are wrong, or wouldn't all arrive."""

from typing import Any

from torch import nn

from .events import Refused
from .releases import SGLANG, Release

# SGLang's argument, what it must be, and what happens otherwise.
ARGUMENTS: tuple[tuple[str, Any, str], ...] = (
    ("pp_size", 1, "only the last pipeline rank's layers are collected"),
    ("dp_size", 1, "each replica and attention group would need a ring of its own"),
    ("attn_dp_size", 1, "each attention group would need a ring of its own"),
    ("attn_cp_size", 1, "the rows of a prompt are spread over ranks"),
    ("dcp_size", 1, "the rows of a prompt are spread over ranks"),
    ("enable_prefill_cp", False, "the rows of a prompt are spread over ranks"),
    ("enable_prefill_context_parallel", False, "the rows of a prompt are spread over ranks"),
    ("enable_nsa_prefill_context_parallel", False, "the rows of a prompt are spread over ranks"),
    ("enable_two_batch_overlap", False, "layers that run two half batches collect nothing"),
    ("enable_pdmux", False, "prefill is split by layers, in which nothing is collected"),
    ("enable_layernorm_sp", False, "final states reach the logits processor sharded over ranks"),
    ("enable_attn_tp_input_scattered", False, "states between layers are sharded over ranks"),
    ("speculative_algorithm", None, "the drafter's own auxiliary layers would take the place of Eyas's"),
)
# Where the MLP's all-reduce is moved into the next layer's norm, what is collected is one rank's partial sum. These
# collect after the sum in spite of that: those whose files never fuse (llama.py, qwen2.py, qwen3.py), Qwen's MoE models
# (since 0.5.5), and DeepSeek with its wrapper from 0.5.14 (PR #28343). From 0.5.21 all do (layer_boundary/stage.py).
_SUMMED = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"}
_SUMMED_FROM_14 = {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"}
_FUSION_OFF = "enforce_disable_flashinfer_allreduce_fusion"


def check_version(text: str) -> Release:
    """The version's first three numbers.

    Raises: Refused outside those whose hook points were read.
    """
    version = SGLANG.find(text)
    if version is None:
        raise Refused(f"SGLang {text}", str(SGLANG), "its hook points and layer ids are unknown")
    return version


def check_layout(server_args: Any, version: tuple[int, int, int], model: nn.Module) -> None:
    """Raises: Refused, naming the first argument under which states would be wrong."""
    for name, wanted, why in ARGUMENTS:
        value = argument(server_args, name, wanted)
        if isinstance(value, int | str) and value != wanted:  # None is "not set"
            raise Refused(f"SGLang runs with {name}={value!r}", f"{name}={wanted!r}", why)
    if version >= (0, 5, 21) or argument(server_args, "tp_size", 1) == 1:
        return
    fused = argument(server_args, "enable_aiter_allreduce_fusion", False)
    own = type(model).__name__
    summed = own in _SUMMED or (version >= (0, 5, 14) and own in _SUMMED_FROM_14)
    if fused or not (summed or argument(server_args, _FUSION_OFF, False)):
        raise Refused(
            f"tensor parallel {own} in SGLang {'.'.join(map(str, version))}, all-reduce fusion not switched off",
            f"--{_FUSION_OFF.replace('_', '-')}, and no --enable-aiter-allreduce-fusion",
            "what it collects are partial sums of one rank, for batches of up to 2,048 tokens",
        )


def argument(server_args: Any, name: str, absent: Any) -> Any:
    """What SGLang made of an argument; `absent` where this version has none of that name.

    From 0.5.17 decisions are kept beside the record, the last one counts (0.5.23 model_override_base.py:104).
    """
    for _, decided in reversed(getattr(server_args, "_resolved_overrides", None) or ()):
        if name in decided:
            return decided[name]
    return getattr(server_args, name, absent)
