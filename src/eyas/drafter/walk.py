"""Acceptance by walking: what a serving engine does, computed from one pass over stored samples.

Start after the first answer token (the target's prefill writes it), draft K tokens in a row, accept the longest prefix
that equals what the target wrote, take the target's own next token as the bonus, go on from there. While all earlier
drafts of a verification are accepted they equal the stored tokens, so the teacher-forced unroll gives the very drafts
that the drafter would make, and its step-0 keys are those that serving recomputes from the target's aux states.

Averages over all positions and sums of products of per-step accuracies overstate it: 1.75 and 1.69 were measured on a
drafter that an engine served at 1.66 and this walk puts at 1.654.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.drafter.eagle3 import Drafter
from eyas.drafter.pack import Pack, Stored, pack_samples
from eyas.drafter.ttt import unroll

BoolArray = npt.NDArray[np.bool_]
S = TypeVar("S", bound=Stored)


@dataclass
class Acceptance:
    """Counts of verifications, added up over samples.

    Attributes:
        verifications: target forwards that checked drafts.
        accepted_at: how often the draft at position i (with all before it) was accepted, int64 [K].
    """

    verifications: int
    accepted_at: npt.NDArray[np.int64]

    @classmethod
    def none(cls, drafts: int) -> "Acceptance":
        return cls(0, np.zeros(drafts, dtype=np.int64))

    def add(self, accepted: int) -> None:
        """One verification that accepted this many drafts."""
        self.verifications += 1
        self.accepted_at[:accepted] += 1

    def merge(self, other: "Acceptance") -> None:
        self.verifications += other.verifications
        self.accepted_at += other.accepted_at

    @property
    def length(self) -> float:
        """Acceptance length: 1 + accepted drafts / verifications, the bonus token included; nan without any."""
        return 1 + float(self.accepted_at.sum()) / self.verifications if self.verifications else float("nan")

    @property
    def per_position(self) -> list[float]:
        """Share of verifications in which the draft at position i was accepted, with all before it."""
        return [float(count) / self.verifications if self.verifications else float("nan") for count in self.accepted_at]

    def as_json(self) -> dict[str, Any]:
        """As logs and reports keep it; null where nothing was verified."""
        measured = self.verifications > 0
        return {
            "acceptance_length": round(self.length, 4) if measured else None,
            "acceptance_per_position": [round(share, 4) for share in self.per_position] if measured else None,
            "verifications": self.verifications,
        }


def answer_spans(loss_mask: BoolArray) -> list[tuple[int, int]]:
    """First and last position of each run of supervised tokens of one sample."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], loss_mask, [False]]).astype(np.int8)))
    return [(int(first), int(end) - 1) for first, end in edges.reshape(-1, 2)]


def verifications(hits: BoolArray, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Walk over a sample's answers: (position of the newest known token, drafts that met a token, drafts accepted).

    The drafts stand for the tokens after that position; near an answer's end fewer of them meet one.

    Args:
        hits: bool [T, K]; hits[j, k]: the draft of step k at row j equals token j+2+k.
        spans: (first, last) positions of answers.
    """
    drafts = hits.shape[1]
    for first, last in spans:
        at = max(first, 1)  # the newest known token; its row is the one before it
        while at < last:
            met, accepted = min(drafts, last - at), 0
            while accepted < met and hits[at - 1, accepted]:
                accepted += 1
            yield at, met, accepted
            at += accepted + 1


def walk(hits: BoolArray, spans: Iterable[tuple[int, int]]) -> Acceptance:
    """What `verifications` accepts, added up."""
    total = Acceptance.none(hits.shape[1])
    for _, _, accepted in verifications(hits, spans):
        total.add(accepted)
    return total


class Replayed(NamedTuple, Generic[S]):
    """A sample that was walked over.

    Attributes:
        hits: as `draft_hits` gives them, bool [T, K].
        acceptance: of all its verifications.
    """

    sample: S
    hits: BoolArray
    acceptance: Acceptance


def replay(drafter: Drafter, embedding: Tensor, packs: Iterable[Sequence[S]], drafts: int) -> Iterator[Replayed[S]]:
    """Walk over samples, drafts by argmax (temperature 0), in a chain of `drafts`.

    Args:
        embedding: the target's [V, H]; its dtype and device are computed in.
        packs: samples that share a packed row. One pack is asked for at a time, so no more need be in memory.
    """
    for samples in packs:
        pack = pack_samples(samples, drafts, embedding.dtype, embedding.device)
        masks = _by_sample(pack, pack.loss_mask)
        for sample, hits, mask in zip(samples, draft_hits(drafter, embedding, pack, drafts), masks, strict=True):
            yield Replayed(sample, hits, walk(hits, answer_spans(mask)))


@torch.no_grad()
def draft_hits(drafter: Drafter, embedding: Tensor, pack: Pack, drafts: int) -> list[BoolArray]:
    """For each sample of a pack, [T, K]: whether the draft of step k at row j (by argmax) equals token j+2+k."""
    hits = np.zeros((len(pack.token_ids), drafts), dtype=bool)
    draft_ids = drafter.draft_ids
    for k, hidden in enumerate(unroll(drafter, embedding, pack, drafts) if pack.trained_at_0 else ()):
        at = pack.index.rows[pack.index.steps[k].picked.rows]
        drafted = draft_ids[drafter.lm_head(hidden).argmax(-1)]
        hits[at.cpu().numpy(), k] = (drafted == pack.token_ids[at + 2 + k]).cpu().numpy()
    return _by_sample(pack, hits)


def _by_sample(pack: Pack, rows: BoolArray) -> list[BoolArray]:
    firsts = np.unique(pack.alignment.start).tolist()
    return np.split(rows, firsts[1:])
