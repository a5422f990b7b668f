"""One pass over a prompt set: so many streams at once, each answering one conversation after the other, timed."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas import fs
from eyas.drafter.walk import Acceptance
from eyas.errors import EngineError
from eyas.evaluate.ask import Answer, Asker, PromptRefused, settled, summed
from eyas.evaluate.prompts import Prompt, PromptSets
from eyas.progress import say
from eyas.signals import Stop

_POLL_S = 0.2
_BUSY = 0.8  # a client that computes for a larger share of the time may be what limits the rate


@dataclass
class Pass:
    """What one pass gave.

    Attributes:
        answers: by prompt id, in the order of its turns.
        prompts: by prompt id, token ids of each turn's prompt.
        refused: reasons of prompts that the server doesn't take.
        wall_s: of the whole pass.
        busy: share of it in which this client computed.
        acceptance: of all its verifications; None without a drafter.
    """

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    prompts: dict[str, list[list[int]]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    wall_s: float = 0.0
    busy: float = 0.0
    acceptance: Acceptance | None = None

    @property
    def all(self) -> list[Answer]:
        return [answer for answers in self.answers.values() for answer in answers]

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.all)

    def figures(self) -> dict[str, Any]:
        """Rates and times: tokens/s of all streams together, and of one while it is answered (waiting for its first
        token included)."""
        answers, tokens = self.all, self.tokens
        first = sorted(answer.first_s for answer in answers)
        figures: dict[str, Any] = {
            "answers": len(answers),
            "tokens": tokens,
            "cut": sum(answer.cut for answer in answers),
            "wall_s": round(self.wall_s, 3),
            "tokens_per_s": round(tokens / self.wall_s, 2),
            "tokens_per_s_per_stream": round(tokens / sum(answer.wall_s for answer in answers), 2),
            "first_token_s": {"median": round(_quantile(first, 0.5), 4), "p90": round(_quantile(first, 0.9), 4)},
            "client_busy": round(self.busy, 3),
        }
        if self.refused:
            figures["refused"] = len(self.refused)
        if self.acceptance is not None:
            figures |= self.acceptance.as_json() | {"accepted_at": self.acceptance.accepted_at.tolist()}
        return figures

    def digests(self) -> dict[str, str]:
        """Digest of each prompt's answers."""
        return {
            name: fs.digest_json([answer.token_ids for answer in answers]) for name, answers in self.answers.items()
        }


@dataclass(frozen=True)
class Load:
    """How a set is asked.

    Attributes:
        streams: answers in flight.
        prompts: taken from its beginning.
        max_new_tokens: of each answer.
        drafts: positions that are counted; 0 without a drafter.
        salt: of the pass, so that it doesn't find the prompts of another in the prefix cache.
    """

    streams: int
    prompts: int
    max_new_tokens: int
    drafts: int
    salt: str


async def run_pass(asker: Asker, sets: PromptSets, name: str, load: Load, stop: Stop | None = None) -> Pass:
    """Ask one set once.

    Raises: EngineError where a request is lost, or the server takes less than half of the prompts. A stop is obeyed by
        leaving the rest unasked: the pass is to be thrown away then.
    """
    prompts = sets.sets[name][: load.prompts]
    done, waiting = Pass(), iter(prompts)
    before = await asker.counters() if asker.kind == "vllm" and load.drafts else None
    began, computed = time.perf_counter(), time.process_time()
    tasks = [
        asyncio.create_task(_stream(asker, sets, waiting, load, done)) for _ in range(min(load.streams, len(prompts)))
    ]
    await _until_done(tasks, stop)
    done.wall_s = time.perf_counter() - began
    done.busy = (time.process_time() - computed) / done.wall_s
    if stop is not None and stop.signum is not None:
        return done
    if 2 * len(done.refused) > len(prompts):
        raise EngineError(
            f"{asker.url}: {len(done.refused)} of {len(prompts)} prompts of {name} were refused: "
            f"{next(iter(done.refused.values()))}",
            expected="most of them to be taken",
            cause="prompts and answers are longer than the server's context",
            next="lower serving.max_new_tokens, or serve with a longer context (serving.args)",
        )
    if done.busy > _BUSY:
        say(f"serving: the client computed for {done.busy:.0%} of the time: the rate may be its own, not the server's")
    if before is not None:
        done.acceptance = (await settled(asker, before.written + done.tokens)).since(before)
    elif load.drafts:
        done.acceptance = summed(done.all, load.drafts)
    return done


async def _stream(asker: Asker, sets: PromptSets, waiting: Iterator[Prompt], load: Load, done: Pass) -> None:
    for prompt in waiting:
        answers = done.answers.setdefault(prompt.id, [])
        asked = done.prompts.setdefault(prompt.id, [])
        try:
            await _converse(asker, sets, prompt, load, answers, asked)
        except PromptRefused as refused:
            done.refused[prompt.id] = str(refused)


async def _converse(
    asker: Asker, sets: PromptSets, prompt: Prompt, load: Load, answers: list[Answer], asked: list[list[int]]
) -> None:
    """Every turn of one conversation, also after an answer that was cut off."""

    async def ask(token_ids: list[int]) -> Answer:
        seed = int(fs.digest(str(asker.seed), prompt.id, str(len(answers)))[:8], 16) >> 1
        answer = await asker.ask(token_ids, load.max_new_tokens, seed, load.salt)
        asked.append(token_ids)
        answers.append(answer)
        return answer

    if prompt.conversation is None:
        await ask(list(prompt.token_ids))
        return
    transcript = sets.transcript(prompt)
    while not transcript.finished:
        transcript.write((await ask(transcript.next_prompt())).token_ids)


async def _until_done(tasks: Sequence[asyncio.Task[None]], stop: Stop | None) -> None:
    """Wait for all, or until one fails or a stop is asked for; then end the others."""
    pending = set(tasks)
    try:
        while pending and (stop is None or stop.signum is None):
            finished, pending = await asyncio.wait(pending, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in finished:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _quantile(rising: Sequence[float], share: float) -> float:
    return rising[min(len(rising) - 1, int(share * len(rising)))]
