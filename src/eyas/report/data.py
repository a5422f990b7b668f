"""What the report shows of tokens/: lengths, shares, what was left out and why, and one sample of each source."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.data.encode import Encoder
from eyas.data.preview import stretches
from eyas.data.tokens import Sample, Tokens
from eyas.errors import DataError, TargetError
from eyas.run import Run
from eyas.target import load_target

Json = dict[str, Any]

DUPLICATES = ("duplicate", "near_duplicate")
# Kinds within a source may be many; the page stays readable.
_MOST_EXCERPTS = 16
_MOST_STRETCHES = 12
# A long stretch is shown by its two ends: where the mask begins and ends is what people look for.
_HEAD, _TAIL = 360, 160


@dataclass(frozen=True)
class Excerpt:
    """One sample, decoded.

    Attributes:
        stretches: (text, supervised) in order, long texts shortened in their middle.
        whole: whether all stretches are there.
    """

    source: str
    split: str
    tokens: int
    supervised: int
    stretches: list[tuple[str, bool]]
    whole: bool


@dataclass(frozen=True)
class DataFacts:
    """Figures of a token set.

    Attributes:
        manifest: tokens/manifest.json.
        lengths, supervised: tokens and supervised tokens of each sample.
        excerpts: the first sample of each source, in the set's order.
        fault: why nothing could be decoded, in one line; "" where it was.
    """

    manifest: Json
    lengths: npt.NDArray[np.int64] = field(repr=False)
    supervised: npt.NDArray[np.int64] = field(repr=False)
    excerpts: list[Excerpt] = field(repr=False)
    fault: str = ""

    @property
    def supervised_share(self) -> float:
        return float(self.supervised.sum() / max(self.lengths.sum(), 1))

    @property
    def length_figures(self) -> dict[str, float]:
        """Mean, median, 95th percentile and longest, tokens."""
        if not len(self.lengths):
            return {}
        middle, most = np.percentile(self.lengths, [50, 95])
        figures = {"mean": self.lengths.mean(), "median": middle, "95 % at most": most, "longest": self.lengths.max()}
        return {name: float(value) for name, value in figures.items()}

    @property
    def rejections(self) -> list[tuple[str, int]]:
        """Reasons with counts over all sources, the most frequent first."""
        reasons: Counter[str] = Counter()
        for source in self.manifest["by_source"].values():
            reasons.update(source["rejected"])
        return reasons.most_common()

    @property
    def duplicates(self) -> int:
        return sum(count for reason, count in self.rejections if reason in DUPLICATES)

    @property
    def read(self) -> int:
        return sum(source["read"] for source in self.manifest["by_source"].values())


def data_facts(run: Run) -> DataFacts | None:
    """Figures of the run's tokens/, or None where there is no whole set."""
    try:
        tokens = Tokens(run.tokens_dir)
    except DataError:
        return None
    table = tokens.table(["sample_id", "source", "tokens", "supervised"])
    coded = table["source"].combine_chunks().dictionary_encode().indices.to_numpy()
    _, first = np.unique(coded, return_index=True)
    ids = [table["sample_id"][int(row)].as_py() for row in sorted(first)[:_MOST_EXCERPTS]]
    excerpts, fault = [], ""
    try:
        target = load_target(run.recipe.target)
        encoder = Encoder(target.tokenizer, target.eos_token_ids)
        excerpts = [excerpt(sample, encoder) for sample in tokens.fetch(ids)]
    except TargetError as error:
        fault = error.seen
    lengths, supervised = (table[name].to_numpy().astype(np.int64) for name in ("tokens", "supervised"))
    return DataFacts(tokens.manifest, lengths, supervised, excerpts, fault)


def excerpt(sample: Sample, encoder: Encoder) -> Excerpt:
    """A sample's text by stretches of its mask."""
    parts = list(stretches(sample.loss_mask))
    shown = [
        (_shortened(encoder.decode(sample.token_ids[start:end].tolist())), supervised)
        for start, end, supervised in parts[:_MOST_STRETCHES]
    ]
    whole = len(parts) <= _MOST_STRETCHES
    return Excerpt(sample.source, sample.split, len(sample.token_ids), int(sample.loss_mask.sum()), shown, whole)


def _shortened(text: str) -> str:
    left_out = len(text) - _HEAD - _TAIL
    return text if left_out <= 40 else f"{text[:_HEAD]} [… {left_out:,} characters …] {text[-_TAIL:]}"
