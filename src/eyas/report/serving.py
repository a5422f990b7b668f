"""The report's part on the engine that serves the drafter: speed-up, acceptance, parity, tuning, a length's worth."""

import shlex
from pathlib import Path
from typing import Any

from eyas.report.charts import Bars, bar_chart
from eyas.report.facts import Facts, standard_error
from eyas.report.ranges import Curve, Group, Mark, curve_chart, range_chart
from eyas.tap.releases import RELEASES

Json = dict[str, Any]

ALL = "over all"
_STYLES = ("s1", "s2", "s3", "s4", "s5", "s6")
# More sets than colours are told by the table alone.
_MOST_SETS = len(_STYLES)
_WITHOUT, _WITH = "without", "with"
_WAYS = (("engine", "the engine"), ("replay", "replay"), ("decode", "reference decoding"))


def engine_name(figures: Json) -> str:
    return RELEASES[figures["engine"]].title


def streams_of(figures: Json) -> list[str]:
    """The numbers of streams that were measured, rising."""
    return sorted(figures["rates"], key=int)


def streams_name(count: str | int) -> str:
    return f"{count} stream{'' if int(count) == 1 else 's'}"


def terms(figures: Json) -> str:
    """What figures of an engine are worth nothing without."""
    return (
        f"{engine_name(figures)} {figures['version']}, {figures['dtype']}, on {figures['device']}: "
        f"{_drafting(figures)}, temperature {figures['temperature']:g}, "
        f"answers of at most {figures['max_new_tokens']:,} tokens"
    )


def headline(facts: Facts) -> tuple[str, float] | None:
    """("4 streams", speed-up) for the fewest streams; None where nothing was measured in an engine."""
    for count in streams_of(facts.serving) if facts.serving else ():
        told = facts.serving["speedup"][count] if facts.serving else None
        if told:
            return streams_name(count), told["mean"]
    return None


def serving_view(facts: Facts) -> Json | None:
    """What the page shows of serving.json; None without it."""
    figures = facts.serving
    if figures is None:
        return None
    parts = _parts(figures)
    return {
        "engine": engine_name(figures),
        "terms": terms(figures),
        "profile": Path(figures["profile"]).name,
        "figures": figures,
        "stale": facts.serving_stale,
        "headline": headline(facts),
        "speedup_chart": _speedup_chart(parts),
        "length_chart": _length_chart(parts, figures),
        "sets_chart": _sets_chart(figures),
        "rates": _rates(parts),
        "acceptance": [{"set": name, "spread": _spread(part, figures), **part} for name, part in parts],
        "identical": {name: _identical(part) for name, part in parts},
        "parity": _parity(facts, figures),
        "commands": [
            f"# {title}\n{shlex.join(figures['servers'][key]['command'])}"
            for key, title in ((_WITHOUT, "the target alone"), (_WITH, "with the drafter"))
        ],
    }


def _parts(figures: Json) -> list[tuple[str, Json]]:
    """Each set, and all of them where they are several."""
    sets = list(figures["sets"].items())
    return sets if len(sets) == 1 else [*sets, (ALL, figures)]


def _drafting(figures: Json) -> str:
    kind = "chain" if figures["topology"] == "chain" else figures["topology"]
    return f"{kind} of {figures['drafts']} drafts" if kind == "chain" else f"{kind}, {figures['drafts']} steps"


def _speedup_chart(parts: list[tuple[str, Json]]) -> str:
    """Speed-up of each set and number of streams, from the lowest to the highest repeat."""
    counts = streams_of(parts[-1][1])
    styles = {count: _STYLES[place % len(_STYLES)] for place, count in enumerate(counts)}
    groups = []
    for name, part in parts:
        marks = []
        for count in counts:
            told = part["speedup"].get(count)
            if told:
                tip = f"{name}, {streams_name(count)}: {told['mean']:.3f} times"
                if told["repeats"] > 1:
                    tip += f" ({told['low']:.3f} to {told['high']:.3f} in {told['repeats']} repeats)"
                marks.append(Mark(told["mean"], told["low"], told["high"], f"{told['mean']:.2f}×", tip, styles[count]))
        groups.append(Group(name, marks))
    keys = [(streams_name(count), style) for count, style in styles.items()]
    return range_chart(groups, keys, "speed-up, times", 1.0)


def _spread(part: Json, figures: Json) -> float:
    """Two standard errors of a part's acceptance length. Repeats, and passes with other numbers of streams, ask the
    same prompts: they are no further evidence, so the verifications are those of one pass."""
    passes = figures["repeats"] * len(figures["rates"])
    shares, count = part.get("acceptance_per_position"), part.get("verifications")
    return 2 * standard_error(shares, count / passes) if shares and count else 0.0


def length_group(name: str, length: float, spread: float, verifications: int) -> Group:
    """An acceptance length with its spread, which ends at 1: a forward of the target yields a token at least."""
    tip = f"{name}: {length:.3f} ± {spread:.3f} in {verifications:,} verifications"
    return Group(name, [Mark(length, max(1.0, length - spread), length + spread, f"{length:.3f}", tip, "s1")])


def _length_chart(parts: list[tuple[str, Json]], figures: Json) -> str:
    groups = []
    for name, part in parts:
        length, spread = part.get("acceptance_length"), _spread(part, figures)
        if length:
            groups.append(length_group(name, length, spread, part["verifications"]))
    return range_chart(groups, [], "acceptance length", 1.0)


def _sets_chart(figures: Json) -> str:
    """Acceptance by position of each set; "" where they are one, or more than there are colours."""
    sets = [(name, part["acceptance_per_position"]) for name, part in figures["sets"].items()]
    if not 1 < len(sets) <= _MOST_SETS:
        return ""
    return bar_chart(
        [Bars(name, shares or [], _STYLES[at]) for at, (name, shares) in enumerate(sets)], "draft position"
    )


def _rates(parts: list[tuple[str, Json]]) -> list[Json]:
    """A row for each set and number of streams; the first of a set says how many rows it has."""
    rows = []
    for name, part in parts:
        counts = streams_of(part)
        for place, count in enumerate(counts):
            rates = part["rates"][count][_WITHOUT], part["rates"][count][_WITH]
            told = {"set": name, "rows": 0 if place else len(counts), "streams": count}
            rows.append(told | {"speedup": part["speedup"][count], "rates": rates})
    return rows


def _identical(part: Json) -> str:
    """Conversations whose every token is the same with and without the drafter, all numbers of streams together."""
    told = part.get("identical")
    if not told:
        return ""
    counts = [told] if "of" in told else list(told.values())
    return f"{sum(each['same'] for each in counts):,} of {sum(each['of'] for each in counts):,}"


def _parity(facts: Facts, figures: Json) -> Json | None:
    """The three acceptance lengths side by side; None where they were not measured."""
    found = figures["parity"]
    if not found:
        return None
    count = (found["decode"] or {}).get("prompts", 0)
    against = "the engine" if count == found["prompts"] else f"a replay of the same {count}"
    terms = {
        "engine": {"prompts": found["prompts"], "apart": ""},
        "replay": {"prompts": found["prompts"], "apart": f"{_signed(found['gaps']['replay'])} from the engine"},
        "decode": {"prompts": count, "apart": f"{_signed(found['gaps'].get('decode', 0))} from {against}"},
    }
    ways = [{"way": name, **found[key], **terms[key]} for key, name in _WAYS if found[key]]
    series = [Bars(way["way"], way["acceptance_per_position"] or [], _STYLES[place]) for place, way in enumerate(ways)]
    low, high = found["engine"]["within"]
    return {
        "ways": ways,
        "chart": bar_chart(series, "draft position"),
        "found": found,
        "within": f"{low:.3f}" if low == high else f"between {low:.3f} and {high:.3f}",
        "max_gap": facts.run.recipe.serving.max_gap,
        "causes": found.get("causes", []),
    }


def _signed(share: float) -> str:
    return f"{share:+.2%}" if share else "0%"


def tuning_views(facts: Facts) -> list[Json]:
    """What `eyas tune` tried for each engine, the fastest first."""
    return [
        {
            "engine": RELEASES[name].title if name in RELEASES else name,
            "evidence": evidence,
            "chart": _tuning_chart(evidence),
            "rows": [one | {"kept": one["settings"] == evidence["best"]} for one in evidence["configurations"]],
        }
        for name, evidence in facts.tuned.items()
    ]


def _tuning_chart(evidence: Json) -> str:
    groups = []
    for one in evidence["configurations"]:
        if "fault" in one:
            continue
        ratio, spread = one["of_first"], 2 * one["noise"] * one["of_first"]
        style = "s2" if one["settings"] == evidence["best"] else "s1"
        tip = f"{one['settings']}: {one['tokens_per_s']:,.1f} tokens/s, {ratio:.3f} of the first ± {spread:.3f}"
        mark = Mark(ratio, ratio - spread, ratio + spread, f"{ratio:.3f}", tip, style)
        groups.append(Group(one["settings"], [mark]))
    label = "tokens/s as a share of the first configuration's"
    return range_chart(groups, [("tried", "s1"), ("kept", "s2")], label, 1.0)


def curve_view(facts: Facts) -> Json | None:
    """The speed-up that an acceptance length is worth, with the measured length on it; None where no curve was made."""
    shape = facts.shape
    if shape is None:
        return None
    counts = sorted({point["streams"] for point in shape["curve"]})
    curves = [
        Curve(
            streams_name(count),
            sorted(
                (point["acceptance_length"], point["speedup"], point["low"], point["high"])
                for point in shape["curve"]
                if point["streams"] == count
            ),
            _STYLES[place % len(_STYLES)],
        )
        for place, count in enumerate(counts)
    ]
    served = (facts.serving or {}).get("acceptance_length")
    length, by = (
        (served, engine_name(facts.serving)) if facts.serving and served else (facts.acceptance_length, "replay")
    )
    found = (length, f"measured {length:.3f}") if length else None
    reads = [(curve.name, curve.at(length)) for curve in curves] if length else []
    return {
        "chart": curve_chart(curves, ("acceptance length", "speed-up, times"), 1.0, found),
        "shape": shape,
        "length": length,
        "by": by,
        "reads": [f"{read:.2f} times with {name}" for name, read in reads if read is not None],
    }
