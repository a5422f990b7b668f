"""The account of all records: per source, read = kept + rejected by reason."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.data.make import Made
from eyas.errors import DataError

# Why a record that gave good samples is left out after all.
LATE_REASONS = ("", "duplicate", "near_duplicate", "over_budget", "over_limit")
# Reasons that speak of a choice, not of a fault in the data: they don't fail the stage, and neither do late ones.
_CHOICES = ("evaluation_prompt", "drop_pattern", "language", "labelled_bad")
# A source's records may name so many kinds; more (a URL each, say) are counted together.
_MAX_KINDS = 64


@dataclass
class _Counts:
    source: int
    read: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


class Account:
    """Counts records as they come, by label: the source's name, refined by the record's kind.

    Args:
        names: names of the recipe's sources, in order.

    Attributes:
        labels: all labels met so far; a label's number is its place.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.labels: list[str] = []
        self._numbers: dict[str, int] = {}
        self._counts: list[_Counts] = []
        self._kinds = Counter[int]()
        self._of_record: list[npt.NDArray[np.uint16]] = []
        self._examples: dict[str, str] = {}
        self.records = 0
        self.mended: Counter[str] = Counter()
        self.odd: Counter[str] = Counter()

    def source_of(self, label: int) -> int:
        """The recipe's source that a label belongs to."""
        return self._counts[label].source

    def add(self, source: int, made: Made, path: str) -> tuple[int, npt.NDArray[np.uint16], list[dict[str, Any]]]:
        """Count a chunk; returns the number of its first record, the label of each, and lines for rejected.jsonl."""
        labels = np.array([self._label(source, kind) for kind in made.kinds], dtype=np.uint16)
        for label in labels.tolist():
            self._counts[label].read += 1
        lines = []
        for record, line, reason, detail in made.refusals:
            label = int(labels[record])
            self._counts[label].rejected[reason] += 1
            self._examples.setdefault(reason, f"{path}, line {line}" + (f": {detail}" if detail else ""))
            lines.append({"source": self.labels[label], "file": path, "line": line, "reason": reason, "detail": detail})
        first = self.records
        self.records += len(labels)
        self._of_record.append(labels)
        self.mended += made.mended
        self.odd += made.odd
        return first, labels, lines

    def check(self) -> None:
        """Raises: DataError with the top reasons where more than half of the records give no sample."""
        faults: Counter[str] = sum((counts.rejected for counts in self._counts), Counter())
        for reason in _CHOICES:
            faults.pop(reason, None)
        if faults.total() * 2 <= self.records:
            return
        top = faults.most_common(3)
        raise DataError(
            f"{faults.total():,} of {self.records:,} records give no sample: "
            + "; ".join(f"{reason} {count:,} (the first: {self._examples[reason]})" for reason, count in top),
            expected="at least half of them to be usable",
            cause="another model family's chat template, or the wrong `format` of a source",
            next="eyas prepare RECIPE --preview 3   # shows what the masks look like",
        )

    def by_source(
        self, kept: npt.NDArray[np.bool_], late: npt.NDArray[np.uint8], written: dict[str, Counter[str]]
    ) -> dict[str, Any]:
        """The manifest's table.

        Args:
            kept: per record, whether a sample of it is in the set.
            late: per record, index into LATE_REASONS.
            written: samples, tokens and supervised tokens in the set, by label.
        """
        of_record = np.concatenate(self._of_record) if self._of_record else np.zeros(0, np.uint16)
        table = {}
        for label, name in enumerate(self.labels):
            mine = of_record == label
            rejected = Counter(self._counts[label].rejected)
            for code, reason in enumerate(LATE_REASONS[1:], 1):
                rejected[reason] += int((mine & ~kept & (late == code)).sum())
            table[name] = {
                "read": self._counts[label].read,
                "kept": int((mine & kept).sum()),
                "rejected": {reason: count for reason, count in sorted(rejected.items()) if count},
                **{key: written.get(name, Counter())[key] for key in ("samples", "tokens", "supervised_tokens")},
            }
        return table

    def _label(self, source: int, kind: str) -> int:
        name = self._names[source]
        full = f"{name}/{kind}" if kind else name
        if full not in self._numbers and self._kinds[source] >= _MAX_KINDS:
            full = f"{name}/other"
        if full not in self._numbers:
            self._kinds[source] += 1
            self._numbers[full] = len(self.labels)
            self.labels.append(full)
            self._counts.append(_Counts(source))
        return self._numbers[full]
