"""Check an exported folder the way the engines' loaders read it, and name each mismatch before a server hides it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.drafter.eagle3 import DrafterConfig
from eyas.drafter.vocab import check_vocabulary
from eyas.errors import ExportError
from eyas.export.form import CONFIG_FILE, EMBEDDING, WEIGHTS_FILE, tensor_shapes
from eyas.export.readers import Reading, read_as_sglang, read_as_vllm
from eyas.target import Target

_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "draft_vocab_size", "max_position_embeddings", "num_hidden_layers"),
)
_FOR_VLLM = ': export.sglang_version = "" writes a folder for vLLM alone'


def check_folder(
    folder: Path,
    target: Target,
    drafter: DrafterConfig,
    aux_layer_ids: Sequence[int],
    *,
    embedding: Tensor | None = None,
    for_sglang: bool = True,
    sglang_version: str = "",
) -> list[str]:
    """Everything in an exported folder that would make an engine refuse it or serve another drafter than was trained.

    Args:
        target: the model it drafts for.
        drafter: the shape that was trained.
        aux_layer_ids: the layers that were captured, from the store's manifest, in our meaning.
        embedding: the target's, where the folder has to hold it.
        for_sglang: whether a flat folder has to serve in SGLang, not in vLLM alone.
        sglang_version: release of the SGLang that is to serve it; "": the one that a flat folder says it is for.
    Returns: one line for each mismatch: what was seen, what was expected; empty where there is none.
    """
    config = _read_config(folder)
    if isinstance(config, str):
        return [config]
    if sglang_version and "speculators_model_type" in config:
        return [f'config.json: speculators\' form, which SGLang {sglang_version} has no reader for; expected "flat"']
    readings = [read_as_vllm(config)]
    faults = _check_sizes(readings[0].keys)
    if faults:
        return faults
    if for_sglang and "speculators_model_type" not in config:
        sglang = _sglang_reading(config, target, sglang_version)
        if isinstance(sglang, str):
            faults.append(sglang)
        else:
            readings.append(sglang)
    faults += _check_keys(readings, target, drafter)
    for reading in readings:
        faults += _check_switches(reading, drafter) + _check_window(reading, drafter)
        faults += _check_layer_ids(reading, target, list(aux_layer_ids))
    dtype = str(config.get("torch_dtype") or config.get("dtype"))
    return faults + _check_tensors(folder, readings, drafter, dtype, embedding)


def _read_config(folder: Path) -> dict[str, Any] | str:
    """config.json, or the one fault that keeps everything else from being checked."""
    path = folder / CONFIG_FILE
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return f"{path}: missing"
    except ValueError as error:
        return f"{path}: not valid JSON: {error}"


def _check_sizes(keys: dict[str, Any]) -> list[str]:
    """The keys that parameters are built from: present, and whole numbers."""
    faults = [
        f"config.json: {key} is {keys.get(key)!r}; expected a whole number above 0"
        + ("; null makes SGLang drop the trained lm_head" if key == "draft_vocab_size" else "")
        for key in _SIZES
        if type(keys.get(key)) is not int or keys[key] < 1
    ]
    ids = keys.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        faults.append(f"config.json: eagle_aux_hidden_state_layer_ids is {ids!r}; expected a list of layer ids")
    return faults


def _sglang_reading(config: dict[str, Any], target: Target, version: str) -> Reading | str:
    eagle = config.get("eagle_config") or {}
    nested = eagle.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(nested, list) or not nested:
        return f"config.json: eagle_config.eagle_aux_hidden_state_layer_ids is {nested!r}; expected a list"
    if eagle.get("use_aux_hidden_state", True) is not True:
        return "config.json: eagle_config.use_aux_hidden_state is off; expected true: fc reads aux states"
    try:
        return read_as_sglang(config, target, version or str(eagle.get("sglang_version")))
    except ExportError as error:
        return f"config.json: eagle_config.sglang_version: {error.seen}; expected {error.expected}"


def _check_keys(readings: list[Reading], target: Target, drafter: DrafterConfig) -> list[str]:
    """Keys that all engines read alike. SGLang, the last reading where it is one, knows fewer architectures."""
    keys = readings[0].keys
    wanted: dict[str, tuple[Any, str]] = {
        "model_type": ("llama", ""),
        "num_hidden_layers": (1, ""),
        "tie_word_embeddings": (False, "true makes SGLang use the embedding as lm_head"),
        "hidden_act": ("silu", ""),
        "hidden_size": (target.hidden_size, "the target's: the embedding is shared"),
        "vocab_size": (target.vocab_size, "the target's"),
        "max_position_embeddings": (
            target.max_position_embeddings,
            "the target's: drafts beyond it crash the server or slow it",
        ),
    }
    for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "draft_vocab_size"):
        wanted[key] = (getattr(drafter, key), "which was trained")
    wanted["rms_norm_eps"] = (drafter.rms_norm_eps, "which the drafter was trained with")
    faults = []
    if (keys.get("architectures") or [None])[0] not in readings[-1].architectures:
        faults.append(
            f"config.json: architectures is {keys.get('architectures')}; expected [{readings[-1].architectures[0]!r}]"
        )
    faults += [
        f"config.json: {key} is {keys.get(key)!r}; expected {value!r}" + (f" ({why})" if why else "")
        for key, (value, why) in wanted.items()
        if keys.get(key) != value
    ]
    for key, seen, value in _rope(keys, drafter):
        faults.append(f"config.json: {key} is {seen!r}; expected {value!r} (which the drafter was trained with)")
    return faults


def _rope(keys: dict[str, Any], drafter: DrafterConfig) -> list[tuple[str, Any, Any]]:
    """(key, seen, expected) of what differs; Transformers 5 keeps both parts in `rope_parameters`."""
    parameters = keys.get("rope_parameters")
    if parameters is None:
        seen = {"rope_theta": keys.get("rope_theta"), "rope_scaling": keys.get("rope_scaling")}
    else:
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        plain = scaling.get("rope_type", "default") == "default"
        seen = {"rope_theta": parameters.get("rope_theta"), "rope_scaling": None if plain else scaling}
    wanted = {"rope_theta": drafter.rope_theta, "rope_scaling": drafter.rope_scaling}
    return [(key, seen[key], wanted[key]) for key in wanted if seen[key] != wanted[key]]


def _check_switches(reading: Reading, drafter: DrafterConfig) -> list[str]:
    """Norm switches as an engine heeds them: a wrong one serves another network with the same weights."""
    faults = []
    for switch, found in reading.switches.items():
        trained = getattr(drafter, switch)
        if found == trained:
            continue
        seen, wanted, how = ("off", "on", "with") if trained else ("on", "off", "without")
        why = _why_not(switch, reading) if trained and reading.keys.get(switch) else ""
        faults.append(
            f"config.json: {switch} is {seen} as {reading.engine} reads it; expected {wanted}: the drafter was trained "
            f"{how}{why}"
        )
    return faults


def _check_window(reading: Reading, drafter: DrafterConfig) -> list[str]:
    if reading.window == drafter.sliding_window:
        return []
    why = "" if reading.stops_at_unknown else _FOR_VLLM
    return [
        f"config.json: {reading.engine} would attend in a sliding window of {reading.window} (0: none); expected "
        f"{drafter.sliding_window}, which the drafter was trained with{why}"
    ]


def _why_not(switch: str, reading: Reading) -> str:
    if switch == "norm_before_residual":
        return f"; no SGLang release knows it{_FOR_VLLM}"
    return f"; {reading.engine} does not know it: export for a later release, and serve with that"


def _check_layer_ids(reading: Reading, target: Target, captured: list[int]) -> list[str]:
    """The layers that an engine would feed the drafter, against those it was trained on."""
    if reading.captures == captured:
        return []
    if not reading.stops_at_unknown:
        nested = reading.keys["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return [
            f"config.json: eagle_config.eagle_aux_hidden_state_layer_ids is {nested}: {reading.engine} would capture "
            f"{reading.captures} of a {target.model_type} target; the store holds {captured}"
        ]
    top = reading.keys["eagle_aux_hidden_state_layer_ids"]
    return [
        f"config.json: eagle_aux_hidden_state_layer_ids is {top}, which vLLM would capture; the store holds {captured}"
    ]


def _check_tensors(
    folder: Path, readings: list[Reading], drafter: DrafterConfig, dtype: str, embedding: Tensor | None
) -> list[str]:
    """Names, shapes, dtypes and values of the weights. One tensor is in memory at a time."""
    path = folder / WEIGHTS_FILE
    wanted = tensor_shapes(drafter, embedding=embedding is not None)
    tables: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as handle:
            names = sorted(handle.keys())
            faults = _check_names(names, readings, wanted)
            for name in names:
                ours = readings[0].parameter(name)
                if ours not in wanted:
                    continue
                tensor = handle.get_tensor(name)
                found = _check_tensor(name, tensor, wanted[ours], {"d2t": "int64", "t2d": "bool"}.get(ours, dtype))
                if ours == EMBEDDING and embedding is not None and not found:
                    found = _check_embedding(tensor, embedding)
                faults += found
                if ours in ("d2t", "t2d") and not found:
                    tables[ours] = tensor
    except FileNotFoundError:
        return [f"{path}: missing"]
    except SafetensorError as error:
        return [f"{path}: not a whole safetensors file ({error})"]
    return faults + (check_vocabulary(tables["d2t"], tables["t2d"]) if len(tables) == 2 else [])


def _check_names(names: list[str], readings: list[Reading], wanted: dict[str, tuple[int, ...]]) -> list[str]:
    """Tensors that an engine would miss, and those that it has no place for."""
    told: dict[str, list[str]] = {}
    for reading in readings:
        mapped = {reading.parameter(name): name for name in names}
        for ours in wanted:
            if ours not in mapped and ours != "t2d":  # t2d is our own: neither engine reads it
                words = "has to be in this folder" if ours == EMBEDDING else "would be left random"
                told.setdefault(f"{WEIGHTS_FILE}: {ours} is missing: it {words}", []).append(reading.engine)
        for ours, name in mapped.items():
            if ours == EMBEDDING and ours not in wanted:
                told[f"{WEIGHTS_FILE}: {name} is in the folder; expected none: export.embedding is off"] = [
                    reading.engine
                ]
            elif ours not in wanted:
                told.setdefault(f"{WEIGHTS_FILE}: {name} is unknown to the engine", []).append(
                    f"{reading.engine} {'stops' if reading.stops_at_unknown else 'skips it'}"
                )
    if "t2d" in wanted and not any(readings[0].parameter(name) == "t2d" for name in names):
        told[f"{WEIGHTS_FILE}: t2d is missing: expected beside d2t"] = ["speculators"]
    return [f"{words} ({', '.join(engines)})" for words, engines in told.items()]


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: str) -> list[str]:
    faults = []
    if tuple(tensor.shape) != shape:
        faults.append(f"{WEIGHTS_FILE}: {name} has shape {list(tensor.shape)}; config.json makes it {list(shape)}")
    if str(tensor.dtype) != f"torch.{dtype}":
        faults.append(f"{WEIGHTS_FILE}: {name} is {str(tensor.dtype).removeprefix('torch.')}; expected {dtype}")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        faults.append(f"{WEIGHTS_FILE}: {name} holds NaN or Inf")
    return faults


def _check_embedding(tensor: Tensor, embedding: Tensor) -> list[str]:
    if torch.equal(tensor, embedding.to(tensor.dtype)):
        return []
    return [
        f"{WEIGHTS_FILE}: {EMBEDDING} differs from the target's: vLLM would keep it, and draft from other embeddings"
    ]
