"""A serving engine asked for answers, each streamed, so that its first token and its end have a time.

SGLang (0.5.11 to 0.5.23) ends an answer with what became of its drafts. vLLM (0.10.2 and later) counts drafts for all
requests together (`/metrics`), so a measurement reads its counters before and after, with nobody else asking.

Both count a draft as accepted when the target agrees, also behind the answer's end (end of turn, max_tokens): at most
once an answer, which a walk over the answer doesn't see.
"""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from eyas.clients import Clients
from eyas.data.regenerate.protocol import Aborted, Protocol
from eyas.drafter.walk import Acceptance
from eyas.errors import EngineError
from eyas.settings import Regenerate, Serving
from eyas.tap.releases import SGLANG

_CONNECT_S, _ANSWER_S, _POLL_S = 10.0, 1800.0, 0.05
_REFUSALS = (400, 413, 422)
_METRIC = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
# vLLM 0.32.0, v1/spec_decode/metrics.py and v1/metrics/loggers.py.
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_WRITTEN = "vllm:generation_tokens_total"


class PromptRefused(Exception):
    """The server doesn't take this prompt; the text is its reason."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    Attributes:
        token_ids: as emitted, the end-of-turn token included.
        cut: it reached its longest length.
        first_s, wall_s: seconds from the request to its first token, and to its last.
        accepted: verifications by number of accepted drafts, as SGLang counts them; None where the engine counts for
            all requests together, or there was nothing to verify.
    """

    token_ids: list[int]
    cut: bool
    first_s: float
    wall_s: float
    accepted: tuple[int, ...] | None


@dataclass(frozen=True)
class Counters:
    """vLLM's counters since its start: tokens written, verifications, drafts accepted by position."""

    written: int
    verifications: int
    accepted_at: tuple[int, ...]

    def since(self, before: "Counters") -> Acceptance:
        """What was counted between two readings."""
        earlier = before.accepted_at or (0,) * len(self.accepted_at)
        gained = np.array(self.accepted_at, np.int64) - np.array(earlier, np.int64)
        return Acceptance(self.verifications - before.verifications, gained)


class Asker:
    """Asks one server. Use as an async context manager, from one event loop.

    Args:
        url: where it listens.
        kind: "sglang" or "vllm".
        table: temperature and seed.
        ends, vocab_size: of the target (data.regenerate.protocol).
    """

    def __init__(self, url: str, kind: str, table: Serving, ends: frozenset[int], vocab_size: int) -> None:
        self.url, self.kind, self.seed = url.rstrip("/"), kind, table.seed
        sampling = Regenerate(kind="sglang" if kind == "sglang" else "openai", temperature=table.temperature)
        self._protocol = Protocol(sampling, ends, vocab_size)
        self._clients = Clients()
        self._model = ""

    async def __aenter__(self) -> "Asker":
        if self.kind == "vllm":
            listed = await self._get("/v1/models")
            self._model = str(listed.json()["data"][0]["id"])
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._clients.close()

    async def ask(self, prompt: Sequence[int], max_new_tokens: int, seed: int, salt: str) -> Answer:
        """The answer to token ids.

        Args:
            salt: prompts are answered from the prefix cache only where an earlier one had the same.
        Raises: PromptRefused where it is too long for the server; EngineError for every other fault: a measurement
            with lost requests is none.
        """
        ids = list(prompt)
        body = self._protocol.request(self._model, ids, max_new_tokens, seed) | {"stream": True}
        body["extra_key" if self.kind == "sglang" else "cache_salt"] = salt
        request = httpx.Request("POST", self.url + self._protocol.path, json=body)
        request.extensions["timeout"] = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S, pool=None).as_dict()
        pieces: list[bytes] = []
        started = first = last = time.perf_counter()
        try:
            with self._clients.one() as client:
                response = await client.send(request, stream=True)
                try:
                    await self._check(response)
                    async for piece in _events(response):
                        last = time.perf_counter()
                        first = last if not pieces else first
                        pieces.append(piece)
                finally:
                    await response.aclose()
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise self._lost(f"{type(error).__name__}: {error or 'no answer'}") from None
        return self._read(pieces, ids, first - started, last - started)

    async def counters(self) -> Counters:
        """vLLM's counters of now. They may lag behind an answer by a step: see `settled`."""
        text = (await self._get("/metrics")).text
        sums: Counter[str] = Counter()
        positions: Counter[int] = Counter()
        for found in _METRIC.finditer(text):
            sums[found["name"]] += int(float(found["value"]))
            if found["name"] == _ACCEPTED and (place := _POSITION.search(found["labels"])):
                positions[int(place[1])] += int(float(found["value"]))
        at = tuple(positions[place] for place in range(max(positions, default=-1) + 1))
        return Counters(sums[_WRITTEN], sums[_DRAFTS], at)

    async def _check(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        await response.aread()
        said = f"HTTP {response.status_code}: {response.text[:300].strip()}"
        if response.status_code in _REFUSALS:
            raise PromptRefused(said)
        raise self._lost(said)

    def _read(self, pieces: list[bytes], prompt: list[int], first_s: float, wall_s: float) -> Answer:
        try:
            body = self._whole(pieces)
            answer = self._protocol.answer(body, prompt, self.url)
        except (ValueError, KeyError, IndexError) as error:
            raise self._lost(f"{type(error).__name__}: {error} in a stream of {len(pieces)} pieces") from None
        except Aborted as aborted:
            raise self._lost(str(aborted)) from None
        return Answer(answer.token_ids, answer.cut, first_s, wall_s, _histogram(body.get("meta_info") or {}))

    def _whole(self, pieces: list[bytes]) -> Mapping[str, Any]:
        """The body that the same answer has without streaming."""
        if self.kind == "sglang":  # each piece holds all tokens so far, unless --incremental-streaming-output is on
            body = json.loads(pieces[-1])
            if len(body.get("output_ids", ())) != body["meta_info"]["completion_tokens"]:
                body["output_ids"] = [token for piece in pieces for token in json.loads(piece)["output_ids"]]
            return dict(body)
        choices = [choice for piece in pieces for choice in json.loads(piece)["choices"]]
        token_ids = [token for choice in choices for token in choice.get("token_ids") or ()]
        return {"choices": [choices[0] | choices[-1] | {"token_ids": token_ids}]}

    async def _get(self, path: str) -> httpx.Response:
        try:
            with self._clients.one() as client:
                response = await client.get(self.url + path, timeout=60)
        except httpx.TransportError as error:
            raise self._lost(f"{path}: {type(error).__name__}: {error}") from None
        await self._check(response)
        return response

    def _lost(self, said: str) -> EngineError:
        return EngineError(
            f"{self.url}: {said}",
            expected="an answer to every request: a measurement with lost ones is none",
            cause="the server ended or is overloaded",
            next="look at the end of its log in the run's logs/, then run the same command: what is measured is kept",
        )


async def settled(asker: Asker, written: int) -> Counters:
    """vLLM's counters once they hold `written` tokens; they are brought up to date after an answer is sent.

    Raises: EngineError where they don't get there, or hold more.
    """
    for _ in range(100):
        now = await asker.counters()
        if now.written >= written:
            break
        await asyncio.sleep(_POLL_S)
    if now.written != written:
        raise EngineError(
            f"{asker.url}/metrics: {now.written} tokens were written, {written} came here",
            expected="the same number: counters of drafts are of all requests together",
            cause="somebody else asks this server, or it was started with --disable-log-stats",
            next="measure on a server of its own",
        )
    return now


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events, without the closing mark."""
    rest = b""
    async for block in response.aiter_raw():
        *events, rest = (rest + block).split(b"\n\n")
        for event in events:
            data = event.strip().removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                yield data


def _histogram(meta: Mapping[str, Any]) -> tuple[int, ...] | None:
    """SGLang's verifications by number of accepted drafts (0.5.11 to 0.5.23 under two names)."""
    found = meta.get("spec_correct_drafts_histogram") or meta.get("spec_accept_histogram")
    return tuple(int(count) for count in found) if found else None


def summed(answers: Sequence[Answer], drafts: int) -> Acceptance:
    """SGLang's counts of several answers: 1 + spec_num_correct_drafts / spec_verify_ct is its length.

    Raises: EngineError where none has them.
    """
    total = Acceptance.none(drafts)
    for answer in answers:
        for accepted, count in enumerate(answer.accepted or ()):
            total.verifications += count
            total.accepted_at[:accepted] += count
    if not total.verifications:
        raise EngineError(
            "SGLang's answers hold no counts of drafts (meta_info.spec_correct_drafts_histogram)",
            expected="them, from a server with a drafter",
            cause=f"it was started without one, or is outside {SGLANG}",
        )
    return total
