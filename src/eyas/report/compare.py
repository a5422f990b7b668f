"""Two runs side by side: what differs in their recipes, and what came of it."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas import __version__, fs
from eyas.errors import RecipeError
from eyas.progress import size
from eyas.report.charts import Bars, Line, Panel, bar_chart, line_chart, thin
from eyas.report.facts import Facts, gather
from eyas.report.page import conditions, rate, templates
from eyas.report.serving import streams_name, streams_of, terms
from eyas.run import Run

_MOST_POINTS = 160
# Keys that name a place, not what a run is.
_PLACES = ("name", "runs_dir")
Figure = tuple[str, Callable[[Facts], float | None], Callable[[float], str]]


def write_comparison(first: Run, second: Run) -> Path:
    """Write compare-SECOND.html into the first run's folder; returns its path.

    Raises: RecipeError where one of them has no folder yet.
    """
    for run in (first, second):
        if not run.dir.is_dir():
            raise RecipeError(f"{run.dir}: no such run yet", next=f"{run.command('run')}")
    path = first.dir / f"compare-{second.dir.name}.html"
    fs.write_atomic(path, render_comparison(gather(first), gather(second)))
    return path


def render_comparison(first: Facts, second: Facts) -> str:
    """The page as text."""
    both, names = (first, second), (first.run.dir.name, second.run.dir.name)
    return (
        templates()
        .get_template("compare.html.j2")
        .render(
            title=f"{names[0]} and {names[1]}",
            names=names,
            made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            eyas_version=__version__,
            verdict=verdict(first, second),
            engine_figures=engine_figures(first, second),
            served=[(name, terms(facts.serving)) for name, facts in zip(names, both, strict=True) if facts.serving],
            figures=figures(first, second),
            settings=changed_settings(first, second),
            acceptance_chart=_acceptance_chart(both, names),
            training_chart=_training_chart(both, names),
        )
    )


def verdict(first: Facts, second: Facts) -> str:
    """One sentence on acceptance length, or why there is none."""
    lengths = first.acceptance_length, second.acceptance_length
    if lengths[0] is None or lengths[1] is None:
        return "Acceptance length: not measured in both."
    terms = conditions(first), conditions(second)
    told = f"Acceptance length {lengths[0]:.3f} against {lengths[1]:.3f}"
    if terms[0] != terms[1]:
        return f"{told}, but they can't be compared: {terms[0]} and {terms[1]}."
    told = f"{told} ({terms[0]})"
    ours, theirs = _by_sample(first), _by_sample(second)
    shared = [(*ours[name], *theirs[name]) for name in sorted(ours.keys() & theirs.keys())]
    if len(shared) < 2:
        return f"{told}; not compared sample by sample: the two share {len(shared)} whose counts eval.json has."
    gain, error = paired_difference(np.array(shared, dtype=np.float64))
    sure = "more" if abs(gain) > 2 * error else "not more"
    return (
        f"{told}. On the {len(shared):,} held-out samples of both they differ by {gain:+.3f}, {sure} than the choice "
        f"of samples explains (two standard errors: {2 * error:.3f}); another seed of training may differ as much."
    )


def paired_difference(counts: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Difference of two acceptance lengths over the same samples, second minus first, and its standard error.

    Verifications of one answer are alike, and so are two drafters on it: the error is taken over samples, of the
    difference itself, by the linearised ratios.

    Args:
        counts: [samples, 4]: accepted drafts and verifications of the first, then of the second.
    """
    sums = counts.sum(axis=0)
    ratios = sums[0] / sums[1], sums[2] / sums[3]
    residuals = (counts[:, 2] - ratios[1] * counts[:, 3]) / sums[3] - (counts[:, 0] - ratios[0] * counts[:, 1]) / sums[
        1
    ]
    count = len(counts)
    return float(ratios[1] - ratios[0]), math.sqrt(count / (count - 1) * float((residuals**2).sum()))


def _by_sample(facts: Facts) -> dict[str, tuple[int, int]]:
    """Sample -> accepted drafts, verifications; those of samples that had any."""
    told = (facts.evaluation or {}).get("by_sample") or {}
    counts = {name: tuple(map(int, text.split("/"))) for name, text in told.items()}
    return {name: (accepted, passes) for name, (accepted, passes) in counts.items() if passes}


def figures(first: Facts, second: Facts) -> list[dict[str, Any]]:
    """A row for each figure that one of them has."""
    told: list[Figure] = [
        ("acceptance length", lambda facts: facts.acceptance_length, lambda value: f"{value:.3f}"),
        ("speed-up, reference decoding", lambda facts: facts.speedup, lambda value: f"{value:.2f}"),
        ("tokens captured", lambda facts: facts.store.tokens if facts.store else None, lambda value: f"{value:,.0f}"),
        (
            "bytes per token",
            lambda facts: facts.store.bytes_per_token if facts.store else None,
            lambda value: f"{value:,.0f}",
        ),
        ("store", lambda facts: facts.store.size_bytes if facts.store else None, size),
        ("capture, tokens/s", lambda facts: facts.counts("capture").get("tokens_per_s"), lambda value: f"{value:,.0f}"),
        ("training, tokens/s", lambda facts: facts.train_tokens_per_s, lambda value: f"{value:,.0f}"),
        ("held-out tokens in the draft vocabulary", _coverage, lambda value: f"{value:.1%}"),
    ]
    for source in sorted(set(_by_source(first)) | set(_by_source(second))):
        told.append((f"acceptance length, {source}", _length_of(source), lambda value: f"{value:.3f}"))
    return _rows(told, (first, second))


def _rows(told: list[Figure], both: tuple[Facts, Facts]) -> list[dict[str, Any]]:
    rows = []
    for name, get, show in told:
        values = [get(facts) for facts in both]
        if any(value is not None for value in values):
            known = [value for value in values if value is not None]
            ratio = f"{100 * (known[1] / known[0] - 1):+.1f}%" if len(known) == 2 and known[0] else ""
            shown = ["" if value is None else show(value) for value in values]
            rows.append({"name": name, "shown": shown, "difference": ratio})
    return rows


def engine_figures(first: Facts, second: Facts) -> list[dict[str, Any]]:
    """Rows of the serving engine: over all by number of streams, and of prompt sets that both were asked."""
    both = [facts.serving for facts in (first, second) if facts.serving]
    told: list[Figure] = [("acceptance length", _in_engine("acceptance_length"), lambda value: f"{value:.3f}")]
    for count in sorted({count for figures in both for count in streams_of(figures)}, key=int):
        place, drafted = f"{streams_name(count)}: ", ("rates", count, "with")
        told += [
            (f"{place}speed-up", _in_engine("speedup", count, "mean"), lambda value: f"{value:.3f}"),
            (f"{place}tokens/s", _in_engine(*drafted, "tokens_per_s", "mean"), rate),
            (f"{place}tokens/s of a stream", _in_engine(*drafted, "tokens_per_s_per_stream", "mean"), rate),
            (
                f"{place}first token, ms",
                _in_engine(*drafted, "first_token_s", "median"),
                lambda value: rate(1000 * value),
            ),
        ]
    shared = set.intersection(*(set(figures["sets"]) for figures in both)) if len(both) == 2 else set()
    for name in sorted(shared) if len(shared) > 1 else ():
        get = _in_engine("sets", name, "acceptance_length")
        told.append((f"acceptance length, {name}", get, lambda value: f"{value:.3f}"))
    return _rows(told, (first, second))


def _in_engine(*keys: str) -> Callable[[Facts], float | None]:
    """A figure of serving.json by its keys; None where it isn't there."""

    def get(facts: Facts) -> float | None:
        found: Any = facts.serving
        for key in keys:
            found = found.get(key) if found else None
        return found

    return get


def _by_source(facts: Facts) -> dict[str, Any]:
    return (facts.evaluation or {}).get("by_source") or {}


def _length_of(source: str) -> Callable[[Facts], float | None]:
    return lambda facts: _by_source(facts).get(source, {}).get("acceptance_length")


def _coverage(facts: Facts) -> float | None:
    return facts.vocabulary.coverage.get("heldout") if facts.vocabulary else None


def changed_settings(first: Facts, second: Facts) -> list[tuple[str, str, str]]:
    """(key, value in the first, value in the second) of every recipe key that differs."""
    flat = [_flat(facts.run.recipe.model_dump(mode="json")) for facts in (first, second)]
    keys = sorted(set(flat[0]) | set(flat[1]))
    rows = [(key, str(flat[0].get(key, "")), str(flat[1].get(key, ""))) for key in keys if key not in _PLACES]
    return [row for row in rows if row[1] != row[2]]


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _acceptance_chart(both: tuple[Facts, Facts], names: tuple[str, str]) -> str:
    series = [
        Bars(name, shares, style)
        for facts, name, style in zip(both, names, ("s1", "s2"), strict=True)
        if (shares := ((facts.evaluation or {}).get("replay") or {}).get("acceptance_per_position"))
    ]
    return bar_chart(series, "draft position")


def _training_chart(both: tuple[Facts, Facts], names: tuple[str, str]) -> str:
    loss, lengths = [], []
    for facts, name, style in zip(both, names, ("s1", "s2"), strict=True):
        steps = [(line["step"], line["loss"]) for line in facts.steps if math.isfinite(line["loss"])]
        heldout = [(line["step"], line["acceptance_length"]) for line in facts.heldout if line.get("acceptance_length")]
        loss.append(Line(thin(steps, _MOST_POINTS), style, name))
        lengths.append(Line(heldout, style, name))
    return line_chart([Panel("training loss", loss), Panel("held-out acceptance length", lengths)], "optimizer steps")
