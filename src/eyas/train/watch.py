"""What optimizer steps say of themselves: kept on the device, read only where something is written down.

A step must not wait for the device, so nobody looks at its loss when it ends. A step whose loss or gradient is not
finite still may not move a weight: `Watch.guard` gives the optimizer a flag on the device that makes it no step, and
every later one too, until `Watch.check` reads the flag. So the weights stay as they were before the first bad step.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor


@dataclass(frozen=True)
class StepFigures:
    """One optimizer step in numbers; lists are by step k of the training-time test."""

    loss: float
    loss_per_step: list[float]
    acceptance: list[float]
    grad_norm: float
    lr: float

    def as_json(self) -> dict[str, Any]:
        return {
            "loss": round(self.loss, 5),
            "loss_per_step": [round(value, 5) for value in self.loss_per_step],
            "acceptance": [round(value, 4) for value in self.acceptance],
            "grad_norm": round(self.grad_norm, 4),
            "lr": self.lr,
        }


@dataclass(frozen=True)
class StepSums:
    """The same before it is read.

    Attributes:
        loss: mean over the step's trained rows, a scalar.
        per_step: the same of each k without its weight, [K].
        hits, rows: drafts that are the target's argmax, and trained rows, [K].
        grad_norm: before clipping, a scalar.
        tokens: of all packed samples.
        flops: of the matrix products that the step can't do without.
    """

    loss: Tensor
    per_step: Tensor
    hits: Tensor
    rows: Tensor
    grad_norm: Tensor
    lr: float
    tokens: int
    flops: float

    @classmethod
    def of_nothing(cls, ttt_steps: int, lr: float, tokens: int) -> "StepSums":
        """A step whose samples train nothing."""
        nothing, none = torch.zeros(ttt_steps), torch.zeros(())
        return cls(none, nothing, nothing, nothing, none, lr, tokens, 0.0)

    def read(self) -> StepFigures:
        """Waits for the device."""
        acceptance = self.hits.cpu() / self.rows.cpu().clamp(min=1)
        return StepFigures(
            loss=float(self.loss),
            loss_per_step=self.per_step.tolist(),
            acceptance=acceptance.tolist(),
            grad_norm=float(self.grad_norm),
            lr=self.lr,
        )


@dataclass(frozen=True)
class Anomaly:
    """The first step, counted from 0, whose loss or gradient is not finite; no weight moved in it or after it."""

    step: int
    loss: float
    grad_norm: float
    sample_ids: list[str]


class Watch:
    """Holds back bad steps and remembers which samples made them."""

    def __init__(self, device: torch.device) -> None:
        self._held = torch.zeros((), device=device)
        self._recent: list[tuple[int, Tensor, Tensor, list[str]]] = []

    def guard(self, step: int, loss: Tensor, grad_norm: Tensor, sample_ids: Sequence[str]) -> Tensor:
        """0 where this step may move the weights, 1 from the first bad one on: float32 scalar on the device."""
        self._recent.append((step, loss, grad_norm, list(sample_ids)))
        bad = torch.isfinite(loss + grad_norm).logical_not()
        self._held = torch.maximum(self._held, bad.to(self._held.dtype))
        return self._held

    def check(self) -> Anomaly | None:
        """The first bad step since the last look. Waits for the device."""
        recent, self._recent = self._recent, []
        if not recent or not bool(self._held):
            return None
        numbers = torch.stack([torch.stack([loss.float(), norm.float()]) for _, loss, norm, _ in recent]).tolist()
        for (step, _, _, sample_ids), (loss, norm) in zip(recent, numbers, strict=True):
            if not math.isfinite(loss + norm):
                return Anomaly(step, loss, norm, sample_ids)
        raise AssertionError("a step was held back, so one of them is not finite")


class Meter:
    """Tokens and matrix products per second of training alone: what is measured or saved in between is left out."""

    def __init__(self, device: torch.device, peak_flops: float | None) -> None:
        self.device, self.peak_flops = device, peak_flops
        self.tokens, self.flops, self.busy_s = 0, 0.0, 0.0
        self.first_step_s, self._apart = 0.0, 0
        self.go()

    def go(self) -> None:
        """The clock runs from here."""
        self._since = time.perf_counter()

    def add(self, sums: StepSums) -> None:
        self.tokens += sums.tokens
        self.flops += sums.flops

    def settle(self) -> None:
        """Take the time until all work so far is done. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.busy_s += now - self._since
        self._since = now

    def set_apart(self) -> None:
        """All so far was the first step: it compiles and loads kernels, and no rate counts it. Waits for the device."""
        self.settle()
        self.first_step_s, self._apart = self.busy_s, self.tokens
        self.busy_s, self.flops = 0.0, 0.0

    def share(self, seconds: float) -> float:
        """Of the time that counts."""
        return seconds / self.busy_s if self.busy_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return (self.tokens - self._apart) / self.busy_s if self.busy_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """Rates so far; `mfu` only where the device's peak is known."""
        line: dict[str, Any] = {
            "tokens_per_s": round(self.tokens_per_s, 1),
            "first_step_s": round(self.first_step_s, 2),
            "memory_gib": round(memory_gib(self.device), 2),
        }
        if self.peak_flops and self.busy_s:
            line["mfu"] = round(self.flops / self.busy_s / self.peak_flops, 4)
        return line


def memory_gib(device: torch.device) -> float:
    """Most memory in use so far on a GPU; the process's resident memory now on a CPU. GiB."""
    used = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    return float(used) / (1 << 30)
