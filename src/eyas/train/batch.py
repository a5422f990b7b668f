"""Which samples make which optimizer step: decided from lengths alone, before the first one.

The order depends on the store and the recipe, not on the number of processes: each of them works through the same
steps and takes its share of a step's rows. So a run goes on at its exact place with any number of processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from eyas.drafter.align import IntArray
from eyas.drafter.pack import fill_packs
from eyas.settings import Train
from eyas.store.reader import StoreReader

# A supervised token's products in one step of the training-time test, against those of any token once (8B shape: query,
# key, value, output, MLP and lm_head, 349 M, against fc and step-0 key and value, 84 M).
_WORK_OF_TRAINED = 4


@dataclass(frozen=True)
class StepPlan:
    """The samples of one optimizer step.

    Attributes:
        number: of the step, counted from 0.
        first_sample: samples that all steps before it took.
        rows: for each packed row its samples, as row numbers of the store's index, int64.
        tokens: of all its samples.
    """

    number: int
    first_sample: int
    rows: list[IntArray]
    tokens: int

    @property
    def samples(self) -> int:
        return sum(len(row) for row in self.rows)

    def count(self, world: int) -> int:
        """Packed rows of each of `world` processes."""
        return -(-len(self.rows) // world)

    def share(self, rank: int, world: int) -> list[IntArray | None]:
        """The packed rows of one process of `world`; None where others have one more: all take part as often."""
        mine: list[IntArray | None] = [*self.rows[rank::world]]
        return mine + [None] * (self.count(world) - len(mine))


class Schedule:
    """The whole run's order. One epoch is held in memory at a time: 24 bytes a sample.

    Samples come in streaming order, epoch after epoch, and fill rows of `batch_tokens`; `accumulation` rows make a
    step. Within a step the samples are dealt anew by length and mask: that changes no sum, and makes rows of equal
    work, so that no process waits for another.

    Attributes:
        steps: optimizer steps in all.
        samples: training samples that they take; a fraction of an epoch is its first samples.
    """

    def __init__(self, reader: StoreReader, table: Train) -> None:
        self._reader, self._table = reader, table
        self._per_epoch = len(reader.order("train", table.seed, 0))
        self.samples = max(1, round(self._per_epoch * table.epochs)) if table.epochs else 0
        self.steps = -(-sum(1 for _ in self._packed_rows()) // table.accumulation) if self.samples else 0

    def from_step(self, first: int) -> Iterator[StepPlan]:
        """Steps first, first + 1 and so on."""
        packed, taken = self._packed_rows(), 0
        for number in range(self.steps):
            rows = list(islice(packed, self._table.accumulation))
            if number >= first:
                everything = np.concatenate(rows)
                tokens = self._reader.rows.tokens[everything]
                yield StepPlan(number, taken, self._deal(rows, everything, tokens), int(tokens.sum()))
            taken += sum(len(row) for row in rows)

    def samples_before(self, step: int) -> int:
        """Samples that the steps before it take."""
        rows = islice(self._packed_rows(), step * self._table.accumulation)
        return sum(len(row) for row in rows)

    def tokens_before(self, step: int) -> int:
        """Tokens of the samples that the steps before it take."""
        rows = islice(self._packed_rows(), step * self._table.accumulation)
        return sum(int(self._reader.rows.tokens[row].sum()) for row in rows)

    def _packed_rows(self) -> Iterator[IntArray]:
        """Samples of each packed row, over all epochs. A row that an epoch leaves open takes the next one's first."""
        opened = np.zeros(0, np.int64)
        for epoch in range(-(-self.samples // self._per_epoch)):
            order = self._reader.order("train", self._table.seed, epoch)
            order = np.concatenate([opened, order[: self.samples - epoch * self._per_epoch]])
            sizes = fill_packs(self._reader.rows.tokens[order].tolist(), self._table.batch_tokens)
            ends = np.cumsum(sizes)
            for size, end in zip(sizes[:-1], ends[:-1], strict=True):
                yield order[end - size : end]
            opened = order[ends[-1] - sizes[-1] :]
        yield opened

    def _deal(self, rows: list[IntArray], everything: IntArray, tokens: IntArray) -> list[IntArray]:
        """The same samples in as many rows of about equal work and no more tokens than the fullest had."""
        if len(rows) == 1:
            return rows
        work = tokens + _WORK_OF_TRAINED * self._table.ttt_steps * self._reader.rows.supervised[everything]
        room = max(self._table.batch_tokens, *(int(self._reader.rows.tokens[row].sum()) for row in rows))
        # By work, which levels best; by tokens where a long sample with little work is left without a place.
        for by in (work, tokens):
            place = _level(np.argsort(-by, kind="stable"), tokens, work, room, len(rows))
            if place is not None:
                return [everything[place == row] for row in range(len(rows))]
        return rows


def _level(order: IntArray, tokens: IntArray, work: IntArray, room: int, rows: int) -> IntArray | None:
    """A row for each sample, in this order: of those with room for it the one with least work. None: one finds none."""
    filled, load = np.zeros((2, rows), np.int64)
    place = np.empty(len(order), np.int64)
    for sample in order:
        fits = filled + tokens[sample] <= room
        if not fits.any():
            return None
        row = int(np.where(fits, load, np.iinfo(np.int64).max).argmin())
        place[sample], filled[row], load[row] = row, filled[row] + tokens[sample], load[row] + work[sample]
    return place
