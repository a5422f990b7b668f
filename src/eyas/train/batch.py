"""Which samples make which optimizer step: decided from lengths alone, before the first one."""

from collections.abc import Iterator
from dataclasses import dataclass

from eyas.drafter.pack import fill_packs
from eyas.store.reader import StoredSample, StoreReader


@dataclass(frozen=True)
class Schedule:
    """The whole run's order.

    Attributes:
        packs: number of samples in each packed row, in order, over all epochs.
        accumulation: packed rows per optimizer step.
    """

    packs: list[int]
    accumulation: int

    @property
    def steps(self) -> int:
        return -(-len(self.packs) // self.accumulation)

    def step(self, number: int) -> list[int]:
        """Sizes of the packed rows of an optimizer step, counted from 0."""
        return self.packs[number * self.accumulation : (number + 1) * self.accumulation]

    def samples_before(self, number: int) -> int:
        """Samples consumed before an optimizer step."""
        return sum(self.packs[: number * self.accumulation])


def make_schedule(reader: StoreReader, *, seed: int, epochs: float, batch_tokens: int, accumulation: int) -> Schedule:
    """Pack all epochs' samples in streaming order; a fraction of an epoch is its first samples."""
    per_epoch = len(reader.samples("train"))
    wanted = max(1, round(per_epoch * epochs))
    tokens = reader.rows.table["tokens"].to_numpy()
    lengths: list[int] = []
    for epoch in range(-(-wanted // per_epoch)):
        lengths += tokens[reader.order("train", seed, epoch)].tolist()
    return Schedule(fill_packs(lengths[:wanted], batch_tokens), accumulation)


def stream_from(reader: StoreReader, *, seed: int, consumed: int) -> Iterator[StoredSample]:
    """Training samples, epoch after epoch, from the exact position that `consumed` samples leave."""
    per_epoch = len(reader.samples("train"))
    epoch, start = divmod(consumed, per_epoch)
    while True:
        yield from reader.stream("train", seed=seed, epoch=epoch, start=start)
        epoch, start = epoch + 1, 0
