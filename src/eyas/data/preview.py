"""Samples as people can check them: decoded, the supervised part marked."""

from collections import Counter
from collections.abc import Iterator

from rich.text import Text

from eyas.data.encode import Encoder
from eyas.data.make import Maker
from eyas.data.pool import run_jobs
from eyas.data.prepare import find_files, find_jobs, make_maker, source_name
from eyas.data.tokens import LossMask, TokenIds
from eyas.settings import Data
from eyas.target import Target

# On a terminal neighbouring tokens take turns between the two.
_SUPERVISED, _CONTEXT = ("bold green", "bold cyan"), ("dim", "dim italic")
_CHUNKS_PER_FILE = 4


def preview(data: Data, target: Target, count: int, *, colour: bool) -> Iterator[Text]:
    """The first `count` samples of every source, then what was rejected or looks wrong among the records read.

    Args:
        colour: mark the supervised part by colour, token by token; else by brackets around each stretch.
    Raises: DataError as prepare does. Nothing is written.
    """
    maker = make_maker(data, target)
    for index, source in enumerate(data.sources):
        yield from _preview_source(maker, data, index, source_name(source), count, colour)


def _preview_source(maker: Maker, data: Data, index: int, name: str, count: int, colour: bool) -> Iterator[Text]:
    files = [file for file in find_files(data) if file.source == index]
    reasons: Counter[str] = Counter()
    odd: Counter[str] = Counter()
    shown = read = 0
    for job, made in run_jobs(maker, find_jobs(data, files), workers=1):
        read += len(made.kinds)
        odd += made.odd
        reasons.update(refusal.reason for refusal in made.refusals)
        for draft in made.drafts[: count - shown]:
            shown += 1
            mask = draft.loss_mask
            place = job.chunk.place(draft.line)
            yield Text(f"--- {name}: {place}: {len(mask)} tokens, {int(mask.sum())} supervised", style="bold")
            yield marked(maker.encoder, draft.token_ids, mask, colour=colour)
        if shown >= count or read >= _CHUNKS_PER_FILE * 1000:
            break
    for reason, times in reasons.most_common():
        yield Text(f"{name}: {times} of the first {read} records rejected: {reason}", style="yellow")
    for oddity, times in odd.most_common():
        yield Text(f"{name}: warning: {times} of the first samples: {oddity}", style="bold red")
    if not shown:
        yield Text(f"{name}: no sample in the first {read} records", style="bold red")


def marked(encoder: Encoder, token_ids: TokenIds, loss_mask: LossMask, *, colour: bool) -> Text:
    """A sample's text with the supervised part in colour, or in ⟦brackets⟧."""
    text, position = Text(), 0
    for start, end, supervised in stretches(loss_mask):
        if colour:
            for token in token_ids[start:end].tolist():
                position += 1
                text.append(encoder.decode([token]), (_SUPERVISED if supervised else _CONTEXT)[position % 2])
        else:
            piece = encoder.decode(token_ids[start:end].tolist())
            text.append(f"⟦{piece}⟧" if supervised else piece)
    return text


def stretches(loss_mask: LossMask) -> Iterator[tuple[int, int, bool]]:
    """[start, end) of each stretch of equal mask values, and the value."""
    start = 0
    for position in range(1, len(loss_mask) + 1):
        if position == len(loss_mask) or loss_mask[position] != loss_mask[start]:
            yield start, position, bool(loss_mask[start])
            start = position
