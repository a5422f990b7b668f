"""Several samples one after another in one row, with exact isolation: what training and replay compute on."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from eyas.drafter.align import Alignment, BoolArray, align
from eyas.drafter.attention import EagerAttention, to_device
from eyas.drafter.flash import FlashAttention
from eyas.drafter.ops import Picked

T = TypeVar("T")


class Stored(Protocol):
    """What a pack needs of a stored sample (eyas.store.reader.StoredSample)."""

    @property
    def id(self) -> str: ...
    @property
    def token_ids(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...
    @property
    def aux_hidden_states(self) -> Tensor: ...
    @property
    def final_hidden_states(self) -> Tensor: ...


@dataclass(frozen=True)
class StepIndex:
    """The trained rows of one step, on the pack's device.

    Attributes:
        picked: which of the computed rows they are.
        teacher: index into the teaching positions, int64 [n].
    """

    picked: Picked
    teacher: Tensor


@dataclass(frozen=True)
class PackIndex:
    """The alignment on the pack's device, so that a step waits for no copy.

    Attributes:
        rows: positions that some step trains, int64 [R].
        final_rows: of each teaching position its row of `final`, int64 [P].
        steps: per step, its trained rows.
        trained: how many rows each step trains, int64 [steps].
        attention: how rows see the context.
    """

    rows: Tensor
    final_rows: Tensor
    steps: list[StepIndex]
    trained: Tensor
    attention: EagerAttention | FlashAttention


@dataclass(frozen=True)
class Pack:
    """A packed row of S tokens.

    Attributes:
        ids: the samples' ids, in order.
        token_ids: int64 [S].
        positions: position of each token in its own sample, int64 [S].
        aux: aux hidden states of the three layers side by side, compute dtype [S, 3H].
        loss_mask: bool [S], on the CPU.
        final: post-norm final hidden states of supervised positions, compute dtype [F, H].
        alignment: which row learns what, on the CPU.
        index: the same on the pack's device.
    """

    ids: list[str]
    token_ids: Tensor
    positions: Tensor
    loss_mask: BoolArray
    aux: Tensor
    final: Tensor
    alignment: Alignment
    index: PackIndex

    @property
    def trained_at_0(self) -> int:
        """Rows that are trained at step 0."""
        return len(self.alignment.steps[0].row)


def pack_samples(samples: Sequence[Stored], steps: int, dtype: torch.dtype, device: torch.device) -> Pack:
    """Lay samples one after another and move them to the device in the compute dtype."""
    lengths = [len(sample.token_ids) for sample in samples]
    aux = torch.cat([sample.aux_hidden_states.flatten(1) for sample in samples])
    masks = [sample.loss_mask.numpy().astype(bool) for sample in samples]
    alignment = align(masks, steps)
    return Pack(
        ids=[sample.id for sample in samples],
        token_ids=torch.cat([sample.token_ids for sample in samples]).to(device, torch.int64),
        positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device),
        loss_mask=np.concatenate(masks),
        aux=aux.to(device, dtype),
        final=torch.cat([sample.final_hidden_states for sample in samples]).to(device, dtype),
        alignment=alignment,
        index=index_pack(alignment, dtype, device),
    )


def index_pack(alignment: Alignment, dtype: torch.dtype, device: torch.device) -> PackIndex:
    """The alignment's indices on a device, all in one copy that the host does not wait for."""
    arrays = [alignment.rows, alignment.final_rows, np.array([len(step.row) for step in alignment.steps])]
    for step in alignment.steps:
        place = np.full(len(alignment.rows), -1)
        place[step.row] = np.arange(len(step.row))
        arrays += [step.row, place, step.teacher]
    rows, final_rows, trained, *flat = to_device(arrays, device)
    steps = [
        StepIndex(Picked(row, place), teacher)
        for row, place, teacher in zip(*(flat[k::3] for k in range(3)), strict=True)
    ]
    flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and len(rows) > 0
    attention = FlashAttention(alignment, device) if flash else EagerAttention(alignment, device)
    return PackIndex(rows, final_rows, steps, trained, attention)


def group(items: Sequence[T], lengths: Sequence[int], budget: int) -> list[list[T]]:
    """Items in order, in packs that their lengths fill (see `fill_packs`)."""
    remaining = iter(items)
    return [list(islice(remaining, size)) for size in fill_packs(lengths, budget)]


def fill_packs(lengths: Sequence[int], budget: int) -> list[int]:
    """Sizes of packs that take samples in order while their tokens fit the budget; a longer sample is alone."""
    packs: list[int] = []
    room = 0
    for length in lengths:
        if packs and length <= room:
            packs[-1] += 1
            room -= length
        else:
            packs.append(1)
            room = budget - length
    return packs
