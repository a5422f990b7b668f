"""runs/NAME/report.html: the whole run on one page that opens offline."""

import json
import math
import shlex
import time
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from eyas import __version__, fs
from eyas.errors import RecipeError
from eyas.progress import duration, size
from eyas.report.charts import Bars, Line, Panel, Row, bar_chart, histogram, line_chart, row_chart, thin
from eyas.report.facts import Facts, gather, standard_error
from eyas.report.ranges import range_chart
from eyas.report.serving import curve_view, length_group, serving_view, tuning_views
from eyas.run import Run

# More points than pixels only make the page heavy.
_MOST_POINTS = 160
_MOST_ROWS = 16


def write_report(run: Run) -> Path:
    """Gather what there is and write the page; unfinished stages are shown as such. Returns its path.

    Raises: RecipeError where the run has no folder yet.
    """
    if not run.dir.is_dir():
        raise RecipeError(f"{run.dir}: no such run yet", next=f"{run.command('run')}   # ends with the report")
    return save_page(gather(run))


def save_page(facts: Facts) -> Path:
    """Write report.html into the run's folder, whole or not at all."""
    path = facts.run.dir / "report.html"
    fs.write_atomic(path, render(facts))
    return path


def render(facts: Facts) -> str:
    """The page as text. It fetches nothing; its one script shows what a chart's mark stands for."""
    return (
        templates()
        .get_template("page.html.j2")
        .render(
            facts=facts,
            run=facts.run,
            title=facts.run.dir.name,
            made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            eyas_version=__version__,
            conditions=conditions(facts),
            measured=measurements(facts),
            training_chart=training_chart(facts),
            acceptance_chart=acceptance_chart(facts),
            sources_chart=sources_chart(facts),
            length_chart=length_chart(facts),
            source_chart=source_chart(facts),
            kinds=kinds(facts),
            kinds_chart=kinds_chart(facts),
            served=serving_view(facts),
            tunings=tuning_views(facts),
            curve=curve_view(facts),
            commands=commands(facts),
            evaluation_text=json.dumps(facts.evaluation, indent=1),
        )
    )


def templates() -> jinja2.Environment:
    """The report's templates, with the filters that show numbers."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("eyas.report", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size, "duration": duration, "count": _count, "share": _share}
    environment.filters |= {"dec": _decimals, "rate": rate}
    return environment


def conditions(facts: Facts) -> str:
    """What an acceptance figure is worth nothing without: drafts, topology, temperature."""
    evaluation, recipe = facts.evaluation or {}, facts.run.recipe.evaluate
    drafts, temperature = evaluation.get("drafts", recipe.drafts), evaluation.get("temperature", recipe.temperature)
    return f"chain of {drafts} drafts, temperature {temperature:g}"


def measurements(facts: Facts) -> list[dict[str, Any]]:
    """Each way in which acceptance was measured, with length and share by position."""
    evaluation = facts.evaluation or {}
    last, replay, decode = (facts.heldout or [{}])[-1], evaluation.get("replay") or {}, evaluation.get("decode") or {}
    by_source = evaluation.get("by_source") or {}
    ways = {
        f"while training, step {last.get('step', 0):,}": last,
        f"replay of {replay.get('samples', 0):,} held-out samples": replay,
        **{f"replay, {source}": part for source, part in (by_source if len(by_source) > 1 else {}).items()},
        f"reference decoding of {decode.get('prompts', 0):,} prompts, "
        f"temperature {decode.get('temperature', 0):g}": decode,
    }
    return [{"way": way, **part} for way, part in ways.items() if part.get("acceptance_per_position")]


def training_chart(facts: Facts) -> str:
    """Loss, that of the first and last draft, and held-out acceptance length, one below the other over steps."""
    loss = [(line["step"], line["loss"]) for line in facts.steps if math.isfinite(line["loss"])]
    lengths = [(line["step"], line["acceptance_length"]) for line in facts.heldout if line.get("acceptance_length")]
    panels = [
        Panel("training loss", [Line(thin(loss, _MOST_POINTS), "s1")]),
        *_loss_by_draft(facts),
        Panel("held-out acceptance length", [Line(lengths, "s2")]),
    ]
    return line_chart(panels, "optimizer steps")


def _loss_by_draft(facts: Facts) -> list[Panel]:
    """The loss of the first draft in a row and of the last that training makes; none where it makes one."""
    lines = [(line["step"], line["loss_per_step"]) for line in facts.steps if len(line.get("loss_per_step", ())) > 1]
    if not lines:
        return []
    last = len(lines[0][1]) - 1
    series = [
        Line(thin([(step, losses[k]) for step, losses in lines], _MOST_POINTS), style, f"draft {k + 1}")
        for k, style in ((0, "s1"), (last, "s2"))
    ]
    return [Panel("loss of the first and last draft", series)]


def acceptance_chart(facts: Facts) -> str:
    """Share of verifications that accepted the draft at each position: replay beside decoding."""
    series = []
    for key, name, style in (("replay", "replay", "s1"), ("decode", "reference decoding", "s2")):
        shares = ((facts.evaluation or {}).get(key) or {}).get("acceptance_per_position")
        if shares:
            series.append(Bars(name, shares, style))
    return bar_chart(series, "draft position")


def sources_chart(facts: Facts) -> str:
    """Acceptance length of each source, the longest first; "" where there is one source or none."""
    told = (facts.evaluation or {}).get("by_source") or {}
    lengths = {name: part for name, part in told.items() if part.get("acceptance_length")}
    groups = []
    for name, part in sorted(lengths.items(), key=lambda item: -item[1]["acceptance_length"])[:_MOST_ROWS]:
        spread = 2 * standard_error(part["acceptance_per_position"], part["verifications"])
        groups.append(length_group(name, part["acceptance_length"], spread, part["verifications"]))
    return range_chart(groups, [], "acceptance length", 1.0) if len(groups) > 1 else ""


def length_chart(facts: Facts) -> str:
    """How many samples have which length."""
    lengths = facts.data.lengths if facts.data else np.zeros(0, dtype=np.int64)
    return histogram(lengths, "tokens of a sample", "samples", "s1")


def source_chart(facts: Facts) -> str:
    """Tokens of each source, the largest first, the supervised part apart."""
    sources = (facts.tokens or {}).get("by_source", {})
    rows = [
        Row(name, source["supervised_tokens"], source["tokens"] - source["supervised_tokens"])
        for name, source in sorted(sources.items(), key=lambda item: -item[1]["tokens"])
    ]
    return row_chart(rows[:_MOST_ROWS], ("supervised", "context"), ("s1", "s0"), "tokens", "source")


def kinds(facts: Facts) -> list[dict[str, Any]]:
    """Kinds of tokens that drafts met, the one that ended most verifications first."""
    told = (facts.evaluation or {}).get("kinds") or {}
    misses = sum(each["met"] - each["right"] for each in told.values()) or 1
    rows = [{"kind": kind, **each, "of_misses": (each["met"] - each["right"]) / misses} for kind, each in told.items()]
    return sorted(rows, key=lambda row: -row["of_misses"])


def kinds_chart(facts: Facts) -> str:
    """Accepted and missed tokens of each kind; "" where they were not counted."""
    rows = [Row(each["kind"], each["right"], each["met"] - each["right"]) for each in kinds(facts)]
    return row_chart(rows, ("accepted", "missed"), ("s1", "s2"), "tokens", "kind") if rows else ""


def commands(facts: Facts) -> list[str]:
    """What makes this run again, from the recipe as it was used."""
    recipe = shlex.quote(str(facts.run.dir / "recipe.toml"))
    lines = [f"pip install eyas=={__version__}", f"eyas run {recipe}"]
    if facts.serving:
        lines.append(f"eyas evaluate {recipe} --engine {facts.serving['engine']}")
    for engine, evidence in facts.tuned.items():
        lines.append(f"eyas tune {recipe} --engine {engine} --choices {shlex.quote(evidence['choices'])}")
        lines[-1] += f" --streams {evidence['streams']} --minutes {max(1, math.ceil(evidence['minutes']))}"
    if facts.shape:
        folder = shlex.quote(str(facts.run.dir))
        lines.append(f"python benchmarks/serving_sglang.py {folder} --data DIR --sglang-python PATH --parts shape")
    return [*lines, f"eyas report {recipe}"]


def rate(value: float) -> str:
    """At least three digits: 0.83, 12.3, 1,234."""
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _decimals(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"
