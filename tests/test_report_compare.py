"""`eyas report A B`: what differs, what came of it, and whether the difference is more than chance."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from helpers_export import make_run
from test_report_page import EVALUATION, Page, fill

from eyas.errors import RecipeError
from eyas.report.compare import _standard_error, write_comparison
from eyas.report.facts import gather
from eyas.run import Run, open_run


@pytest.fixture
def two(tmp_path: Path, tiny_target: Path) -> tuple[Run, Run]:
    first = make_run(tmp_path, tiny_target)
    fill(first, tiny_target)
    second = open_run(tmp_path / "tiny.toml", ["name=other", "train.lr=5e-4"])
    fill(second, tiny_target)
    better = EVALUATION | {"acceptance_length": 1.9543, "acceptance_per_position": [0.6, 0.25, 0.1043]}
    (second.dir / "eval.json").write_text(json.dumps(better))
    return first, second


def test_two_runs_side_by_side(two: tuple[Run, Run]) -> None:
    path = write_comparison(*two)
    assert path == two[0].dir / "compare-other.html"
    page = Page(path.read_text())
    for words in (
        "Acceptance length 1.654 against 1.954 (chain of 3 drafts, temperature 0): more than chance explains",
        "acceptance length 1.654 1.954 +18.1%",
        "acceptance length, gsm8k 1.900 1.900 +0.0%",
        "train.lr 0.0001 0.0005",
        "other, step 400: training loss 2",
    ):
        assert words in page.text, words


def test_equal_runs_differ_in_nothing(two: tuple[Run, Run]) -> None:
    page = Page(write_comparison(two[0], two[0]).read_text())
    assert "not more than chance explains" in page.text and "key tiny tiny nothing" in page.text


def test_other_terms_are_not_compared(two: tuple[Run, Run]) -> None:
    (two[1].dir / "eval.json").write_text(json.dumps(EVALUATION | {"drafts": 5}))
    assert "can't be compared: chain of 3 drafts" in Page(write_comparison(*two).read_text()).text


def test_a_run_that_is_not_there(two: tuple[Run, Run], tmp_path: Path) -> None:
    missing = open_run(tmp_path / "tiny.toml", ["name=missing"])
    with pytest.raises(RecipeError, match="missing: no such run yet"):
        write_comparison(two[0], missing)


def test_the_standard_error_is_that_of_the_accepted_drafts(two: tuple[Run, Run]) -> None:
    counts = np.random.default_rng(0).choice(4, 2113, p=[0.58, 0.25, 0.1, 0.07])
    shares = [float((counts > place).mean()) for place in range(3)]
    told = EVALUATION | {"acceptance_per_position": shares, "verifications": len(counts)}
    (two[0].dir / "eval.json").write_text(json.dumps(told))
    assert _standard_error(gather(two[0])) == pytest.approx(counts.std() / math.sqrt(len(counts)))
