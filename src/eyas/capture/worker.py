"""Samples through a server: some requests in flight, each settled once all its rows are in the store.

All of this runs in one event loop; rows are filed by threads of `Filing`. A try at a sample ends as

    whole      all rows came and are written, whatever was answered
    bad        states with NaN, Inf or zeros: rejected at once
    refused    the server doesn't take the prompt: rejected
    lost       it was answered, and rows are missing (the tap dropped them)   asked for again
    failed     a named transient fault of the server                          asked for again

A sample that was lost or failed `capture.attempts` times is given up only where a short prompt goes through: a server
that fails on all of them is an error, and no sample's fault.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from eyas.capture.filing import Filing, Request
from eyas.capture.spot import SpotChecks
from eyas.data.tokens import Sample
from eyas.engine.client import EngineClient, Prefilled, Refused, Transient
from eyas.errors import EngineError
from eyas.progress import duration, say
from eyas.signals import Stop
from eyas.store.writer import StoreWriter

_TICK_S = 0.25
_ROWS_POLL_S = 0.01
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_PROBE_TOKENS = 8
LOST = "rows were lost"


@dataclass
class Tally:
    """What happened, for the record.

    Attributes:
        tokens: of samples that were sent and settled in this process, rejected ones included.
        again: reason -> tries that had to be made again.
    """

    tokens: int = 0
    again: Counter[str] = field(default_factory=Counter)


class Worker:
    """Keeps requests in flight until all samples are settled.

    Args:
        nonce: makes this process's request ids its own: rows of a dead worker's are recognised by theirs.
        in_flight: requests at once.
        longest: tokens of the longest prompt that the server takes; longer samples are rejected, not sent.
        attempts: tries at one sample.
        patience_s: an answer or a row must come so often while this process runs; time in which it is stopped
            doesn't count.
        stop: looked at between samples and several times a second.
        watch: called several times a second; raises where the server has ended.
    """

    def __init__(
        self,
        client: EngineClient,
        filing: Filing,
        writer: StoreWriter,
        spots: SpotChecks,
        *,
        nonce: str,
        in_flight: int,
        longest: int,
        attempts: int,
        patience_s: float,
        stop: Stop,
        watch: Callable[[], None],
    ) -> None:
        self._client, self._filing, self._writer, self._spots = client, filing, writer, spots
        self._nonce, self._in_flight, self._longest, self._attempts = nonce, in_flight, longest, attempts
        self._patience_s, self._stop, self._watch = patience_s, stop, watch
        self._asked = self._answers = self._owed = 0
        self._turn = asyncio.Lock()
        self.tally = Tally()

    async def run(self, samples: Iterator[tuple[Sample, bool]]) -> None:
        """Settle these samples; returns early where a stop is asked for: what is in flight is given up.

        Args:
            samples: each with whether it is to be checked against the server's own log-probabilities.
        Raises: EngineError where the server ended, hangs, or fails on all prompts; StoreFull; what `watch` raises.
        """
        watcher = asyncio.create_task(self._observe())
        lanes = {asyncio.create_task(self._lane(samples)) for _ in range(self._in_flight)}
        try:
            working = set(lanes)
            while working and not watcher.done():
                done, _ = await asyncio.wait({*working, watcher}, return_when=asyncio.FIRST_COMPLETED)
                working -= done
                for task in done:
                    task.result()
        finally:
            for task in (*lanes, watcher):
                task.cancel()
            await asyncio.gather(*lanes, watcher, return_exceptions=True)

    async def _lane(self, samples: Iterator[tuple[Sample, bool]]) -> None:
        for sample, checked in samples:
            if self._stop.signum is not None:
                return
            if len(sample.token_ids) > self._longest:
                await self._reject_quietly(sample, f"longer than the server takes ({self._longest} tokens)")
                continue
            await self._settle(sample, checked)
            self.tally.tokens += len(sample.token_ids)

    async def _settle(self, sample: Sample, checked: bool) -> None:
        fault, pause = "", _FIRST_PAUSE_S
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            try:
                fault = await self._try(sample, checked)
            except Refused as refusal:
                if self._writer.settled(sample.id):
                    return None
                await self._probe(sample, f"refused a prompt of {len(sample.token_ids)} tokens: {refusal}")
                return await self._reject(sample, "refused by the server", str(refusal))
            except Transient as failure:
                fault = str(failure)
                if not self.tally.again["server failed"]:
                    say(f"capture: asked again, as are all that fail so: {fault}")
                self.tally.again["server failed"] += 1
            if not fault:
                return None
        if self._writer.settled(sample.id):  # its rows came, of several tries perhaps; an answer to check them didn't
            return None
        await self._probe(sample, f"failed {self._attempts} times on one prompt, the last time: {fault}")
        lost = fault == LOST
        return await self._reject(sample, LOST if lost else "server failed", f"{self._attempts} times; {fault}")

    async def _try(self, sample: Sample, checked: bool) -> str:
        """One try; returns "" for a sample that is settled. Raises Transient or Refused."""
        request, settled = self._request(sample, self._spots.first_row(sample) if checked else None)
        answer = await self._ask(request, settled)
        if request.bad:
            await self._reject(sample, request.bad, "")
            return ""
        if not request.whole:
            self.tally.again[LOST] += 1
            return LOST
        if request.final is not None:
            self._spots.submit(sample, request.final, torch.from_numpy(answer.logprobs))
        return ""

    def _request(self, sample: Sample, final_from: int | None) -> tuple[Request, asyncio.Event]:
        self._asked += 1
        settled, loop = asyncio.Event(), asyncio.get_running_loop()
        rid = f"eyas-{self._nonce}-{sample.id}-{self._asked}"
        return Request(rid, sample, lambda: _wake(loop, settled), final_from=final_from), settled

    async def _ask(self, request: Request, settled: asyncio.Event) -> Prefilled:
        """Send a request, once the ring has room; returns once its rows are filed, or known to be lost."""
        async with self._turn:  # one looks for room, the others wait in order: a long sample isn't overtaken for ever
            while not self._filing.room_for(len(request.sample.token_ids)):
                await asyncio.sleep(_ROWS_POLL_S)
            self._filing.expect(request)
        try:
            try:
                answer = await self._send(request)
            except (Transient, Refused):  # it may have failed after its rows were made
                await self._filed(settled)
                raise
            await self._filed(settled)
        finally:
            self._filing.forget(request)
        return answer

    async def _send(self, request: Request) -> Prefilled:
        self._owed += 1
        try:
            answer = await self._client.prefill(request.sample.token_ids.tolist(), request.rid, request.final_from)
        finally:
            self._owed -= 1
        self._answers += 1
        return answer

    async def _filed(self, settled: asyncio.Event) -> None:
        """Rows found room in the ring before their request was answered: those behind the marker are others'."""
        marker = self._filing.marker()
        while not settled.is_set() and not marker.passed():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(settled.wait(), _ROWS_POLL_S)

    async def _probe(self, sample: Sample, seen: str) -> None:
        """Send a short prompt. Raises EngineError where that fails as well."""
        count = min(_PROBE_TOKENS, len(sample.token_ids))
        short = replace(sample, token_ids=sample.token_ids[:count].copy(), loss_mask=sample.loss_mask[:count])
        request, settled = self._request(short, None)
        request.store = False
        try:
            await self._ask(request, settled)
            fault = "" if request.whole else LOST
        except (Transient, Refused) as failure:
            fault = str(failure)
        if fault:
            raise EngineError(
                f"{self._client.url}: {seen}; and on one of {count} tokens: {fault}",
                expected="a server that takes at least a short prompt",
                cause="it is shutting down, out of memory, or the tap in it has failed",
                next="eyas doctor RECIPE; then eyas capture RECIPE goes on: committed shards are kept",
            )

    async def _reject(self, sample: Sample, reason: str, detail: str) -> None:
        told = f"{reason}: {detail}" if detail else reason
        say(f"capture: rejected: sample {sample.id}, {len(sample.token_ids)} tokens: {told}")
        await self._reject_quietly(sample, reason)

    async def _reject_quietly(self, sample: Sample, reason: str) -> None:
        # In a thread: its bytes are zeroed, and where two shards wait for their commit it waits for one of them.
        await asyncio.to_thread(self._writer.reject, sample.id, reason)

    async def _observe(self) -> None:
        """Returns when the capture is to stop."""
        loop = asyncio.get_running_loop()
        looked, silent, heard = loop.time(), 0.0, (-1, -1)
        while True:
            await asyncio.sleep(_TICK_S)
            self._filing.check()
            self._spots.check()
            self._watch()
            if self._stop.signum is not None:
                return
            # Not the clock's time: where this process was stopped for minutes, answers lie waiting.
            silent += min(loop.time() - looked, 2 * _TICK_S)
            looked = loop.time()
            now = (self._answers, self._filing.rows)
            ours = self._owed == 0 and self._filing.waiting  # all is answered, and the store takes its time
            if ours or heard != now:
                silent, heard = 0.0, now
            if silent > self._patience_s:
                raise EngineError(
                    f"{self._client.url}: no answer and no row for {duration(silent)}",
                    expected="one of either, while requests are in flight",
                    cause="the server hangs",
                    next="eyas doctor RECIPE   # says where it hangs; committed shards are kept",
                )


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event from another thread."""
    loop.call_soon_threadsafe(event.set)
