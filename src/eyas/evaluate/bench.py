"""Passes over the prompt sets of [serving], asked of any server of one engine."""

import asyncio
from collections.abc import Iterable

from eyas.engine.drafting import serving_kind
from eyas.engine.state import ServerState
from eyas.errors import Interrupted
from eyas.evaluate.ask import Asker
from eyas.evaluate.load import Load, Pass, run_pass
from eyas.evaluate.prompts import PromptSets, load_sets
from eyas.run import Run
from eyas.signals import Stop
from eyas.target import load_target

_WARM_TOKENS = 32


class Bench:
    """Asks servers and times them.

    Attributes:
        target: of the run.
        sets: what is asked.
    """

    def __init__(self, run: Run, stop: Stop) -> None:
        self._run, self._stop = run, stop
        self._table, self._kind = run.recipe.serving, serving_kind(run)
        self.target = load_target(run.recipe.target)
        self.sets = load_sets(run, self.target)
        self._warm: set[str] = set()

    def warm_up(self, state: ServerState, streams: Iterable[int]) -> bool:
        """Ask every set a little, once for each server: kernels are compiled at first use. Whether it was done now."""
        mark = f"{state.pid}-{state.created}"
        if mark in self._warm:
            return False
        self._warm.add(mark)
        for count in streams:
            for name in self.sets.sets:
                load = Load(count, count, _WARM_TOKENS, 0, f"warm {mark}")
                asyncio.run(self._pass(state, self.sets, name, load, self._table.temperature))
        return True

    def measure(self, state: ServerState, name: str, streams: int, drafts: int, salt: str) -> Pass:
        """One pass over a set.

        Args:
            drafts: positions that are counted; 0 without a drafter.
            salt: of this pass: what others left in the prefix cache is not used.
        Raises: EngineError; Interrupted where a stop was asked for, the pass is lost then.
        """
        per_stream, count = self._table.prompts_per_stream, len(self.sets.sets[name])
        count = min(count, streams * per_stream) if per_stream else count
        return self.measure_sets(state, self.sets, name, Load(streams, count, self._table.max_new_tokens, drafts, salt))

    def measure_sets(
        self, state: ServerState, sets: PromptSets, name: str, load: Load, temperature: float | None = None
    ) -> Pass:
        """The same over a set of others' making, at a temperature of its own where one is given."""
        heat = self._table.temperature if temperature is None else temperature
        done = asyncio.run(self._pass(state, sets, name, load, heat))
        if self._stop.signum is not None:
            raise Interrupted(
                self._stop.signum,
                f"serving: stopped; passes that are finished are kept in {self._run.dir}",
                next="the same command goes on from there",
            )
        return done

    async def _pass(self, state: ServerState, sets: PromptSets, name: str, load: Load, temperature: float) -> Pass:
        table, maker = self._table.model_copy(update={"temperature": temperature}), sets.maker
        async with Asker(state.url, self._kind, table, maker.encoder.ends, maker.vocab_size) as asker:
            return await run_pass(asker, sets, name, load, self._stop)
