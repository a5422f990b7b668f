"""EAGLE-3 drafters in the forms that people publish: their shape, and the names of their tensors.

    flat          config.json of SGLang and vLLM (LlamaForCausalLMEagle3), tensors `midlayer.*` or `layers.0.*`
    speculators   config.json with `speculators_model_type`, tensors `layers.0.*`, `embed_tokens`, `d2t`, `t2d`
    checkpoint    drafter.json of Eyas

Layer ids of a flat folder: the top-level ones are vLLM's, whose meaning is ours; those in `eagle_config` alone are read
as SGLang's; without any, both engines capture [2, n//2, n-3].

Read: vLLM 0.32.0 llama_eagle3.py and transformers_utils/configs/speculators/algos.py, SGLang 0.5.23 llama_eagle3.py
(its legacy names too), speculators 0.9.0 models/eagle3.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas import fs
from eyas.drafter.eagle3 import LENGTH_DEPENDENT_ROPES, NORM_SWITCHES, DrafterConfig
from eyas.drafter.layer_ids import sglang_captures
from eyas.errors import ExportError, TrainError
from eyas.tap.releases import SGLANG
from eyas.target import Target, named_rope

_RENAMED = (
    (r"^model\.", ""),
    (r"^layers\.0\.", "midlayer."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)
# What a config may say that this drafter has no place for, and the value that it must have.
_FIXED = {"num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


@dataclass(frozen=True)
class Published:
    """A drafter's folder as its config describes it.

    Attributes:
        form: "flat", "speculators" or "checkpoint".
        faults: parts that this drafter has no place for, a line each.
        notes: readings that a user should know of, a line each.
    """

    folder: Path
    form: str
    config: DrafterConfig
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in the file, tensor), one in memory at a time."""
        files = _weight_files(self.folder)
        for path in sorted(set(files.values())):
            with _open(path) as handle:
                for name in handle.keys():  # noqa: SIM118
                    yield name, handle.get_tensor(name)


def canonical(name: str) -> str:
    """A published tensor's name -> ours."""
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def folder_digest(folder: Path) -> str:
    """Identity of a drafter's folder: config and weights. Raises TrainError where they are missing."""
    return fs.digest_files([_config_path(folder), *sorted(set(_weight_files(folder).values()))])


def read_published(folder: Path, target: Target) -> Published:
    """A folder's form and shape; no weights are loaded.

    Args:
        target: what it drafts for: engines derive layers that a config doesn't name from it.
    Raises: TrainError where it is no drafter's folder.
    """
    path = _config_path(folder)
    raw = _read_json(path)
    try:
        if path.name == "drafter.json":
            return Published(folder, "checkpoint", DrafterConfig(**raw))
        if "speculators_model_type" in raw:
            return _speculators(folder, raw, target)
        config, notes = _flat(raw, target)
        return Published(folder, "flat", config, _faults(raw), notes)
    except (KeyError, TypeError, ValueError) as error:
        raise TrainError(f"{path}: not the config of an EAGLE-3 drafter: {error!r}", next="mend train.start") from None


def _speculators(folder: Path, raw: dict[str, Any], target: Target) -> Published:
    """As vLLM reads it: the layer's config with the drafter's own keys on top."""
    if raw["speculators_model_type"] != "eagle3":
        raise ValueError(f"speculators_model_type {raw['speculators_model_type']!r} is not 'eagle3'")
    layer = dict(raw["transformer_layer_config"])
    own = {key: raw.get(key) for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
    # vLLM takes a missing norm_before_residual for true in this form.
    switches = {switch: raw.get(switch, switch == "norm_before_residual") for switch in NORM_SWITCHES}
    config, notes = _flat(layer | own | switches, target)
    return Published(folder, "speculators", config, _faults(layer), notes)


def _flat(keys: dict[str, Any], target: Target) -> tuple[DrafterConfig, list[str]]:
    """Shape by a flat config's keys; a key that is left out is what engines take it for."""
    rope = dict(keys.get("rope_parameters") or {}) | dict(keys.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or keys.get("rope_theta") or 10000.0
    heads, eagle = keys["num_attention_heads"], keys.get("eagle_config") or {}
    ids, notes = _layer_ids(keys, target)
    scaling = named_rope(rope)
    if scaling and scaling["rope_type"] in LENGTH_DEPENDENT_ROPES:
        notes.append(
            f"its rope, {scaling['rope_type']}, turns by a text's length, which engines count otherwise than here"
        )
    config = DrafterConfig(
        hidden_size=keys["hidden_size"],
        intermediate_size=keys["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=keys.get("num_key_value_heads") or heads,
        head_dim=keys.get("head_dim") or keys["hidden_size"] // heads,
        rms_norm_eps=float(keys.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        rope_scaling=scaling,
        max_position_embeddings=keys.get("max_position_embeddings", 2048),
        vocab_size=keys["vocab_size"],
        draft_vocab_size=keys.get("draft_vocab_size") or keys["vocab_size"],
        aux_layer_ids=ids,
        **{switch: bool(keys.get(switch) or eagle.get(switch)) for switch in NORM_SWITCHES},
        sliding_window=sliding_window(keys),
    )
    return config, notes


def sliding_window(keys: dict[str, Any]) -> int:
    """The window that vLLM serves a drafter with, by its layer's keys; 0: none. SGLang 0.5.23 reads none of them: it
    takes a window from its command line alone (--speculative-draft-window-size)."""
    if (keys.get("layer_types") or ["full_attention"])[0] != "sliding_attention":
        return 0
    return int(keys.get("sliding_window") or 0)


def _layer_ids(keys: dict[str, Any], target: Target) -> tuple[list[int], list[str]]:
    """Aux layers in our meaning, and a note where the folder could be read otherwise."""
    if keys.get("eagle_aux_hidden_state_layer_ids"):
        return list(keys["eagle_aux_hidden_state_layer_ids"]), []
    eagle = keys.get("eagle_config") or {}
    nested = eagle.get("eagle_aux_hidden_state_layer_ids")
    if not nested:
        ids = target.default_aux_layer_ids()
        return ids, [f"its config names no aux layers: {ids}, which both engines capture then, are taken"]
    version = str(eagle.get("sglang_version") or ".".join(map(str, SGLANG.newest)))
    try:
        ids = sglang_captures(nested, target.model_type, version, target.num_layers)
    except ExportError as error:
        raise TrainError(error.seen, expected=error.expected, cause=error.cause) from None
    note = (
        f"its aux layers {nested} stand in eagle_config only: read as SGLang {version}'s they are {ids} in our ids; if "
        f'it was made for vLLM, put "eagle_aux_hidden_state_layer_ids": {nested} at the top of its config.json'
    )
    return ids, [note]


def _faults(keys: dict[str, Any]) -> list[str]:
    return [
        f"{key} is {keys[key]!r}; this drafter has {value!r}"
        for key, value in _FIXED.items()
        if keys.get(key, value) not in (value, None)
    ]


def _config_path(folder: Path) -> Path:
    for name in ("drafter.json", "config.json"):
        if (folder / name).is_file():
            return folder / name
    raise TrainError(
        f"{folder}: neither config.json nor drafter.json",
        expected="the folder of an EAGLE-3 drafter in SGLang's or speculators' form, or a checkpoint of Eyas",
        next="mend train.start",
    )


def _weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in _read_json(index)["weight_map"].items()}
    with _open(folder / "model.safetensors") as handle:
        return dict.fromkeys(handle.keys(), folder / "model.safetensors")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise TrainError(
            f"{path}: missing",
            expected="weights in safetensors form (pickled .bin files are not read)",
            next=f"convert the weights in {path.parent} with safetensors.torch.save_file",
        ) from None
    except SafetensorError as error:
        raise TrainError(
            f"{path}: not a whole safetensors file ({error})", cause="a cut download", next="fetch it again"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise TrainError(f"{path}: not valid JSON: {error}", cause="a cut download", next="fetch it again") from None
