"""Which samples stay, and in which split: doubles, held-out split, budgets and the limit, bucket by bucket."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.data.account import LATE_REASONS, Account
from eyas.data.spill import SPLITS, Light, Spill
from eyas.data.tokens import Sample, Split, TokensWriter
from eyas.settings import Data

_TRAIN, _HELDOUT = SPLITS.index("train"), SPLITS.index("heldout")
_DUPLICATE, _OVER_BUDGET, _OVER_LIMIT = (
    LATE_REASONS.index(name) for name in ("duplicate", "over_budget", "over_limit")
)
_MIN_HELDOUT = 4


@dataclass
class Plan:
    """What a first look at all samples settles.

    Attributes:
        threshold: conversations with a digest below it are held out.
        room: samples that each split may have.
        budget: tokens that each source may give.
    """

    threshold: int
    room: dict[int, float]
    budget: list[float]

    @property
    def is_open(self) -> bool:
        """Whether everything fits."""
        return all(value == np.inf for value in (*self.room.values(), *self.budget))


class Chooser:
    """Chooses among spilled samples.

    Attributes:
        kept: per record, whether a sample of it is in the set.
        late: per record, why it is left out all the same: index into LATE_REASONS.
    """

    def __init__(
        self, data: Data, spill: Spill, account: Account, files: list[str], barred: npt.NDArray[np.uint8]
    ) -> None:
        """`barred`: per record, index into LATE_REASONS where it is left out already, else 0."""
        self._data, self._spill, self._account, self._files = data, spill, account, files
        self._open = barred == 0
        self.kept = np.zeros(account.records, dtype=np.bool_)
        self.late = barred.copy()
        self._doubles: dict[int, npt.NDArray[np.int64]] = {}  # bucket -> rows that may get a line

    def write(self, writer: TokensWriter) -> None:
        """Write the chosen samples in their order, and a line for every double."""
        plan = self._plan()
        labels = self._account.labels
        for bucket in range(self._spill.buckets):
            light = self._spill.light(bucket)
            rows, doubles = _unique(light, self._open)
            self._note_doubles(bucket, light, doubles)
            self._note_barred(light, writer)
            splits = _splits(light, plan.threshold)
            chosen = rows if plan.is_open else self._admitted(light, rows, splits, plan)
            self.kept[light["record"][chosen]] = True
            for row, (ids, mask) in zip(chosen.tolist(), self._spill.payload(bucket, chosen), strict=True):
                split: Split = "heldout" if splits[row] == _HELDOUT else "train"
                sample_id = f"{int(light['id_high'][row]):016x}{int(light['id_low'][row]):016x}"
                writer.add(Sample(sample_id, labels[int(light["label"][row])], split, ids, mask))
        self._tell_doubles(writer)

    def _plan(self) -> Plan:
        """Count what there is, light columns only."""
        sources = len(self._data.sources)
        available = np.zeros(sources)
        smallest: list[int] = []
        given: Counter[int] = Counter()
        below = open_samples = 0
        threshold = int(self._data.heldout_fraction * 2.0**64)
        of_label = np.array([self._account.source_of(label) for label in range(len(self._account.labels))])
        for bucket in range(self._spill.buckets):
            light = self._spill.light(bucket)
            rows, _ = _unique(light, self._open)
            available += np.bincount(of_label[light["label"][rows]], light["tokens"][rows], sources)
            split = light["split"][rows]
            given.update({code: int((split == code).sum()) for code in (_TRAIN, _HELDOUT)})
            keys = light["conversation"][rows][split == 0]
            open_samples += len(keys)
            below += int((keys < min(threshold, 2**64 - 1)).sum())
            smallest = np.unique(np.concatenate([np.array(smallest, np.uint64), keys]))[: 2 * _MIN_HELDOUT].tolist()
        if threshold and not below and not given[_HELDOUT] and len(smallest) > 1:
            # Too few conversations for the fraction: the four with the lowest digests, or half where there are fewer.
            threshold = smallest[min(_MIN_HELDOUT, len(smallest) // 2)]
            below = min(_MIN_HELDOUT, len(smallest) // 2)
        counts = {_TRAIN: given[_TRAIN] + open_samples - below, _HELDOUT: given[_HELDOUT] + below}
        return Plan(threshold, _room(counts, self._data.limit), _budgets(self._data, available))

    def _admitted(
        self, light: Light, rows: npt.NDArray[np.intp], splits: npt.NDArray[np.uint8], plan: Plan
    ) -> npt.NDArray[np.intp]:
        return np.array([row for row in rows.tolist() if self._admit(light, row, splits, plan)], dtype=np.intp)

    def _admit(self, light: Light, row: int, splits: npt.NDArray[np.uint8], plan: Plan) -> bool:
        """Whether a sample still fits; what doesn't fit is noted."""
        source = self._account.source_of(int(light["label"][row]))
        split, record = int(splits[row]), int(light["record"][row])
        if plan.budget[source] <= 0:
            self.late[record] = self.late[record] or _OVER_BUDGET
            return False
        if plan.room[split] <= 0:
            self.late[record] = self.late[record] or _OVER_LIMIT
            return False
        plan.room[split] -= 1
        plan.budget[source] -= int(light["tokens"][row])
        return True

    def _note_barred(self, light: Light, writer: TokensWriter) -> None:
        """A line for each record that was left out before."""
        for row in np.flatnonzero(~self._open[light["record"]] & (light["turn"] == 0)).tolist():
            reason = LATE_REASONS[self.late[light["record"][row]]]
            writer.reject(self._line(light, row, reason, "much the same as an earlier record"))

    def _line(self, light: Light, row: int, reason: str, detail: str) -> dict[str, Any]:
        source = self._account.labels[int(light["label"][row])]
        place = {"file": self._files[int(light["file"][row])], "line": int(light["line"][row])}
        return {"source": source, **place, "reason": reason, "detail": detail}

    def _note_doubles(self, bucket: int, light: Light, doubles: npt.NDArray[np.intp]) -> None:
        noted = []
        for row in doubles.tolist():
            record = int(light["record"][row])
            if self.late[record] in (0, _OVER_BUDGET, _OVER_LIMIT):
                self.late[record] = _DUPLICATE
                noted.append(row)
        if noted:
            self._doubles[bucket] = np.array(noted)

    def _tell_doubles(self, writer: TokensWriter) -> None:
        """A line for each double whose record has no other sample in the set, which is known at the end only."""
        for bucket, rows in self._doubles.items():
            light = self._spill.light(bucket)
            for row in rows[~self.kept[light["record"][rows]]].tolist():
                sample_id = f"{int(light['id_high'][row]):016x}{int(light['id_low'][row]):016x}"
                writer.reject(self._line(light, row, "duplicate", f"the same sample as {sample_id}"))


def _unique(light: Light, open_records: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Rows in the seeded order, the first record of each sample; and the rows that repeat one."""
    order = np.lexsort(tuple(light[name] for name in ("turn", "record", "id_low", "id_high", "key")))
    order = order[open_records[light["record"][order]]]
    high, low = light["id_high"][order], light["id_low"][order]
    repeats = np.zeros(len(order), dtype=np.bool_)
    repeats[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    return order[~repeats], order[repeats]


def _splits(light: Light, threshold: int) -> npt.NDArray[np.uint8]:
    """Split of each row: its own, else by its conversation's digest."""
    heldout = light["conversation"] < np.uint64(min(threshold, 2**64 - 1))
    return np.where(light["split"] > 0, light["split"], np.where(heldout, _HELDOUT, _TRAIN)).astype(np.uint8)


def _room(available: dict[int, int], limit: int) -> dict[int, float]:
    """How many samples of each split fit the limit: the ratio kept, at least four held-out ones where there are."""
    total = sum(available.values())
    if not limit or total <= limit:
        return {_TRAIN: float("inf"), _HELDOUT: float("inf")}
    heldout = max(round(limit * available[_HELDOUT] / total), _MIN_HELDOUT)
    heldout = min(heldout, available[_HELDOUT], max(limit // 2, 1))
    return {_TRAIN: float(limit - heldout), _HELDOUT: float(heldout)}


def _budgets(data: Data, available: npt.NDArray[np.float64]) -> list[float]:
    """Tokens each source may give: its own budget, and, where weights are set, the most that keeps their ratio."""
    budgets = np.array([source.budget_tokens or np.inf for source in data.sources])
    weights = np.array([source.weight for source in data.sources])
    if weights.any():
        with np.errstate(divide="ignore"):
            total = (np.minimum(budgets, available) / weights).min()
        budgets = np.minimum(budgets, weights * total)
    return [float(budget) for budget in budgets]
