"""What the converters share: one sample of another tool's folder, and the conventions that differ."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from eyas.errors import StoreError
from eyas.store.format import AUX_LAYERS

FinalState = Literal["pre_norm", "post_norm"]
MARKER = "eyas_export.json"


class BadFile(StoreError):
    """A file of the other tool that gives no sample; `reason` is what the account counts it under."""

    def __init__(self, path: Path, reason: str, detail: str = "", *, expected: str = "") -> None:
        super().__init__(
            f"{path}: {reason}" + (f" ({detail})" if detail else ""),
            expected=expected,
            cause="it was cut short, or another tool wrote it",
            next="mend or remove the file; --skip-bad-files leaves such files out and counts them",
        )
        self.reason = reason


@dataclass(frozen=True)
class Head:
    """A sample without its states.

    Attributes:
        token_ids: int32 [T].
        loss_mask: bool [T], True where the assistant wrote token i.
        hidden_size: width of its states.
    """

    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    hidden_size: int


@dataclass(frozen=True)
class Conventions:
    """How a tool names layers and which final state it keeps.

    Attributes:
        name: as in `--from` and `--as`.
        tool: for people.
        layer_shift: its id of a layer = ours + this. Ours: the residual stream after so many decoder layers.
        final_state: what its own writer stores: before or after the target's last norm.
    """

    name: str
    tool: str
    layer_shift: int
    final_state: FinalState

    def to_ours(self, ids: Sequence[int], model_type: str) -> list[int]:
        """Our ids for those that the tool was given.

        Raises: StoreError where the tool's meaning depends on the model or the ids name no layer.
        """
        if self.name == "specforge" and model_type.startswith(("deepseek", "kimi")):
            # SGLang's deepseek_v2.py adds 1 only where the first id is 1, and from 0.5.13 on not at all.
            raise StoreError(
                f"--tool-layer-ids {list(ids)} of a {model_type} target: what they meant depends on SGLang's version",
                next="say what was captured: --aux-layer-ids A,B,C, the number of decoder layers before each state",
            )
        return [layer - self.layer_shift for layer in ids]

    def from_ours(self, ids: Sequence[int]) -> list[int]:
        return [layer + self.layer_shift for layer in ids]


class Source(ABC):
    """Another tool's folder, open for reading; rows are numbered from 0 in the tool's order."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def path(self, row: int) -> Path:
        """The file of a sample, for messages."""

    @abstractmethod
    def head(self, row: int) -> Head:
        """Raises: BadFile."""

    @abstractmethod
    def states(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Aux states [T, 3, H] and final states [T, H] in the tool's own dtype and convention.

        Raises: BadFile.
        """

    def recorded_layer_ids(self) -> list[int] | None:
        """The tool's ids of the three aux layers where the folder records them."""
        return None


class Sink(ABC):
    """Another tool's folder that is being written."""

    @abstractmethod
    def write(self, row: int, ids: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> None:
        """Write one sample unless it is there: ids and mask int64 [T], aux bf16 [T, 3, H], final bf16 [T, H].

        Called in any order and from many threads.
        """

    @abstractmethod
    def finish(self, heads: "Heads") -> None:
        """Write what the folder needs beside the samples."""


@dataclass(frozen=True)
class Heads:
    """All samples of an export, as far as their tool wants them listed.

    Attributes:
        lengths: tokens of each row.
        token_counts: int64 [vocab], of supervised tokens.
        layer_ids: of the aux layers, by the tool's convention.
        num_layers, hidden_size, target: of the target.
    """

    lengths: list[int]
    token_counts: npt.NDArray[np.int64]
    layer_ids: list[int]
    num_layers: int
    hidden_size: int
    target: str


def check_head(path: Path, ids: torch.Tensor, mask: torch.Tensor, hidden_size: int) -> Head:
    """Ids and mask as we keep them.

    Raises: BadFile where they aren't two vectors of whole numbers and equal length, or the mask isn't 0 and 1.
    """
    kinds = {ids.dtype, mask.dtype}
    if ids.dim() != 1 or ids.shape != mask.shape or not len(ids) or any(kind.is_floating_point for kind in kinds):
        raise BadFile(
            path,
            "ids and mask don't fit",
            f"input_ids {list(ids.shape)} {ids.dtype}, loss_mask {list(mask.shape)} {mask.dtype}",
            expected="two vectors of whole numbers, one entry a token",
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        raise BadFile(path, "loss_mask has values other than 0 and 1")
    return Head(ids.to(torch.int32).numpy(), mask.to(torch.bool).numpy(), hidden_size)


def check_layers(path: Path, aux_layers: int) -> None:
    """Raises: BadFile where a sample hasn't the three aux layers of EAGLE-3."""
    if aux_layers != AUX_LAYERS:
        raise BadFile(path, f"{aux_layers} aux layers", expected=f"{AUX_LAYERS}, and the final state")
