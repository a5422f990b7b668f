"""Which samples run together: batches of similar length within one shard."""

from collections.abc import Iterable, Iterator

from eyas.data.tokens import Sample


def batches(samples: Iterable[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    """Deal samples to batches, longest first, so that neighbours are of similar length and padding is small.

    Args:
        samples: of one shard, in any order.
        batch_tokens: most tokens of a batch, padding included; a longer sample gets a batch of its own.
    """
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: (-len(sample.token_ids), sample.id)):
        if batch and (len(batch) + 1) * len(batch[0].token_ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
