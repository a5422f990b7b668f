"""`eyas report A B`: what differs, what came of it, and whether the difference is more than chance."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from helpers_export import make_run
from test_report_page import EVALUATION, Page, fill

from eyas.errors import RecipeError
from eyas.report.compare import paired_difference, write_comparison
from eyas.report.facts import standard_error
from eyas.run import Run, open_run


def by_sample(seed: int, gain: float = 0.0, count: int = 64) -> dict[str, str]:
    """Counts of 33 verifications each; `gain` more accepted drafts a verification."""
    shares = 0.4 + 0.5 * np.random.default_rng(0).random(count)  # of the prompts, the same for both
    accepted = np.random.default_rng(seed).poisson(33 * (shares + gain))
    return {f"{place:012x}": f"{number}/33" for place, number in enumerate(accepted)}


@pytest.fixture
def two(tmp_path: Path, tiny_target: Path) -> tuple[Run, Run]:
    first = make_run(tmp_path, tiny_target)
    fill(first, tiny_target)
    second = open_run(tmp_path / "tiny.toml", ["name=other", "train.lr=5e-4"])
    fill(second, tiny_target)
    better = EVALUATION | {"acceptance_length": 1.9543, "acceptance_per_position": [0.6, 0.25, 0.1043]}
    better |= {"by_sample": by_sample(2, 0.3)}
    (first.dir / "eval.json").write_text(json.dumps(EVALUATION | {"by_sample": by_sample(1)}))
    (second.dir / "eval.json").write_text(json.dumps(better))
    return first, second


def test_two_runs_side_by_side(two: tuple[Run, Run]) -> None:
    path = write_comparison(*two)
    assert path == two[0].dir / "compare-other.html"
    page = Page(path.read_text())
    for words in (
        "Acceptance length 1.654 against 1.954 (chain of 3 drafts, temperature 0). On the 64 held-out samples of both",
        "more than the choice of samples explains",
        "another seed of training may differ as much",
        "acceptance length 1.654 1.954 +18.1%",
        "acceptance length, gsm8k 1.900 1.900 +0.0%",
        "train.lr 0.0001 0.0005",
        "other, step 400: training loss 2",
    ):
        assert words in page.text, words


def test_equal_runs_differ_in_nothing(two: tuple[Run, Run]) -> None:
    page = Page(write_comparison(two[0], two[0]).read_text())
    assert (
        "they differ by +0.000, not more than the choice of samples explains" in page.text
        and "key tiny tiny nothing" in page.text
    )


def test_other_terms_are_not_compared(two: tuple[Run, Run]) -> None:
    (two[1].dir / "eval.json").write_text(json.dumps(EVALUATION | {"drafts": 5}))
    assert "can't be compared: chain of 3 drafts" in Page(write_comparison(*two).read_text()).text


def test_a_run_that_is_not_there(two: tuple[Run, Run], tmp_path: Path) -> None:
    missing = open_run(tmp_path / "tiny.toml", ["name=missing"])
    with pytest.raises(RecipeError, match="missing: no such run yet"):
        write_comparison(two[0], missing)


def test_counts_that_are_not_there_are_told(two: tuple[Run, Run]) -> None:
    (two[1].dir / "eval.json").write_text(json.dumps(EVALUATION))
    text = Page(write_comparison(*two).read_text()).text
    assert "not compared sample by sample: the two share 0" in text and "explains" not in text


def test_the_standard_error_of_a_pair_is_what_resampling_gives() -> None:
    """Samples drawn again and again, both drafters on the same ones; taken unpaired it would be far larger."""
    random = np.random.default_rng(5)
    passes = random.integers(5, 60, 400)
    share = random.random(400)  # of a prompt: both drafters find the same ones easy
    counts = np.stack([random.poisson(passes * share), passes, random.poisson(passes * (share + 0.05)), passes], 1)
    gain, error = paired_difference(counts.astype(float))
    drawn = [paired_difference(counts[random.integers(0, 400, 400)].astype(float))[0] for _ in range(2000)]
    assert gain == pytest.approx(0.05, abs=3 * error) and error == pytest.approx(np.std(drawn), rel=0.1)
    apart = [counts[random.integers(0, 400, 400), 0].sum() / passes.sum() for _ in range(500)]
    assert np.std(apart) > 1.5 * error


def test_the_standard_error_is_that_of_the_accepted_drafts() -> None:
    counts = np.random.default_rng(0).choice(4, 2113, p=[0.58, 0.25, 0.1, 0.07])
    shares = [float((counts > place).mean()) for place in range(3)]
    assert standard_error(shares, len(counts)) == pytest.approx(counts.std() / math.sqrt(len(counts)))
