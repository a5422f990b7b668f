"""The parts of the target that a drafter needs: embedding, lm_head, and the final norm it starts from."""

from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from eyas.errors import TargetError
from eyas.target import Target

_EMBEDDING = "embed_tokens.weight"
_LM_HEAD = "lm_head.weight"
_NORM = "norm.weight"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class TargetHead:
    """Embedding [V, H], lm_head [V, H] and final norm [H] of the target, frozen, on one device.

    lm_head consumes the post-norm final hidden state. They are the same tensor where the target ties them.
    """

    embedding: Tensor
    lm_head: Tensor
    norm: Tensor


def load_target_head(target: Target, dtype: torch.dtype | None, device: torch.device) -> TargetHead:
    """Read just these tensors from the target's folder, whatever prefix a wrapper gives them.

    Args:
        dtype: None: each tensor in the one of the checkpoint.
    Raises: TargetError where a tensor is missing, has another shape than the config says, or is no plain float tensor.
    """
    matrix = (target.vocab_size, target.hidden_size)
    embedding = _read(target, _EMBEDDING, matrix).to(device, dtype)
    norm = _read(target, _NORM, (target.hidden_size,)).to(device, dtype)
    if any(name.endswith(_LM_HEAD) for name in target.weight_files):
        return TargetHead(embedding, _read(target, _LM_HEAD, matrix).to(device, dtype), norm)
    if not target.text_config.get("tie_word_embeddings", target.config.get("tie_word_embeddings", False)):
        raise TargetError(
            f"{target.path}: no tensor *{_LM_HEAD}",
            expected="one, as tie_word_embeddings is false in config.json",
            cause="an incomplete checkpoint",
            next="fetch the folder again",
        )
    return TargetHead(embedding, embedding, norm)


def _read(target: Target, suffix: str, shape: tuple[int, ...]) -> Tensor:
    names = [name for name in target.weight_files if name == suffix or name.endswith(f".{suffix}")]
    if len(names) != 1:
        raise TargetError(
            f"{target.path}: {len(names)} tensors are named *{suffix}: {', '.join(sorted(names)) or 'none'}",
            expected="exactly one",
            cause="an incomplete checkpoint, or a layout that Eyas doesn't know",
        )
    with safe_open(target.weight_files[names[0]], framework="pt") as handle:
        tensor: Tensor = handle.get_tensor(names[0])
    if tensor.dtype not in _FLOATS:
        raise TargetError(
            f"{target.path}: {names[0]} has dtype {tensor.dtype}",
            expected="float32, bfloat16 or float16",
            cause="a checkpoint whose embedding or head is quantised",
            next="use the unquantised checkpoint's folder as target.path: these two tensors are read, nothing else",
        )
    if tuple(tensor.shape) != shape:
        raise TargetError(
            f"{target.path}: {names[0]} has shape {tuple(tensor.shape)}",
            expected=f"{shape}, by config.json",
        )
    return tensor
