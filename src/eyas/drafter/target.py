"""The parts of the target that a drafter needs: embedding, lm_head, and the final norm it starts from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas import checkpoint
from eyas.target import Target


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
    embedding = checkpoint.read_float(target, "embedding").to(device, dtype)
    norm = checkpoint.read_float(target, "norm").to(device, dtype)
    if checkpoint.name_of(target, "lm_head") == checkpoint.name_of(target, "embedding"):
        return TargetHead(embedding, embedding, norm)
    return TargetHead(embedding, checkpoint.read_float(target, "lm_head").to(device, dtype), norm)
