"""Which settings serve the drafter fastest: successive halving over configurations, within a budget of minutes.

Every round measures each configuration that is left, in turn, and keeps the better half; so the passes of one lie apart
in time, and more of them go to those that matter. The first configuration, what is served without tuning, is measured
in every round: a configuration's score is its rate as a share of the first one's in the same round, which takes out
what changes from round to round. In a last round, of the best and the first alone, the first has to be beaten by more
than noise, else it stays.

Every pass is kept in tune/journal.jsonl: a call that was stopped goes on, one with more minutes goes further.
"""

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import tomli_w

from eyas import fs
from eyas.engine.choices import Choices, Configuration, combine, configurations, profile_of
from eyas.engine.drafting import SERVING, find_drafting, serving_kind, serving_run, tuned_profile
from eyas.engine.profile import load_profile
from eyas.engine.state import ServerState, load_state
from eyas.errors import EngineError, RecipeError
from eyas.evaluate.bench import Bench
from eyas.evaluate.journal import JOURNAL, Journal
from eyas.evaluate.pool import Pool, pool
from eyas.evaluate.serving import PROFILE, inputs
from eyas.evaluate.tuned import Candidate, Tuned
from eyas.progress import duration, say
from eyas.run import Run
from eyas.signals import Stop

_LEAST_GAIN = 0.01


def tune(run: Run, choices: Choices, *, minutes: float, streams: int, most: int, stop: Stop) -> Tuned:
    """Try configurations and write the best as the run's tuned profile.

    Args:
        minutes: most time, that of earlier calls with the same settings included; a pass that is begun is finished.
        streams: answers at once for which tokens/s are to be highest; 0: serving.concurrency's first.
        most: configurations up to which all combinations are tried, else single changes and then the best together.
    Raises: EngineError where not even the first configuration can be served; RecipeError; Interrupted.
    """
    return _Tuning(run, choices, minutes, streams or run.recipe.serving.concurrency[0], most, stop).go()


class _Tuning:
    def __init__(self, run: Run, choices: Choices, minutes: float, streams: int, most: int, stop: Stop) -> None:
        self._run, self._choices, self._kind = run, choices, serving_kind(run)
        self._budget_s, self._streams, self._stop = minutes * 60, streams, stop
        self._base = load_profile(run.recipe.serving.profile or SERVING, "serving")
        self._bench, self._folder = Bench(run, stop), run.dir / "tune"
        left_out = ("serving.profile", "serving.repeats", PROFILE)  # the base is part of the key
        key = {name: value for name, value in inputs(run).items() if name not in left_out}
        key |= {"prompts": self._bench.sets.digest, "choices": choices.model_dump(), "streams": streams}
        self._journal = Journal(self._folder / JOURNAL, fs.digest_json(key | {"base": self._base.model_dump()}))
        found, self._complete = configurations(choices, most)
        made = [self._candidate(configuration) for configuration in found]
        self._candidates = [candidate for candidate in made if candidate]
        if made[0] is None:
            raise RecipeError(
                f"the first values of {choices.name} are nothing that {self._kind} serves", next="mend its first choice"
            )
        if len(self._candidates) < 2:
            raise RecipeError(f"{choices.name} leaves one configuration", expected="several, to choose from")
        self._passing_s, self._visits = 0.0, 0
        self._starting_s, self._starts = 0.0, 0  # of servers for passes that waited for them
        self._failing_s, self._fails = 0.0, 0  # of configurations that can't be served
        self._number, self._over = 0, False

    def go(self) -> Tuned:
        first = self._candidates[0]
        runs = {one.name: one.run for one in self._candidates}
        with pool(runs, self._run.recipe.serving.servers, self._stop) as servers:
            left = self._halve(servers, self._candidates[1:])
            if not self._complete and not self._over:
                better = [one for one in self._ranked(self._candidates[1:]) if one.score(first) > 1 + self._noise()]
                together = combine(self._choices, [one.configuration for one in better])
                known = {one.configuration for one in self._candidates}
                if together not in known and (made := self._candidate(together)):
                    say(f"tune: the best changes together: {together.text}")
                    self._candidates.append(made)
                    left = self._halve(servers, [made, *left[:1]])
            if left and not self._over:
                self._round(servers, [first, left[0]], confirm=True)
        return self._write(left[0] if left and self._faster(left[0]) else first)

    def _candidate(self, configuration: Configuration) -> Candidate | None:
        """None, which is said, where the engine has no such drafter settings."""
        path = self._folder / f"{configuration.name}.toml"
        content = profile_of(self._base, self._choices, configuration, self._kind)
        fs.write_atomic(path, tomli_w.dumps(content), durable=False)
        drafting = find_drafting(self._run, str(path))
        try:
            run = serving_run(self._run, drafting, profile=str(path), folder=f"tune/{configuration.name}")
        except RecipeError as error:
            say(f"tune: left out: {configuration.text}: {error.seen}")
            return None
        return Candidate(configuration, drafting, run)

    def _halve(self, servers: Pool, left: Sequence[Candidate]) -> list[Candidate]:
        """Measure, keep the better half, until one is left or the time is over; those left, the fastest first."""
        first = self._candidates[0]
        while left and not self._over:
            self._round(servers, [first, *left])
            ranked = self._ranked(left)
            left = ranked if self._over else ranked[: math.ceil(len(ranked) / 2)]
            if len(left) <= 1:
                break
            say(f"tune: left: {'; '.join(one.configuration.text for one in left)}")
        return list(left)

    def _ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those that were measured, the fastest first."""
        first = self._candidates[0]
        measured = [one for one in candidates if one.rounds and not one.fault]
        return sorted(measured, key=lambda one: one.score(first), reverse=True)

    def _noise(self) -> float:
        """Standard deviation of a pass, a share of its rate: passes of one server in one round differ by chance."""
        parts = [rates for one in self._candidates for rates in one.rounds.values() if len(rates) > 1]
        shares = [rate / statistics.fmean(rates) - 1 for rates in parts for rate in rates]
        return math.sqrt(math.fsum(share * share for share in shares) / (len(shares) - len(parts))) if parts else 0.0

    def _faster(self, candidate: Candidate) -> bool:
        """Whether it beats the first configuration by more than thrice the noise, and a percent. The best of many looks
        better than it is: the last round, after all choosing, decides alone."""
        first = self._candidates[0]
        last = max(candidate.rounds.keys() & first.rounds.keys(), default=None)
        if last is None:
            return False
        ours, firsts = candidate.rounds[last], first.rounds[last]
        chance = self._noise() * math.sqrt(1 / len(ours) + 1 / len(firsts))
        return statistics.fmean(ours) / statistics.fmean(firsts) - 1 > max(_LEAST_GAIN, 3 * chance)

    def _round(self, servers: Pool, candidates: Sequence[Candidate], confirm: bool = False) -> None:
        """Measure each once more, in repeats: one after the other where all servers live at once, else those of one
        configuration together. The server that is up comes first, what will go on surely or likely comes last: its
        server is then up when the next round begins. To confirm, twice as many repeats are made."""
        number, self._number, first = self._number, self._number + 1, self._candidates[0]
        table = self._run.recipe.serving
        repeats, room = range(2 * table.repeats if confirm else table.repeats), table.servers
        living = servers.living
        order = sorted(
            candidates, key=lambda one: (one.name not in living, math.inf if one is first else one.score(first))
        )
        for one in candidates:
            places = {"configuration": one.configuration.places, "round": number}
            if any(self._journal.get(places | {"repeat": repeat}) is None for repeat in repeats):
                self._recall_fault(one)
        todo = [(repeat, one) for repeat in repeats for one in order]
        if len(order) > room:
            todo = [(repeat, one) for one in order for repeat in repeats]
        for repeat, one in todo:
            unit = {"configuration": one.configuration.places, "round": number, "repeat": repeat}
            result = self._journal.get(unit)
            if result is None and not one.fault:
                result = self._visit(servers, order, one, unit)
            if result is not None:
                start_s = result.get("start_s", 0.0)  # a journal from before it was told
                self._passing_s, self._visits = self._passing_s + result["seconds"] - start_s, self._visits + 1
                self._starting_s, self._starts = self._starting_s + start_s, self._starts + (start_s > 0)
                one.rounds.setdefault(number, []).append(result["tokens_per_s"])
                one.figures += result["figures"]

    def _visit(
        self, servers: Pool, order: Sequence[Candidate], one: Candidate, unit: dict[str, Any]
    ) -> dict[str, Any] | None:
        """One pass over all sets; None where the time is over, or it can't be served."""
        needed = one is self._candidates[0] and not one.rounds  # the others are told by it
        if self._spent_s + self._likely_s(servers, one) > self._budget_s and not self._over:
            self._over = True
            say(f"tune: {duration(self._spent_s)} of {duration(self._budget_s)} are used; no more is begun")
        if self._over and not needed:
            return None
        began, up = time.monotonic(), one.name in servers.living
        servers.add({each.name: each.run for each in order})
        failed = servers.prepare([each.name for each in order if not each.fault])
        for each in order:
            if each.name in failed and each is not one:  # they started together: the time is this pass's
                self._fail(each, failed[each.name], 0.0)
        try:
            if one.name in failed:
                raise failed[one.name]
            state = servers.get(one.name)
            ready = time.monotonic()
            figures = self._measure(state, one, unit)
        except EngineError as error:
            servers.drop(one.name)
            self._fail(one, error, time.monotonic() - began)
            return None
        rate = sum(each["tokens"] for each in figures) / math.fsum(each["wall_s"] for each in figures)
        say(f"tune: round {unit['round'] + 1}: {one.configuration.text}: {rate:,.1f} tokens/s")
        result = {"tokens_per_s": round(rate, 3), "figures": figures, "seconds": round(time.monotonic() - began, 2)}
        result["start_s"] = 0.0 if up else round(ready - began, 2)
        self._journal.add(unit, result)
        return result

    def _measure(self, state: ServerState, one: Candidate, unit: dict[str, Any]) -> list[dict[str, Any]]:
        self._bench.warm_up(state, [self._streams])
        return [
            self._bench.measure(state, name, self._streams, one.drafting.drafts, fs.digest_json([unit, name])).figures()
            for name in self._bench.sets.sets
        ]

    @property
    def _spent_s(self) -> float:
        return self._passing_s + self._starting_s + self._failing_s

    def _likely_s(self, servers: Pool, one: Candidate) -> float:
        """What its next pass will take: a pass as they were so far, and a start where its server is not up. All that
        live at once start together, in the first pass, and it would make the others look as long as itself."""
        passing = self._passing_s / self._visits if self._visits else 0.0
        waits = self._starts + self._fails
        start = 0.0 if one.name in servers.living or not waits else (self._starting_s + self._failing_s) / waits
        return passing + start

    def _fail(self, one: Candidate, error: EngineError, seconds: float) -> None:
        """Leave it out from now on: its server doesn't start, or failed in a pass.

        Raises: EngineError where it is the first configuration; that is tried again by the next call.
        """
        text = one.configuration.text
        if one is self._candidates[0]:
            raise EngineError(
                f"{text}: it can't be served: {error.seen}",
                expected="the settings that are served without tuning to work",
                cause=error.cause,
                next=f"mend that, or [serving], then: {self._run.command('tune')}   # what is measured is kept",
            ) from error
        one.fault = error.seen.splitlines()[0]
        self._count_failure(seconds)
        self._journal.add({"fault": one.configuration.places}, {"seen": one.fault, "seconds": round(seconds, 2)})
        say(f"tune: {text}: it can't be served: {one.fault}")

    def _recall_fault(self, one: Candidate) -> None:
        """What an earlier call found of it."""
        found = self._journal.get({"fault": one.configuration.places})
        if found is None or one.fault or one is self._candidates[0]:
            return
        if isinstance(found, str):  # a journal from before its seconds were told
            found = {"seen": found, "seconds": 0.0}
        one.fault = found["seen"]
        self._count_failure(found["seconds"])

    def _count_failure(self, seconds: float) -> None:
        self._failing_s, self._fails = self._failing_s + seconds, self._fails + (seconds > 0)

    def _write(self, best: Candidate) -> Tuned:
        """The best as a profile, with its evidence."""
        first, table = self._candidates[0], self._run.recipe.serving
        ranked = sorted(self._candidates, key=lambda one: one.score(first), reverse=True)
        state = load_state(best.run)
        evidence: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "engine": f"{self._kind} {state.version if state else ''}".strip(),
            "drafter": str(best.drafting.folder),
            "streams": self._streams,
            "temperature": table.temperature,
            "max_new_tokens": table.max_new_tokens,
            "prompts": {name: len(prompts) for name, prompts in self._bench.sets.sets.items()},
            "choices": self._choices.name,
            "minutes": round(self._spent_s / 60, 2),
            "rounds": self._number,
            "best": best.configuration.text,
            "kept_first": best is first,
            "configurations": [one.as_json(first, self._noise()) for one in ranked],
        }
        content = profile_of(self._base, self._choices, best.configuration, self._kind)
        path = tuned_profile(self._run, self._kind)
        fs.write_atomic(path, tomli_w.dumps(content | {"evidence": evidence}))
        return Tuned(best, ranked, path, evidence)
