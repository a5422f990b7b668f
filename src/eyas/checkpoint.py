"""Embedding, lm_head and last norm of the target in its checkpoint: found by name, read alone.

Checkpoints with a layer for multi-token prediction (DeepSeek-V3) hold copies of all three in it:
`model.layers.61.embed_tokens.weight`, `model.layers.61.shared_head.norm.weight`. Names within layers are never meant.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.errors import TargetError
from eyas.target import Target

Part = Literal["embedding", "lm_head", "norm"]

_EMBEDDING, _LM_HEAD, _NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.\d+\..*")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def name_of(target: Target, part: Part) -> str:
    """The tensor's name, whatever prefix a wrapper gives it. A tied lm_head is the embedding; the last norm [H] lies
    beside the embedding.

    Raises: TargetError where the checkpoint doesn't have just one.
    """
    if part == "lm_head":
        heads = _named(target, _LM_HEAD)
        if len(heads) == 1:
            return heads[0]
        config = target.text_config
        if heads or not config.get("tie_word_embeddings", target.config.get("tie_word_embeddings", False)):
            raise _not_one(target, _LM_HEAD, heads, "; none would do if config.json set tie_word_embeddings")
    embeddings = _named(target, _EMBEDDING)
    if len(embeddings) != 1:
        raise _not_one(target, _EMBEDDING, embeddings)
    if part != "norm":
        return embeddings[0]
    norm = layers_prefix(embeddings[0]) + _NORM
    if norm not in target.weight_files:
        raise _not_one(target, norm, [])
    return norm


def layers_prefix(embedding: str) -> str:
    """What stands before `layers.` in the names of the decoder's tensors: model., language_model.model. ...

    Args:
        embedding: the embedding's name.
    """
    return embedding[: -len(_EMBEDDING)]


def read_float(target: Target, part: Part) -> Tensor:
    """Embedding [V, H], lm_head [V, H] or norm [H] in its stored dtype.

    Raises: TargetError where it is missing, has another shape than config.json says, or is no plain float tensor.
    """
    name = name_of(target, part)
    tensor = read(target, name)
    if tensor.dtype not in _FLOATS:
        raise TargetError(
            f"{target.path}: {name} has dtype {tensor.dtype}",
            expected="float32, bfloat16 or float16",
            cause="a checkpoint whose embedding or head is quantised",
            next="name the unquantised checkpoint's folder (target.path, or --target): nothing else of it is read here",
        )
    shape = (target.hidden_size,) if part == "norm" else (target.vocab_size, target.hidden_size)
    if tuple(tensor.shape) != shape:
        raise TargetError(f"{target.path}: {name} has shape {tuple(tensor.shape)}", expected=f"{shape}, by config.json")
    return tensor


def read(target: Target, name: str) -> Tensor:
    """A tensor as it is stored. Raises: TargetError for a cut file."""
    with opened(target.weight_files[name]) as handle:
        tensor: Tensor = handle.get_tensor(name)
    return tensor


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, for torch. Raises: TargetError for a cut one."""
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise TargetError(
            f"{path}: not a whole safetensors file ({error})",
            cause="the download or copy was cut short",
            next="fetch the folder again; nothing of the run is lost",
        ) from None


def _named(target: Target, suffix: str) -> list[str]:
    names = [name for name in target.weight_files if name == suffix or name.endswith(f".{suffix}")]
    return sorted(name for name in names if not _IN_LAYER.fullmatch(name))


def _not_one(target: Target, suffix: str, names: list[str], but: str = "") -> TargetError:
    return TargetError(
        f"{target.path}: {len(names)} tensors are named *{suffix}: {', '.join(names) or 'none'}",
        expected=f"exactly one{but}",
        cause="an incomplete checkpoint, or a layout that Eyas doesn't know",
        next="fetch the folder again",
    )
