"""What passes over prompt sets say: acceptance, rates, and the speed-up with its spread."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.drafter.walk import Acceptance

WITHOUT, WITH = "without", "with"


@dataclass(frozen=True)
class Unit:
    """One pass: a set, asked by so many streams, of a server with or without the drafter.

    Attributes:
        variant: "with", "without", or the name of a configuration.
        repeat: number from 0.
    """

    variant: str
    set: str
    streams: int
    repeat: int


Measured = Mapping[Unit, Mapping[str, Any]]


def acceptance_of(figures: Sequence[Mapping[str, Any]]) -> Acceptance | None:
    """All verifications of some passes; None where there are none."""
    counted = [each for each in figures if each.get("accepted_at")]
    if not counted:
        return None
    total = Acceptance.none(max(len(each["accepted_at"]) for each in counted))
    for each in counted:
        total.verifications += each["verifications"]
        total.accepted_at[: len(each["accepted_at"])] += np.array(each["accepted_at"], np.int64)
    return total


def summary(measured: Measured) -> dict[str, Any]:
    """Per set and over all: acceptance, rates and speed-up for each number of streams."""
    names = list(dict.fromkeys(unit.set for unit in measured))
    sets = {name: _of(_only(measured, set=name)) for name in names}
    return {"sets": sets, **_of(measured)}


def speedup(measured: Measured) -> dict[str, float] | None:
    """Tokens/s with the drafter / without, one ratio a repeat: mean, smallest, largest, standard deviation.

    Over several sets it is of all tokens over all time.
    """
    repeats = sorted({unit.repeat for unit in measured})
    ratios = []
    for repeat in repeats:
        rates = [_rate(_only(measured, repeat=repeat, variant=variant)) for variant in (WITH, WITHOUT)]
        if all(rates):
            ratios.append(rates[0] / rates[1])
    if not ratios:
        return None
    spread = {"mean": statistics.fmean(ratios), "low": min(ratios), "high": max(ratios)}
    if len(ratios) > 1:
        spread["sd"] = statistics.stdev(ratios)
    return {name: round(value, 4) for name, value in spread.items()} | {"repeats": len(ratios)}


def _of(measured: Measured) -> dict[str, Any]:
    with_drafter = list(_only(measured, variant=WITH).values())
    acceptance = acceptance_of(with_drafter)
    streams = sorted({unit.streams for unit in measured})
    parts = {str(count): _only(measured, streams=count) for count in streams}
    rates = {
        count: {name: _rates(_only(part, variant=name)) for name in (WITHOUT, WITH)} for count, part in parts.items()
    }
    return {
        **(acceptance.as_json() if acceptance else {}),
        "speedup": {count: speedup(part) for count, part in parts.items()},
        "rates": rates,
    }


def _rates(measured: Measured) -> dict[str, Any] | None:
    """Mean, lowest and highest tokens/s over repeats, and times to the first token."""
    if not measured:
        return None
    repeats = sorted({unit.repeat for unit in measured})
    total = [_rate(_only(measured, repeat=repeat)) for repeat in repeats]
    alone = [_harmonic(list(_only(measured, repeat=repeat).values()), "tokens_per_s_per_stream") for repeat in repeats]
    first = [each["first_token_s"] for each in measured.values()]
    return {
        "tokens_per_s": _spread(total),
        "tokens_per_s_per_stream": _spread(alone),
        "first_token_s": {name: round(statistics.fmean(each[name] for each in first), 4) for name in ("median", "p90")},
        "tokens": sum(each["tokens"] for each in measured.values()),
    }


def _rate(measured: Measured) -> float:
    """All tokens over all time; 0 without any."""
    wall_s = math.fsum(each["wall_s"] for each in measured.values())
    return sum(each["tokens"] for each in measured.values()) / wall_s if wall_s else 0.0


def _harmonic(figures: Sequence[Mapping[str, Any]], key: str) -> float:
    """A rate over passes, each weighed by its tokens."""
    return sum(each["tokens"] for each in figures) / math.fsum(each["tokens"] / each[key] for each in figures)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "mean": round(statistics.fmean(values), 2),
        "low": round(min(values), 2),
        "high": round(max(values), 2),
    }


def _only(measured: Measured, **wanted: Any) -> dict[Unit, Mapping[str, Any]]:
    return {
        unit: figures
        for unit, figures in measured.items()
        if all(getattr(unit, name) == value for name, value in wanted.items())
    }
