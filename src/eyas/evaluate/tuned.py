"""What `eyas tune` measured of each configuration, and what came of it: as evidence in the profile, and as a table."""

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.engine.choices import Configuration
from eyas.engine.drafting import Drafting
from eyas.evaluate.figures import acceptance_of
from eyas.run import Run


@dataclass
class Candidate:
    """A configuration and what was measured of it.

    Attributes:
        drafting: its drafter settings.
        run: whose server it is.
        rounds: round -> tokens/s of each of its passes.
        figures: of all its passes.
        fault: why it can't be served; "" where it can.
    """

    configuration: Configuration
    drafting: Drafting
    run: Run
    rounds: dict[int, list[float]] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    fault: str = ""

    @property
    def name(self) -> str:
        return self.configuration.name

    def ratios(self, first: "Candidate") -> list[float]:
        """Rate as a share of the first configuration's, for each round in which both were measured."""
        shared = sorted(self.rounds.keys() & first.rounds.keys())
        return [statistics.fmean(self.rounds[at]) / statistics.fmean(first.rounds[at]) for at in shared]

    def score(self, first: "Candidate") -> float:
        return statistics.fmean(self.ratios(first)) if self.ratios(first) else 0.0

    @property
    def passes(self) -> int:
        return sum(len(rates) for rates in self.rounds.values())

    def as_json(self, first: "Candidate", noise: float) -> dict[str, Any]:
        rates = [rate for each in self.rounds.values() for rate in each]
        told: dict[str, Any] = {"settings": self.configuration.text}
        if self.fault:
            return told | {"fault": self.fault}
        if not rates:
            return told | {"fault": "not tried: the time was over"}
        acceptance = acceptance_of(self.figures)
        return told | {
            "tokens_per_s": round(statistics.fmean(rates), 2),
            "low": round(min(rates), 2),
            "high": round(max(rates), 2),
            "passes": self.passes,
            "rounds": len(self.rounds),
            "of_first": round(self.score(first), 4),
            "noise": round(noise / math.sqrt(len(rates)), 4),
            "acceptance_length": round(acceptance.length, 4) if acceptance else 0.0,
        }


@dataclass
class Tuned:
    """What came of it.

    Attributes:
        best: the configuration that is kept.
        candidates: all that were tried, the fastest first.
        path: the profile that was written.
        evidence: as it stands in the profile.
    """

    best: Candidate
    candidates: list[Candidate]
    path: Path
    evidence: dict[str, Any]


def lines(tuned: Tuned) -> list[str]:
    """The configurations as a table of plain lines, the fastest first."""
    rows = [f"{'settings':60} {'tokens/s':>10} {'of first':>9} {'noise':>7} {'passes':>7} {'length':>7}"]
    for entry in tuned.evidence["configurations"]:
        if "fault" in entry:
            rows.append(f"{entry['settings']:60} {entry['fault']}")
            continue
        rows.append(
            f"{entry['settings']:60} {entry['tokens_per_s']:>10,.1f} {entry['of_first']:>9.3f} {entry['noise']:>7.3f} "
            f"{entry['passes']:>7} {entry['acceptance_length']:>7.3f}"
        )
    why = ": nothing is faster by more than noise" if tuned.evidence["kept_first"] else ""
    return [*rows, f"best: {tuned.best.configuration.text}{why}"]
