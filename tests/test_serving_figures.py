"""Figures of passes beside naive ones, and the journal that they are kept in."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.evaluate.figures import WITH, WITHOUT, Unit, acceptance_of, speedup, summary
from eyas.evaluate.journal import Journal


def figures(tokens: int, wall_s: float, accepted_at: list[int] | None = None, verifications: int = 0) -> dict:
    told = {
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s_per_stream": tokens / wall_s / 2,
        "first_token_s": {"median": 0.1, "p90": 0.2},
    }
    return told | ({"accepted_at": accepted_at, "verifications": verifications} if accepted_at else {})


def passes() -> dict[Unit, dict]:
    """Two sets, two repeats; the drafter makes set `a` twice as fast, and `b` slower."""
    rates = {("a", WITHOUT): 100.0, ("a", WITH): 200.0, ("b", WITHOUT): 100.0, ("b", WITH): 80.0}
    measured = {}
    for (name, variant), rate in rates.items():
        for repeat in range(2):
            counts = ([30, 10], 40) if variant == WITH else (None, 0)
            measured[Unit(variant, name, 4, repeat)] = figures(400, 400 / rate * (1 + repeat / 10), *counts)
    return measured


def test_the_speed_up_is_of_all_tokens_over_all_time() -> None:
    told = summary(passes())
    assert told["sets"]["a"]["speedup"]["4"] == {"mean": 2.0, "low": 2.0, "high": 2.0, "sd": 0.0, "repeats": 2}
    assert told["sets"]["b"]["speedup"]["4"]["mean"] == 0.8
    assert told["speedup"]["4"]["mean"] == pytest.approx((4 + 4) / (2 + 5), abs=1e-4)
    assert told["acceptance_length"] == told["sets"]["a"]["acceptance_length"] == 2.0
    assert told["acceptance_per_position"] == [0.75, 0.25] and told["verifications"] == 160
    assert told["rates"]["4"][WITH]["tokens_per_s"]["high"] == pytest.approx(800 / 7, abs=0.01)


def test_a_repeat_that_only_one_side_has_is_no_ratio() -> None:
    measured = passes()
    del measured[Unit(WITHOUT, "a", 4, 1)]
    only_a = {unit: each for unit, each in measured.items() if unit.set == "a"}
    assert speedup(only_a) == {"mean": 2.0, "low": 2.0, "high": 2.0, "repeats": 1}


@given(st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(0, 50), min_size=3, max_size=3)), min_size=1))
def test_acceptance_adds_up(parts: list[tuple[int, list[int]]]) -> None:
    total = acceptance_of([{"verifications": count, "accepted_at": at} for count, at in parts])
    assert total is not None
    assert total.verifications == sum(count for count, _ in parts)
    assert total.accepted_at.tolist() == np.sum([at for _, at in parts], axis=0).tolist()


def test_the_journal_gives_back_what_was_added_and_begins_anew_under_another_key(tmp_path: Path) -> None:
    path = tmp_path / "serving" / "journal.jsonl"
    journal = Journal(path, "key")
    journal.add({"set": "a", "repeat": 0}, {"tokens": 3})
    journal.add({"set": "b", "repeat": 0}, {"tokens": 4})
    with path.open("ab") as file:  # a kill in the middle of a line
        file.write(b'{"unit":{"set":"c"},"res')
    again = Journal(path, "key")
    assert len(again) == 2 and again.get({"repeat": 0, "set": "b"}) == {"tokens": 4}
    assert again.get({"set": "c"}) is None
    again.add({"set": "c"}, {"tokens": 5})
    assert Journal(path, "key").get({"set": "c"}) == {"tokens": 5}
    assert all(json.loads(line) for line in path.read_text().splitlines())
    assert len(Journal(path, "other")) == 0
