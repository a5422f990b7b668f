"""Which samples run together: batches of similar length within one shard."""

from collections.abc import Iterable, Iterator

from eyas.data.tokens import Sample

# Padding is at most 18%; measured over length mixes 1 to 7%, against up to 60% in small shards without this bound.
_SHORTEST = 0.85


def batches(samples: Iterable[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    """Deal samples to batches, longest first. The shortest of a batch has at least 85% of the longest's tokens.

    Args:
        samples: of one shard, in any order.
        batch_tokens: most tokens of a batch, padding included; a longer sample gets a batch of its own.
    """
    batch: list[Sample] = []
    for sample in sorted(samples, key=lambda sample: (-len(sample.token_ids), sample.id)):
        if batch:
            width = len(batch[0].token_ids)
            if (len(batch) + 1) * width > batch_tokens or len(sample.token_ids) < _SHORTEST * width:
                yield batch
                batch = []
        batch.append(sample)
    if batch:
        yield batch
