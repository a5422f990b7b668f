"""The serving stage: the drafter in the engine that will serve it, beside the target alone.

The engine is started without and with the drafter, all other flags alike; both are asked the same prompt sets, in
repeats, by so many streams at once. With room for two servers repeats alternate between them; else all repeats of the
one come before those of the other. Every pass is kept in serving/journal.jsonl, so a call that was stopped goes on.

    serving.json    per set and over all: acceptance, rates, speed-up with spread; lossless check; parity
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.data.read import source_files
from eyas.drafter.published import folder_digest
from eyas.engine.drafting import SERVING, find_drafting, find_profile, serving_kind, serving_run
from eyas.engine.server import end_left
from eyas.errors import VerificationFailed
from eyas.evaluate import parity
from eyas.evaluate.again import REPLAY, Exchange
from eyas.evaluate.bench import Bench
from eyas.evaluate.figures import WITH, WITHOUT, Unit, acceptance_of, summary
from eyas.evaluate.journal import JOURNAL, Journal
from eyas.evaluate.load import Load
from eyas.evaluate.pool import Pool, pool
from eyas.progress import Progress, say
from eyas.record import Inputs, load_record, versions
from eyas.run import Run
from eyas.signals import Stop, stop_on_signals
from eyas.stages import Result, remove_tree

FILE = "serving.json"
PROFILE = "content of the profile"
# Where and how many at once: figures don't depend on them, but for noise.
_NOT_INPUTS = ("host", "port", "servers", "max_gap")


def inputs(run: Run) -> Inputs:
    """What the figures depend on: the drafter, the table, the profile's content, the prompts."""
    table, profile = run.recipe.serving, find_profile(run)
    values = {f"serving.{key}": value for key, value in table.model_dump().items() if key not in _NOT_INPUTS}
    values["serving.kind"] = serving_kind(run)
    if profile.endswith(".toml"):
        values[PROFILE] = fs.digest_file(Path(profile))
    if table.drafter:
        values["content of serving.drafter"] = folder_digest(Path(table.drafter))
    for file in (found for pattern in table.prompts for found in source_files(pattern)):
        values[f"content of {file}"] = fs.digest_file(file)
    return values


def discard(run: Run) -> None:
    """Remove what was measured. The state of a server that users are served by lies in the same folder and stays."""
    end_left(run, SERVING)
    fs.remove(run.dir / FILE)
    fs.remove(run.dir / SERVING / JOURNAL)
    folder = run.dir / SERVING
    for made in (folder / WITHOUT, folder / WITH, *folder.glob(f"{REPLAY}*")):
        remove_tree(made)


def execute(run: Run) -> Result:
    """Measure and write serving.json.

    Raises: VerificationFailed, after it is written, where the three acceptance lengths differ by more than
        serving.max_gap, or an fp32 server's outputs change with the drafter; Interrupted, with what is measured kept.
    """
    with stop_on_signals("this pass") as stop:
        figures = _Measurement(run, stop).figures()
    fs.write_json(run.dir / FILE, figures)
    for line in lines(figures):
        say(f"serving: {line}")
    verdict(run, figures)
    shown = ("acceptance_length", "acceptance_per_position", "speedup", "lossless", "parity_gap")
    return Result(fs.digest_file(run.dir / FILE), {name: figures.get(name) for name in shown})


class _Measurement:
    """One run's serving figures, measured or found in the journal."""

    def __init__(self, run: Run, stop: Stop) -> None:
        self._run, self._stop, self._table = run, stop, run.recipe.serving
        self._bench, self._drafting = Bench(run, stop), find_drafting(run)
        self._dtype = self._table.dtype or run.recipe.engine.dtype
        self._parity = parity.choose_prompts(self._bench.sets, self._table.parity_prompts) if self._has_parity else None
        exported = load_record(run.dir, "export")
        key = inputs(run) | {"prompts": self._bench.sets.digest, "export": exported.output if exported else ""}
        self._journal = Journal(run.dir / SERVING / JOURNAL, fs.digest_json(key))

    @property
    def _has_parity(self) -> bool:
        return self._table.parity_prompts > 0 and self._drafting.top_k == 1

    def figures(self) -> dict[str, Any]:
        runs = {
            name: serving_run(self._run, drafting, folder=f"{SERVING}/{name}")
            for name, drafting in ((WITHOUT, None), (WITH, self._drafting))
        }
        units = list(self._units())
        total, done = len(units), sum(self._journal.get(asdict(unit)) is not None for unit in units)
        with (
            pool(runs, self._table.servers, self._stop) as servers,
            Progress("serving", total, "passes", self._run.logs_dir, done=done) as progress,
        ):
            if done < total:
                failed = servers.prepare(list(runs))
                for error in failed.values():
                    raise error
            for unit in units:
                if self._journal.get(asdict(unit)) is None:
                    self._measure(unit, servers)
                    progress.advance(1, f"{unit.variant} the drafter, {unit.set}, {unit.streams} at once")
        measured = {unit: self._journal.get(asdict(unit)) for unit in units}
        return self._about() | self._results(measured)

    def _units(self) -> Iterator[Unit]:
        """Every pass, in the order it is measured."""
        repeats, variants = range(self._table.repeats), (WITHOUT, WITH)
        pairs = [(repeat, variant) for repeat in repeats for variant in variants[:: 1 if repeat % 2 == 0 else -1]]
        if self._table.servers < 2:
            pairs = [(repeat, variant) for variant in variants for repeat in repeats]
        for place, (repeat, variant) in enumerate(pairs):
            for name in self._bench.sets.sets:
                for streams in self._table.concurrency:
                    yield Unit(variant, name, streams, repeat)
            if self._has_parity and variant not in [later for _, later in pairs[place + 1 :]]:
                yield Unit(variant, parity.SET, max(self._table.concurrency), 0)

    def _measure(self, unit: Unit, servers: Pool) -> None:
        state = servers.get(unit.variant)
        if self._bench.warm_up(state, self._table.concurrency):
            about = {"version": state.version, "command": state.command, "layers_s": state.layers}
            self._journal.add({"server": unit.variant}, about | {"device": state.device})
        drafts, salt = self._drafting.drafts if unit.variant == WITH else 0, fs.digest_json(asdict(unit))
        if unit.set == parity.SET and self._parity is not None:
            load = Load(unit.streams, len(self._parity.sets[parity.SET]), self._table.max_new_tokens, drafts, salt)
            done = self._bench.measure_sets(state, self._parity, parity.SET, load, temperature=0.0)
            exchanged = {
                "prompts": [asked[0] for asked in done.prompts.values() if asked],
                "answers": [answers[0].token_ids for answers in done.answers.values() if answers],
                "accepted": [answers[0].accepted or () for answers in done.answers.values() if answers],
            }
        else:
            done, exchanged = self._bench.measure(state, unit.set, unit.streams, drafts, salt), {}
        self._journal.add(asdict(unit), {"figures": done.figures(), "digests": done.digests()} | exchanged)

    def _about(self) -> dict[str, Any]:
        """What was measured, where and how."""
        table, drafting = self._table, self._drafting
        servers = {name: self._journal.get({"server": name}) for name in (WITHOUT, WITH)}
        return {
            "engine": serving_kind(self._run),
            "version": servers[WITH]["version"],
            "dtype": self._dtype,
            "device": servers[WITH]["device"] or "cuda",
            "profile": find_profile(self._run),
            "servers": servers,
            "drafter": str(drafting.folder),
            "drafts": drafting.drafts,
            "topology": drafting.topology,
            "temperature": table.temperature,
            "max_new_tokens": table.max_new_tokens,
            "repeats": table.repeats,
            "interleaved": table.servers > 1,
            "prompts": {name: len(prompts) for name, prompts in self._bench.sets.sets.items()},
            "versions": versions(),
        }

    def _results(self, measured: dict[Unit, dict[str, Any]]) -> dict[str, Any]:
        timed = {unit: result["figures"] for unit, result in measured.items() if unit.set != parity.SET}
        results = summary(timed) | {"lossless": None, "parity": None, "parity_gap": None}
        if self._table.temperature == 0:
            results |= _identical({unit: result["digests"] for unit, result in measured.items()}, results["sets"])
        if not self._has_parity:
            if self._table.parity_prompts:
                say("serving: parity is left out: a replay walks a chain (serving.top_k = 1)")
            return results
        found = {unit.variant: (unit, result) for unit, result in measured.items() if unit.set == parity.SET}
        drafted, plain = found[WITH][1], found[WITHOUT][1]
        engine = acceptance_of([drafted["figures"]])
        assert engine is not None, "a pass with the drafter has counts"
        accepted = drafted["accepted"] if any(drafted["accepted"]) else []
        figures = parity.compare(
            self._run,
            self._bench.target,
            self._drafting,
            _exchanges(drafted, plain),
            parity.counted(engine, drafted["answers"], accepted),
            self._dtype,
        )
        return results | {"parity": figures, "parity_gap": figures["gap"]}


def _exchanges(drafted: dict[str, Any], plain: dict[str, Any]) -> list[Exchange]:
    without = {tuple(prompt): answer for prompt, answer in zip(plain["prompts"], plain["answers"], strict=True)}
    return [
        Exchange(prompt, answer, without.get(tuple(prompt), []))
        for prompt, answer in zip(drafted["prompts"], drafted["answers"], strict=True)
    ]


def _identical(digests: dict[Unit, dict[str, str]], sets: dict[str, Any]) -> dict[str, Any]:
    """Conversations whose every token is the same with and without the drafter, in the first repeat."""
    same = of = 0
    for unit, with_drafter in digests.items():
        if unit.variant != WITH or unit.repeat:
            continue
        without = digests[Unit(WITHOUT, unit.set, unit.streams, 0)]
        shared = with_drafter.keys() & without.keys()
        equal = sum(with_drafter[name] == without[name] for name in shared)
        same, of = same + equal, of + len(shared)
        if unit.set in sets:
            sets[unit.set].setdefault("identical", {})[str(unit.streams)] = {"same": equal, "of": len(shared)}
    return {"identical": {"same": same, "of": of}, "lossless": same == of}


def verdict(run: Run, figures: dict[str, Any]) -> None:
    """Raises VerificationFailed where parity or, in fp32, losslessness is not met."""
    if figures["dtype"] == "float32" and figures["lossless"] is False:
        told = figures["identical"]
        raise VerificationFailed(
            f"{told['of'] - told['same']} of {told['of']} answers change with the drafter, in fp32 at temperature 0",
            expected="the same tokens: a draft is kept only where the target says the same",
            cause="an engine that accepts by another rule than equality (thresholds, relaxed acceptance), or its bug",
            next=f"compare the digests in {run.dir}/serving/journal.jsonl",
        )
    found = figures["parity"]
    if found is None or found["passed"]:
        return
    rows = [
        f"{entry['cause']}" + (f": then {entry['acceptance_length']}" if "acceptance_length" in entry else "")
        for entry in found["causes"]
    ]
    raise VerificationFailed(
        f"the engine's acceptance length is {found['engine']['acceptance_length']}, a replay of its answers gives "
        f"{found['replay']['acceptance_length']}"
        + (f", reference decoding {found['decode']['acceptance_length']}" if found["decode"] else ""),
        expected=f"at most {run.recipe.serving.max_gap:.0%} apart (serving.max_gap)",
        cause="in order:\n  " + "\n  ".join(rows),
        next=f"{run.command('export', '--check')}   # names faults of the exported folder",
    )


def lines(figures: dict[str, Any]) -> Sequence[str]:
    """The figures as a table of plain lines."""
    head = (
        f"{'set':20} {'streams':>7} {'tokens/s':>10} {'drafted':>10} {'speed-up':>22} {'length':>7} {'first token':>12}"
    )
    rows = [head]
    for name, entry in [*figures["sets"].items(), ("all", figures)]:
        for streams, rates in entry["rates"].items():
            without, drafted = rates[WITHOUT], rates[WITH]
            told = entry["speedup"][streams]
            spread = f"{told['mean']:.3f} ({told['low']:.3f}-{told['high']:.3f})" if told else ""
            rows.append(
                f"{name:20} {streams:>7} {without['tokens_per_s']['mean']:>10,.1f} "
                f"{drafted['tokens_per_s']['mean']:>10,.1f} {spread:>22} {entry.get('acceptance_length') or 0:>7.3f} "
                f"{drafted['first_token_s']['median'] * 1000:>9,.0f} ms"
            )
    if figures["lossless"] is not None:
        told = figures["identical"]
        rows.append(f"identical with and without the drafter: {told['same']} of {told['of']} ({figures['dtype']})")
    found = figures["parity"]
    if found:
        decode = found["decode"] or {"acceptance_length": "-"}
        rows.append(
            f"acceptance length on {found['prompts']} prompts: engine {found['engine']['acceptance_length']}, "
            f"replay {found['replay']['acceptance_length']}, reference decoding {decode['acceptance_length']}; "
            f"largest difference {found['gap']:.2%}"
        )
        ties = found["differences"]
        if ties["answers"]:
            rows.append(
                f"{ties['answers']} of {ties['of']} answers differ; the largest difference of logits where the first "
                f"token differs is {ties['largest_tie']}"
            )
    return rows
