"""The report's part on the serving engine: what was measured stands there, and where nothing was, nothing does."""

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from helpers_export import make_run, write_record
from helpers_served import SETS, measure, trained_run, tuned, write_curve
from test_report_page import Page, fill

from eyas.errors import VerificationFailed
from eyas.report.compare import write_comparison
from eyas.report.facts import gather, standard_error
from eyas.report.page import commands, rate, render, write_report
from eyas.report.ranges import Curve, Group, Mark, curve_chart, range_chart
from eyas.report.summary import summary_rows
from eyas.run import Run, open_run


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Run:
    """Measured in an engine that is right, tuned afterwards, with a curve."""
    run = measure(trained_run(tmp_path_factory.mktemp("served"), tiny_target))
    tuned(run, {"drafts 5": 130.0, "drafts 4": 120.0}, ("drafts 7",))
    write_curve(run)
    return run


@pytest.fixture
def changed(served: Run, tmp_path: Path) -> Run:
    """A copy that a test may change."""
    shutil.copytree(served.dir, tmp_path / "runs" / served.dir.name)
    return open_run(served.dir / "recipe.toml", [f"runs_dir={tmp_path / 'runs'}"])


def figures_of(run: Run) -> dict[str, Any]:
    return dict(json.loads((run.dir / "serving.json").read_text()))


def change(run: Run, **changes: Any) -> str:
    """The page's text with other values in serving.json."""
    (run.dir / "serving.json").write_text(json.dumps(figures_of(run) | changes))
    return Page(render(gather(run))).text


def test_speed_and_acceptance_stand_there_by_set_and_over_all(served: Run) -> None:
    page, figures = Page(write_report(served).read_text()), figures_of(served)
    assert "vLLM 0.32.0, float32, on cuda: chain of 3 drafts, temperature 0, answers of at most 40 tokens" in page.text
    assert "3 repeats, in turn with and without the drafter, both servers up" in page.text
    for name, part in [*figures["sets"].items(), ("over all", figures)]:
        for count in ("1", "16"):
            told, streams = part["speedup"][count], "1 stream" if count == "1" else "16 streams"
            row = f"{count} {told['mean']:.3f} {told['low']:.3f}–{told['high']:.3f}"
            for key in ("tokens_per_s", "tokens_per_s_per_stream"):
                for variant in ("without", "with"):
                    spread = part["rates"][count][variant][key]
                    row += f" {rate(spread['mean'])} {rate(spread['low'])}–{rate(spread['high'])}"
            for variant in ("without", "with"):
                first = part["rates"][count][variant]["first_token_s"]
                row += f" {rate(first['median'] * 1000)} p90 {rate(first['p90'] * 1000)}"
            assert row in page.text, row
            tip = f"{name}, {streams}: {told['mean']:.3f} times ({told['low']:.3f} to {told['high']:.3f} in 3 repeats)"
            assert tip in page.text, tip
        error = 2 * standard_error(part["acceptance_per_position"], part["verifications"] / 6)
        length = f"{part['acceptance_length']:.3f} ± {error:.3f}"
        assert f"{name} {length}" in page.text and f"{name}: {length}" in page.text, "in the table, and pointed at"
        for place, share in enumerate(part["acceptance_per_position"], start=1):
            assert name == "over all" or f"{name}, position {place}: {share:.1%}" in page.text
    assert set(figures["sets"]) == set(SETS)
    assert "Yes. All 24 conversations are the same, token for token" in page.text
    assert page.text.index("In the engine that serves it") < page.text.index("Training and acceptance")


def test_three_ways_stand_side_by_side(served: Run) -> None:
    found, text = figures_of(served)["parity"], Page(write_report(served).read_text()).text
    for key, name, apart in (
        ("engine", "the engine", ""),
        ("replay", "replay", "0% from the engine"),
        ("decode", "reference decoding", "0% from the engine"),
    ):
        way = found[key]
        shares = ", ".join(f"{share:.1%}" for share in way["acceptance_per_position"])
        row = f"{name} {way['acceptance_length']:.3f} {shares} {way['verifications']} 8 {apart}"
        assert row in text, row
        assert f"{name}, position 1: {way['acceptance_per_position'][0]:.1%}" in text
    low, high = found["engine"]["within"]
    assert f"its count without those: between {low:.3f} and {high:.3f}" in text
    assert "Largest difference 0.00%, of at most 3%: they agree" in text and "may have wrong" not in text


def test_what_the_engine_may_have_wrong_is_listed_in_order(changed: Run) -> None:
    (changed.dir / "tuned-vllm.toml").unlink()
    with pytest.raises(VerificationFailed):
        measure(changed, {"layers": [1, 3, 5]}, dtype="bfloat16", differing=3, concurrency=[4], repeats=1)
    figures, text = figures_of(changed), Page(render(gather(changed))).text
    assert f"Largest difference {figures['parity_gap']:.2%}, of at most 3%: they differ" in text
    causes = figures["parity"]["causes"]
    places = [text.index(f"{one['cause']} {one['acceptance_length']:.3f} {one['from_engine']:.1%}") for one in causes]
    assert places == sorted(places) and len(places) == 5
    assert causes[0]["cause"].startswith("layer ids: the engine captures each aux layer one too low")
    assert "13 of 16 conversations are the same with and without the drafter. In bfloat16 the rest may differ" in text
    tie = figures["parity"]["differences"]["largest_tie"]
    told = (
        f"3 of 8 answers below differ; where the first token differs, the target's logits of the two are at most {tie}"
    )
    assert told in text
    assert "Measured once: no spread of speeds" in text and "in 1 repeats" not in text


def test_other_outcomes_of_the_lossless_check(changed: Run) -> None:
    told = {"same": 22, "of": 24}
    assert "No. 2 of 24 conversations change with the drafter, in float32" in change(
        changed, lossless=False, identical=told
    )
    text = change(changed, lossless=None, temperature=0.7, parity=None, parity_gap=None)
    assert "at temperature 0.7 answers are drawn" in text and "serving.parity_prompts = 0" in text
    assert "this is a tree" in change(changed, parity=None, topology="tree, 8 tokens")


def test_a_drafter_that_was_exported_anew_is_told(changed: Run) -> None:
    assert "exported anew" not in Page(render(gather(changed))).text
    write_record(changed, "export", "another digest")
    assert "these figures are of the one before" in Page(render(gather(changed))).text


def test_what_was_tuned_stands_there_with_its_spread(served: Run) -> None:
    facts = gather(served)
    page, evidence = Page(render(facts)), facts.tuned["vllm"]
    assert "Kept: drafts 5 ." in page.text
    assert "6 configurations for the most tokens/s with 1 stream" in page.text and "3 rounds" in page.text
    measured = [one for one in evidence["configurations"] if "fault" not in one]
    for one in measured:
        spread = 2 * one["noise"] * one["of_first"]
        tip = (
            f"{one['settings']}: {one['tokens_per_s']:,.1f} tokens/s, {one['of_first']:.3f} of the first ± {spread:.3f}"
        )
        assert tip in page.text, tip
        kept = " kept" if one["settings"] == "drafts 5" else ""
        row = f"{one['settings']}{kept} {rate(one['tokens_per_s'])} {rate(one['low'])}–{rate(one['high'])}"
        assert f"{row} {one['of_first']:.3f} ± {spread:.3f} {one['acceptance_length']:.3f} {one['passes']}" in page.text
    assert len(measured) == 5 and "drafts 7 drafts 7 ended by itself" in page.text


def test_the_measured_length_stands_on_the_curve(served: Run) -> None:
    facts = gather(served)
    page, length = Page(render(facts)), figures_of(served)["acceptance_length"]
    assert facts.shape is not None
    curve = {point["acceptance_length"]: point for point in facts.shape["curve"] if point["streams"] == 1}
    for at, point in curve.items():
        told = f"1 stream, acceptance length {at:g}: {point['speedup']:.2f} ({point['low']:.2f} to {point['high']:.2f})"
        assert told in page.text, told
    share = (length - 2) / (3 - 2)
    read = curve[2.0]["speedup"] + share * (curve[3.0]["speedup"] - curve[2.0]["speedup"])
    assert f"1 stream, measured {length:.3f}: {read:.2f} on the curve" in page.text
    assert f"acceptance length by vLLM, {length:.3f}, would be worth {read:.2f} times with 1 stream and" in page.text


def test_without_an_engine_the_curve_holds_the_replays_length(changed: Run) -> None:
    (changed.dir / "serving.json").unlink()
    told = json.loads((changed.dir / "eval.json").read_text())
    (changed.dir / "eval.json").write_text(json.dumps(told | {"acceptance_length": 2.6}))
    page = Page(render(gather(changed)))
    assert "acceptance length by replay, 2.600, would be worth" in page.text


def test_a_missing_file_draws_nothing(changed: Run) -> None:
    for path, heading in (
        ("serving.json", "In the engine that serves it"),
        ("tuned-vllm.toml", "Tuning in vLLM"),
        ("bench/shape.json", "What an acceptance length is worth"),
    ):
        assert heading in Page(render(gather(changed))).text
        (changed.dir / path).unlink()
        assert heading not in Page(render(gather(changed))).text
    assert "acceptance length, replay" not in Page(render(gather(changed))).text


def test_names_of_sets_and_settings_are_escaped(served: Run) -> None:
    html = write_report(served).read_text()
    assert "alpaca &lt;b&gt;" in html and "alpaca <b>" not in html


def test_the_commands_make_it_again(served: Run) -> None:
    told = commands(gather(served))
    assert f"eyas evaluate {served.dir}/recipe.toml --engine vllm" in told
    assert f"eyas tune {served.dir}/recipe.toml --engine vllm --choices own --streams 1 --minutes 1" in told
    assert any(line.startswith("python benchmarks/serving_sglang.py") for line in told)
    assert "--speculative-config" in Page(render(gather(served))).text, "the servers' commands"


def test_the_summary_has_the_engines_figures(served: Run) -> None:
    mean = figures_of(served)["speedup"]["1"]["mean"]
    assert dict(summary_rows(gather(served), Path("r")))["in vLLM"] == f"{mean:.2f} times the target alone, 1 stream"


def test_a_comparison_shows_both_engines(served: Run, tmp_path: Path, tiny_target: Path) -> None:
    other = make_run(tmp_path, tiny_target)
    fill(other, tiny_target)
    told = figures_of(served)
    text = Page(write_comparison(other, served).read_text()).text
    assert f"acceptance length {told['acceptance_length']:.3f} 1 stream: speed-up" in text, "one of them is enough"
    assert "not the same" not in text
    mean, told["speedup"]["1"]["mean"] = told["speedup"]["1"]["mean"], 1.1 * told["speedup"]["1"]["mean"]
    (other.dir / "serving.json").write_text(json.dumps(told | {"version": "0.33.0"}))
    text = Page(write_comparison(served, other).read_text()).text
    assert f"1 stream: speed-up {mean:.3f} {1.1 * mean:.3f} +10.0%" in text
    for key, name in (("tokens_per_s", "tokens/s"), ("tokens_per_s_per_stream", "tokens/s of a stream")):
        value = rate(told["rates"]["16"]["with"][key]["mean"])
        assert f"16 streams: {name} {value} {value} +0.0%" in text
    assert "16 streams: first token, ms 21.0 21.0 +0.0%" in text
    assert "acceptance length, gsm8k 2.525 2.525 +0.0%" in text
    assert "t: vLLM 0.32.0, float32" in text and "tiny: vLLM 0.33.0" in text and "These are not the same" in text
    (other.dir / "serving.json").unlink()
    assert "In the engine" not in Page(write_comparison(other, other).read_text()).text


def test_a_range_chart_places_dots_and_spreads() -> None:
    marks = [Mark(1.5, 1.0, 2.0, "1.50", "<tip>", "s1"), Mark(1.0, 1.0, 1.0, "1.00", "none", "s2")]
    svg = ET.fromstring(range_chart([Group("<a>", marks)], [("k", "s1")], "times", 1.0))
    first, second = (circle for circle in svg.iter("circle"))
    (spread,) = (line for line in svg.iter("line") if "whisker" in line.get("class", ""))
    low, high = float(spread.get("x1", "")), float(spread.get("x2", ""))
    assert float(first.get("cx", "")) == pytest.approx((low + high) / 2) and float(second.get("cx", "")) == low
    assert float(first.get("cy", "")) < float(second.get("cy", ""))
    assert [title.text for title in svg.iter("title")] == ["<tip>", "none"]
    assert "no measurements yet" in range_chart([], [], "times", 1.0)


def test_a_curve_is_read_between_its_points_only() -> None:
    curve = Curve("one", [(1.5, 1.0, 0.9, 1.1), (2.5, 2.0, 1.9, 2.1)], "s1")
    assert curve.at(2.0) == pytest.approx(1.5) and curve.at(1.4) is None and curve.at(2.5) == 2.0
    for at, rings in ((2.0, 1), (1.2, 0)):
        svg = ET.fromstring(curve_chart([curve], ("x", "y"), 1.0, (at, f"measured {at}")))
        assert sum("ring" in circle.get("class", "") for circle in svg.iter("circle")) == rings
        (upright,) = (line for line in svg.iter("line") if line.get("class") == "found")
        assert 0 < float(upright.get("x1", "")) < 400
    assert "found" not in curve_chart([curve], ("x", "y"), 1.0, None)


def test_rates_have_three_digits_or_all() -> None:
    assert [rate(value) for value in (0.834, 6.64, 12.34, 123.4, 1234.5)] == ["0.83", "6.64", "12.3", "123", "1,234"]
