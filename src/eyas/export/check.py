"""Check an exported folder the way an engine's loader reads it, and name each mismatch before a server hides it.

Engines are lenient where it hurts: SGLang skips tensor names it doesn't know and leaves parameters it didn't find at
random, both trust the folder's rope and context length, and wrong layer ids only show as drafts that nobody accepts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eyas.drafter.layer_ids import sglang_captures
from eyas.drafter.vocab import check_vocabulary
from eyas.errors import ExportError
from eyas.export.form import ARCHITECTURE, CONFIG_FILE, NORM_SWITCHES, WEIGHTS_FILE, tensor_shapes
from eyas.target import Target

_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("vocab_size", "draft_vocab_size", "max_position_embeddings", "num_hidden_layers"),
)


def check_folder(folder: Path, target: Target, aux_layer_ids: Sequence[int]) -> list[str]:
    """Everything in an exported folder that would make an engine refuse it or serve another drafter than was trained.

    Args:
        target: the model it drafts for.
        aux_layer_ids: the layers that were captured, from the store's manifest, in our meaning.
    Returns: one line for each mismatch: what was seen, what was expected; empty where there is none.
    """
    config = _read_config(folder)
    if isinstance(config, str):
        return [config]
    faults = _check_shape_keys(config)
    if not faults:
        faults = _check_against_target(config, target) + _check_layer_ids(config, target, aux_layer_ids)
        faults += _check_tensors(folder, config)
    return faults


def _read_config(folder: Path) -> dict[str, Any] | str:
    """config.json, or the one fault that keeps everything else from being checked."""
    path = folder / CONFIG_FILE
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return f"{path}: missing"
    except ValueError as error:
        return f"{path}: not valid JSON: {error}"


def _check_shape_keys(config: dict[str, Any]) -> list[str]:
    """The keys that parameters are built from: present, and whole numbers."""
    faults = [
        f"config.json: {key} is {config.get(key)!r}; expected a whole number above 0"
        + ("; null makes SGLang drop the trained lm_head" if key == "draft_vocab_size" else "")
        for key in _SIZES
        if type(config.get(key)) is not int or config[key] < 1
    ]
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        faults.append(f"config.json: eagle_aux_hidden_state_layer_ids is {ids!r}; expected a list of layer ids")
    return faults


def _check_against_target(config: dict[str, Any], target: Target) -> list[str]:
    wanted: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_theta": target.rope_theta,
        "rope_scaling": target.rope_scaling,
    }
    why = {
        "tie_word_embeddings": "true makes SGLang use the embedding as lm_head",
        "hidden_size": "the target's: the embedding is shared",
        "vocab_size": "the target's",
        "max_position_embeddings": "the target's: drafts beyond it crash the server or slow it",
        "rope_theta": "the target's, which the drafter was trained with",
        "rope_scaling": "the target's, which the drafter was trained with",
    }
    faults = [
        f"config.json: {key} is {config.get(key)!r}; expected {value!r}" + (f" ({why[key]})" if key in why else "")
        for key, value in wanted.items()
        if config.get(key) != value
    ]
    eagle = config.get("eagle_config") or {}
    switched = [f"{key}" for key in NORM_SWITCHES if config.get(key) or eagle.get(key)]
    faults += [f"config.json: {key} is on; expected off: the drafter was trained without" for key in switched]
    if config["draft_vocab_size"] > config["vocab_size"]:
        faults.append(f"config.json: draft_vocab_size {config['draft_vocab_size']} is above {config['vocab_size']}")
    return faults


def _check_layer_ids(config: dict[str, Any], target: Target, aux_layer_ids: Sequence[int]) -> list[str]:
    """Both places that hold layer ids: they must make each engine capture what the drafter was trained on."""
    captured = list(aux_layer_ids)
    faults = []
    top = config["eagle_aux_hidden_state_layer_ids"]
    if top != captured:
        faults.append(
            f"config.json: eagle_aux_hidden_state_layer_ids is {top}, which vLLM would capture; "
            f"the store holds {captured}"
        )
    eagle = config.get("eagle_config") or {}
    nested, version = eagle.get("eagle_aux_hidden_state_layer_ids"), str(eagle.get("sglang_version"))
    if not isinstance(nested, list):
        return [*faults, f"config.json: eagle_config.eagle_aux_hidden_state_layer_ids is {nested!r}; expected a list"]
    if eagle.get("use_aux_hidden_state", True) is not True:
        faults.append("config.json: eagle_config.use_aux_hidden_state is off; expected true: fc reads aux states")
    try:
        served = sglang_captures(nested, target.model_type, version, target.num_layers)
    except ExportError as error:
        return [*faults, f"config.json: eagle_config.sglang_version: {error.seen}; expected {error.expected}"]
    if served != captured:
        faults.append(
            f"config.json: eagle_config.eagle_aux_hidden_state_layer_ids is {nested}: SGLang {version} would capture "
            f"{served} of a {target.model_type} target; the store holds {captured}"
        )
    return faults


def _check_tensors(folder: Path, config: dict[str, Any]) -> list[str]:
    """Names, shapes, dtypes and values of the weights. One tensor is in memory at a time."""
    path = folder / WEIGHTS_FILE
    wanted = tensor_shapes(config)
    try:
        with safe_open(path, framework="pt") as handle:
            names = set(handle.keys())
            faults = [
                f"{WEIGHTS_FILE}: {name} is missing: the engine would leave it random"
                for name in wanted
                if name not in names
            ]
            faults += [f"{WEIGHTS_FILE}: {name} is unknown to the engines" for name in sorted(names - wanted.keys())]
            tables: dict[str, torch.Tensor] = {}
            for name in sorted(names & wanted.keys()):
                tensor = handle.get_tensor(name)
                found = _check_tensor(name, tensor, wanted[name], str(config.get("torch_dtype")))
                faults += found
                if name in ("d2t", "t2d") and not found:
                    tables[name] = tensor
    except FileNotFoundError:
        return [f"{path}: missing"]
    except SafetensorError as error:
        return [f"{path}: not a whole safetensors file ({error})"]
    return faults + (check_vocabulary(tables["d2t"], tables["t2d"]) if len(tables) == 2 else [])


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str) -> list[str]:
    wanted = {"d2t": "int64", "t2d": "bool"}.get(name, dtype)
    faults = []
    if tuple(tensor.shape) != shape:
        faults.append(f"{WEIGHTS_FILE}: {name} has shape {list(tensor.shape)}; config.json makes it {list(shape)}")
    if str(tensor.dtype) != f"torch.{wanted}":
        faults.append(f"{WEIGHTS_FILE}: {name} is {str(tensor.dtype).removeprefix('torch.')}; expected {wanted}")
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        faults.append(f"{WEIGHTS_FILE}: {name} holds NaN or Inf")
    return faults
