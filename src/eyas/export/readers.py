"""What each engine makes of a folder: its keys and tensor names as that engine's loader takes them.

Engines are lenient where it hurts. SGLang skips tensors whose name it doesn't know, leaves parameters that it didn't
find at random, and takes no notice of switches that a later release brought. vLLM stops at unknown names but leaves
missing parameters at random too. Both trust the folder's rope and context length.

Read: SGLang 0.5.23 models/llama_eagle3.py (LlamaForCausalLMEagle3.load_weights, LlamaModel.__init__) and
model_executor/model_runner_components/spec_aux_hidden_state.py; vLLM 0.32.0 model_executor/models/llama_eagle3.py,
v1/worker/gpu_model_runner.py and v1/worker/gpu/spec_decode/eagle/eagle3_utils.py (layer ids: the top-level key goes
first), transformers_utils/configs/speculators/algos.py.
"""

import re
from dataclasses import dataclass
from typing import Any

from eyas.drafter.eagle3 import NORM_SWITCHES
from eyas.drafter.layer_ids import sglang_captures
from eyas.drafter.published import sliding_window
from eyas.export.form import ARCHITECTURE, VLLM_ARCHITECTURE, sglang_reads
from eyas.target import Target

_SGLANG_LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


@dataclass(frozen=True)
class Reading:
    """A folder as one engine reads it.

    Attributes:
        engine: its name, with the release where the rules go by it.
        architectures: names that it serves an EAGLE-3 Llama drafter under.
        keys: the drafter's keys, flat.
        switches: norm switch -> whether it is heeded and on.
        captures: aux layers that it would capture, in our meaning; None: its own default.
        window: sliding window that it would attend in; 0: none.
        stops_at_unknown: whether a tensor that it doesn't know stops it (else it is skipped in silence).
    """

    engine: str
    architectures: tuple[str, ...]
    keys: dict[str, Any]
    switches: dict[str, bool]
    captures: list[int] | None
    window: int
    stops_at_unknown: bool

    def parameter(self, name: str) -> str:
        """A tensor's name in the file -> ours, as this engine maps it; unchanged where it knows no such name."""
        name = name.replace("layers.0.", "midlayer.")
        if not self.stops_at_unknown:
            name = re.sub(r"^model\.", "", name)
            for legacy, ours in _SGLANG_LEGACY.items():
                name = name.replace(legacy, ours)
        return name


def read_as_vllm(config: dict[str, Any]) -> Reading:
    """vLLM's view of either form."""
    keys = dict(config)
    architectures: tuple[str, ...] = (ARCHITECTURE, VLLM_ARCHITECTURE)
    defaults = dict.fromkeys(NORM_SWITCHES, False)
    if "speculators_model_type" in config:
        own = (
            "draft_vocab_size",
            "eagle_aux_hidden_state_layer_ids",
            "architectures",
            "tie_word_embeddings",
            *NORM_SWITCHES,
        )
        keys = dict(config.get("transformer_layer_config") or {}) | {key: config[key] for key in own if key in config}
        architectures = ("Eagle3DraftModel",)
        defaults["norm_before_residual"] = True
    eagle = keys.get("eagle_config") or {}
    switches = {switch: bool(keys.get(switch, default)) for switch, default in defaults.items()}
    switches["norm_before_fc"] = bool(eagle.get("norm_before_fc", switches["norm_before_fc"]))
    captures = keys.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    return Reading("vLLM", architectures, keys, switches, captures, sliding_window(keys), stops_at_unknown=True)


def read_as_sglang(config: dict[str, Any], target: Target, version: str) -> Reading:
    """SGLang's view of the flat form. Raises ExportError for a release or target whose rules aren't known."""
    eagle = config.get("eagle_config") or {}
    on = {switch: bool(config.get(switch)) for switch in NORM_SWITCHES}
    on["fc_norm"] = on["fc_norm"] or bool(config.get("use_aux_norm"))
    on["norm_before_fc"] = bool(eagle.get("norm_before_fc", on["norm_before_fc"]))
    switches = {switch: value and sglang_reads(switch, version) for switch, value in on.items()}
    nested = eagle.get("eagle_aux_hidden_state_layer_ids")
    captures = sglang_captures(nested, target.model_type, version, target.num_layers) if nested else None
    return Reading(f"SGLang {version}", (ARCHITECTURE,), dict(config), switches, captures, 0, stops_at_unknown=False)
