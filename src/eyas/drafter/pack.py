"""Several samples one after another in one row, with exact isolation: what training and replay compute on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from eyas.drafter.align import Alignment, BoolArray, align


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
    """

    ids: list[str]
    token_ids: Tensor
    positions: Tensor
    loss_mask: BoolArray
    aux: Tensor
    final: Tensor
    alignment: Alignment

    @property
    def sequences(self) -> int:
        """Samples with at least one trained row."""
        return int((self.alignment.trained_at_0 > 0).sum())


def pack_samples(samples: Sequence[Stored], steps: int, dtype: torch.dtype, device: torch.device) -> Pack:
    """Lay samples one after another and move them to the device in the compute dtype."""
    lengths = [len(sample.token_ids) for sample in samples]
    aux = torch.cat([sample.aux_hidden_states.flatten(1) for sample in samples])
    masks = [sample.loss_mask.numpy().astype(bool) for sample in samples]
    return Pack(
        ids=[sample.id for sample in samples],
        token_ids=torch.cat([sample.token_ids for sample in samples]).to(device, torch.int64),
        positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device),
        loss_mask=np.concatenate(masks),
        aux=aux.to(device, dtype),
        final=torch.cat([sample.final_hidden_states for sample in samples]).to(device, dtype),
        alignment=align(masks, steps),
    )


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
