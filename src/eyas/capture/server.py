"""Capture from a server: started or found, its facts looked at, and the worker run against it."""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eyas.capture.filing import Filing
from eyas.capture.spot import SpotChecks
from eyas.capture.worker import Worker
from eyas.cpu import torch_threads
from eyas.data.tokens import Sample, Tokens
from eyas.engine.client import EngineClient, ServerFacts, Transient
from eyas.engine.preflight import Facts
from eyas.engine.server import serving
from eyas.engine.state import ServerState
from eyas.engine.status import server_died
from eyas.errors import EngineError
from eyas.progress import Progress, say, size
from eyas.run import Run
from eyas.signals import Stop
from eyas.store.writer import StoreWriter
from eyas.tap.block import row_bytes
from eyas.tap.reader import RingReader
from eyas.target import Target

# Fewer tokens say little: their log-probabilities are checked only where a shard has nothing longer.
_SPOT_TOKENS = 16
# Flags that change states by more than rounding.
_STATE_FLAGS = (
    "--quantization",
    "--kv-cache-dtype",
    "--load-format",
    "--json-model-override-args",  # SGLang
    "--lora-paths",
    "--hf-overrides",  # vLLM
    "--lora-modules",
)


@dataclass(frozen=True)
class Captured:
    """What one process did.

    Attributes:
        tokens_per_s: of this process.
        figures: for the record: self-test, spot checks, tries made again, rows dropped.
    """

    tokens_per_s: float
    figures: dict[str, Any]


def server_version(run: Run) -> str:
    """Name and release of the engine that the recipe starts. Raises EngineError where there is none."""
    return f"{run.recipe.engine.kind} {Facts(run).launch.version}"


def state_flags(args: Sequence[str]) -> list[str]:
    """The words of engine.args that change states by more than rounding."""
    kept, taking = [], False
    for word in args:
        taking = word.partition("=")[0] in _STATE_FLAGS if word.startswith("--") else taking
        if taking:
            kept.append(word)
    return kept


def capture_from_server(run: Run, target: Target, tokens: Tokens, writer: StoreWriter, stop: Stop) -> Captured:
    """Settle what the store does not hold yet, or as much as comes before a stop is asked for.

    Raises: EngineError, naming the server's log where it ended; StoreFull; Interrupted while the server starts.
    """
    with writer.committing_behind(), serving(run, stop=stop) as state:
        return asyncio.run(_Capture(run, target, tokens, writer, stop, state).run())


class _Capture:
    def __init__(
        self, run: Run, target: Target, tokens: Tokens, writer: StoreWriter, stop: Stop, state: ServerState
    ) -> None:
        self.run_, self.target, self.tokens, self.writer = run, target, tokens, writer
        self.stop, self.state, self.table = stop, state, run.recipe.capture

    async def run(self) -> Captured:
        async with self.state.client() as client:
            facts = await self._facts(client)
            self._refuse_too_long(facts.longest_prompt)
            return await self._work(client, facts)

    async def _facts(self, client: EngineClient) -> ServerFacts:
        try:
            facts = await client.facts()
        except Transient as fault:
            if not self.state.alive():
                raise server_died(self.run_, self.state) from None
            raise EngineError(
                f"{fault}", expected="an answer: the server is ready", next=self.run_.command("doctor")
            ) from None
        running, asked = (facts.version, facts.dtype), (self.state.version, self.run_.recipe.engine.dtype)
        if running != asked:
            raise EngineError(
                f"{client.url}: {self.state.title} {running[0]} in {running[1]}",
                expected=f"{self.state.title} {asked[0]} in {asked[1]}, which was started there",
                cause="another server took the port",
                next=self.run_.command("serve stop"),
            )
        return facts

    def _refuse_too_long(self, longest: int) -> None:
        """Say how many samples the server can't take: each is rejected when its shard's turn comes, for a rejection
        begins the shard's file.

        Raises: EngineError where they are more than half of all samples.
        """
        plan = self.writer.plan
        long = np.flatnonzero(plan.tokens > longest)
        if not len(long):
            return
        told = f"{len(long):,} of {len(plan):,} samples are longer than this server takes ({longest:,} tokens)"
        if 2 * len(long) > len(plan):
            raise EngineError(
                f"{self.state.url}: {told}",
                expected="at most half of them: a drafter of the rest would be trained on a chance selection",
                cause="the model's context, or room for too few tokens in the server's KV cache",
                next="lower data.max_tokens, or (SGLang) raise --context-length or --max-total-tokens in engine.args",
            )
        say(f"capture: {told}: rejected")

    async def _work(self, client: EngineClient, facts: ServerFacts) -> Captured:
        plan, recipe = self.writer.plan, self.run_.recipe
        waiting = plan.tokens[self.writer.pending_rows()]
        total, left = int(plan.tokens.sum()), int(waiting[waiting <= facts.longest_prompt].sum())
        engine = f"{self.state.title} {facts.version} in {facts.dtype}"
        say(f"capture: {left:,} of {total:,} tokens to do, {engine} at {client.url}")
        ring = self.state.open_ring()
        unchecked = "the server runs random weights" if facts.dummy_weights else ""
        before = ring.counters()
        with (
            torch_threads(1),  # of each writing thread, beside a server that needs the cores
            Progress("capture", total, "tokens", self.run_.logs_dir, done=total - left) as progress,
            SpotChecks(self.target, facts.dtype, recipe.store.final_encoding, unchecked) as spots,
            Filing(ring, self.writer) as filing,
        ):

            def watch() -> None:
                if not self.state.alive():
                    raise server_died(self.run_, self.state)
                self._advance(progress, worker, ring, total - left)

            worker = Worker(
                client,
                filing,
                self.writer,
                spots,
                nonce=uuid.uuid4().hex[:8],
                in_flight=self.table.in_flight,
                longest=facts.longest_prompt,
                attempts=self.table.attempts,
                patience_s=recipe.engine.patience_s,
                stop=self.stop,
                watch=watch,
            )
            await worker.run(self._samples(facts.longest_prompt))
            self._advance(progress, worker, ring, total - left)
            checked = spots.finish()
        counters = ring.counters()
        return Captured(
            progress.rate,
            {
                "self_test": self.state.self_test,
                "spot_checks": asdict(checked),
                "again": dict(worker.tally.again),
                "rows_dropped": counters.dropped_rows - before.dropped_rows,
                "server_waited_s": round(counters.waited_s - before.waited_s, 2),
            },
        )

    def _advance(self, progress: Progress, worker: Worker, ring: RingReader, first: int) -> None:
        counters = ring.counters()
        filled, rows = counters.used_bytes / counters.capacity_bytes, counters.used_bytes // row_bytes(ring.layout)
        note = f"{rows:,} rows in the ring ({filled:.0%}), {size(self.writer.files.free_bytes())} of disk left"
        again = worker.tally.again.total()
        note += f", {again:,} tries made again" if again else ""
        progress.advance(first + worker.tally.tokens - progress.done, note)

    def _samples(self, longest: int) -> Iterator[tuple[Sample, bool]]:
        """Shard by shard, so that shards are committed one after another; the first long ones are checked."""
        for ids in self.writer.pending():
            samples = self.tokens.fetch(ids)
            sent = [sample for sample in samples if len(sample.token_ids) <= longest]
            told = [sample.id for sample in sent if len(sample.token_ids) >= _SPOT_TOKENS] or [one.id for one in sent]
            checked = set(told[: self.table.spot_check])
            yield from ((sample, sample.id in checked) for sample in samples)
