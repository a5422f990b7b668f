"""Which layers a model collects its auxiliary states from: set, and read back.

Eyas's id i is the residual stream after i decoder layers, which is what *enters* SGLang's layer i (0-based). SGLang's
models keep exactly these numbers in `layers_to_capture`, and every one collects before it runs the layer; what differs
is what their setters make of what they are given (read in 0.5.11 to 0.5.23, `sglang/srt/models/`):

- `set_eagle3_layers_to_capture(ids)` adds 1 (llama.py, qwen2.py, qwen3.py, qwen2_moe.py, qwen3_moe.py and others);
- in deepseek_v2.py (which kimi_k25.py asks) and glm4_moe_lite.py it adds 1 up to 0.5.12, from 0.5.13 only where ids[0]
  is 1; in gpt_oss.py from 0.5.17 it adds nothing where max(ids) is the number of layers;
- `set_dflash_layers_to_capture(ids)` adds 1 in these four, in all versions, so they are set through it;
- in a few others it adds nothing (0.5.23: beam.py, muse_glimmer.py) or keeps its numbers elsewhere (inkling.py): what
  is read back differs there, and the tap refuses.

qwen2_moe.py, qwen3_moe.py and their kin also mark the layers themselves (`_is_layer_to_capture`) and never take a mark
back: a setter is called once.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from .block import AUX_LAYERS
from .events import Refused

_EAGLE3, _DFLASH = "set_eagle3_layers_to_capture", "set_dflash_layers_to_capture"
_SET_BY_DFLASH = {
    "DeepseekV2ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "KimiK25ForConditionalGeneration",
}
# What they collect isn't the stream (SGLang PR #39286, open at 0.5.23).
_WRONG = ("Gemma3", "Gemma4")


class SetLayers(NamedTuple):
    """What was done: the setter's name, what it was given, and what the model holds since."""

    setter: str
    passed: list[int]
    read: list[int]


def set_layers(model: nn.Module, ids: Sequence[int]) -> SetLayers:
    """Have a model collect the streams that enter layers `ids`; must come before CUDA graphs are captured.

    Raises: Refused for models without a setter, and where what is read back are other layers.
    """
    _check_ids(ids)
    names = class_names(model)
    wrong = [name for name in names if name.startswith(_WRONG)]
    if wrong:
        raise Refused(f"model {wrong[0]}", "a model whose collected states are right", "SGLang PR #39286 is open")
    order = (_DFLASH, _EAGLE3) if names & _SET_BY_DFLASH else (_EAGLE3, _DFLASH)
    setter = next((name for name in order if hasattr(model, name)), "")
    if not setter:
        raise Refused(
            f"model {type(model).__name__} has neither {_EAGLE3} nor {_DFLASH}",
            "a model that can collect auxiliary states",
            "this version of SGLang doesn't support EAGLE-3 for it",
        )
    passed = [layer - 1 for layer in ids]
    getattr(model, setter)(list(passed))
    return SetLayers(setter, passed, read_back(model, ids))


def read_back(model: nn.Module, ids: Sequence[int]) -> list[int]:
    """The layers that a model collects at, which must be `ids`.

    Raises: Refused where they are others, or differ between its parts.
    """
    held = {name: module for name, module in model.named_modules() if module.__dict__.get("layers_to_capture")}
    found = {name: sorted(module.__dict__["layers_to_capture"]) for name, module in held.items()}
    marked = sorted(
        int(name.rpartition(".")[2])
        for name, module in model.named_modules()
        if getattr(module, "_is_layer_to_capture", False)
    )
    if not found or any(layers != list(ids) for layers in found.values()) or (marked and marked != list(ids)):
        raise Refused(
            f"model {type(model).__name__} collects at {found}, its layers are marked {marked}",
            f"the streams that enter layers {list(ids)}",
            "its setter counts layers in another way than those that Eyas knows",
        )
    return list(ids)


def class_names(model: nn.Module) -> set[str]:
    """Names of the model's class and of those it is made from, and those of the language model that it wraps."""
    parts = (model, getattr(model, "language_model", None))
    return {kind.__name__ for part in parts if part is not None for kind in type(part).__mro__}


def _check_ids(ids: Sequence[int]) -> None:
    if len(ids) != AUX_LAYERS or list(ids) != sorted(set(ids)) or min(ids) < 0:
        raise Refused(f"aux_layer_ids {list(ids)}", f"{AUX_LAYERS} ids, rising, none below 0", "a fault of Eyas")
