"""Early stop: the best held-out acceptance length, and how long ago that was (`train.patience`).

A loss that still falls does not mean a drafter that is accepted more: someone's peaked at 4.6 epochs (3.34) and had
lost 5% at 10, its loss falling all the while (DeepSpec issue 84). With patience the best checkpoint is kept whatever
keep_checkpoints says, and it is the one that is evaluated and exported.
"""

from dataclasses import dataclass, field
from typing import Any

from eyas.drafter.walk import Acceptance


@dataclass
class Patience:
    """Counts measurements since the best one.

    Attributes:
        limit: measurements without improvement until training stops; 0: never, and nothing is counted.
        best_step: step of the best so far; 0 before the first.
        best: that measurement, as the log has it.
        since: measurements after it.
    """

    limit: int
    best_step: int = 0
    best: dict[str, Any] = field(default_factory=dict)
    since: int = 0

    def saw(self, step: int, measured: Acceptance) -> bool:
        """Take a measurement; True where it is the best so far (an equal one later is not)."""
        if not self.limit:
            return False
        found = measured.as_json()
        better = (found["acceptance_length"] or 0.0) > self.best.get("acceptance_length", 0.0)
        if better:
            self.best_step, self.best, self.since = step, found, 0
        else:
            self.since += 1
        return better

    @property
    def exhausted(self) -> bool:
        return bool(self.limit) and self.since >= self.limit

    def as_json(self) -> dict[str, Any]:
        """As checkpoints keep it."""
        return {"best_step": self.best_step, "best": self.best, "since": self.since}
