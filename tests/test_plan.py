"""`eyas plan`: figures by hand, what other tools would need beside ours, and every shortfall."""

import json
from pathlib import Path

import pytest
from conftest import ROOT
from typer.testing import CliRunner

from eyas.cli import app, commands
from eyas.errors import RecipeError

commands.register(app)


def run_plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(
        f'runs_dir = "{tmp_path / "runs"}"\ntarget.path = "/nowhere/Kimi"\n'
        'data.sources = [{ path = "a.jsonl" }, { preset = "gsm8k" }]\n'
    )
    return path


def test_kimi_as_it_was_planned_by_hand(recipe: Path) -> None:
    """87.8M tokens of H 7168: 57,344 bytes a token and 72 hours at 339 tokens/s were worked out by hand."""
    told = run_plan(str(recipe), "--tokens", "87800000", "--hidden-size", "7168", "--rate", "339", "--share", "0.5")
    assert "5.03 TB (4.58 TiB) as four bf16 states a token" in told
    assert "4.41 TB (4.01 TiB) in bf16, 50,181 bytes a token" in told
    assert "2.52 TB (2.29 TiB) if store.encoding were fp8" in told
    assert "71.9 hours at 339 tokens/s" in told
    assert "short:    disk, by" in told
    assert "a.jsonl: missing, no file at" in told
    assert "gsm8k: from the hub, openai/gsm8k" in told


def test_the_eight_sources_need_no_fetch_to_be_planned(tmp_path: Path) -> None:
    told = run_plan(str(ROOT / "examples/eight_sources.toml"), "--set", f"runs_dir={tmp_path}", "--hidden-size", "4096")
    assert "data      8 sources" in told
    assert "90,000,000 (the sources' budgets; 1 without one not counted)" in told
    assert "ultrachat-200k: from the hub, HuggingFaceH4/ultrachat_200k" in told


def test_counts_of_prepare_go_before_budgets(recipe: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "runs/r/tokens"
    tokens.mkdir(parents=True)
    (tokens / "manifest.json").write_text(json.dumps({"tokens": 1000, "supervised_tokens": 250}))
    told = run_plan(str(recipe), "--hidden-size", "64")
    assert "1,000 (counted by prepare), 0.25 of them supervised (counted by prepare)" in told
    assert "421 bytes a token" in told  # 6 * 64 + 0.25 * 2 * 64 + 5


def test_what_cannot_be_known_is_asked_for(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="number of tokens is not known") as error:
        run_plan(str(recipe))
    assert "--tokens N" in error.value.next
    with pytest.raises(RecipeError, match="hidden size is not known") as error:
        run_plan(str(recipe), "--tokens", "10")
    assert "--hidden-size N" in error.value.next


def test_a_budget_that_is_too_small_is_said(recipe: Path) -> None:
    told = run_plan(str(recipe), "--tokens", "1000", "--hidden-size", "64", "--set", "store.max_bytes=1000")
    assert "short:    store.max_bytes = 1.00 kB" in told
