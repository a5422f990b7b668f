"""A prompt of Eyas's own, and what comes of it: the rows on the ring and the server's answer."""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.engine.client import EngineClient, Prefilled, Refused, ServerFacts, Transient
from eyas.errors import EngineError, TargetError
from eyas.tap.encode import FAULT_NAMES, FINE, decode
from eyas.tap.reader import RingReader
from eyas.tap.ring import Counters
from eyas.target import Target

LAYER_ROWS = 1024  # first rows, kept to be run through the checkpoint's layers
LOGPROB_ROWS = 256  # last rows, whose log-probabilities are asked for
_DISTINCT = 20  # ids in a text of 256 words, at least
_LOST_AFTER_S = 10.0  # rows are on the ring before their request is answered
_SILENT_S = 600.0
_WORDS = (
    "the a of to and in it was for on with as by at from his her they we not but after before under over between "
    "river harbour lighthouse keeper storm letter market engine valley winter summer music paper bridge garden number "
    "year minute house street captain doctor teacher child writes found carried remembered built opened counted asked "
    "because while until seven forty 1893 3,200 small old bright quiet early sudden , . ; ? — ( )"
)


class Canary(NamedTuple):
    """What came of one prompt: states of the positions `kept`, and the server's own answer."""

    token_ids: list[int]
    kept: Tensor  # int64 [k], rising positions
    aux: Tensor  # bfloat16 [k, 3, H]
    final: Tensor  # bfloat16 [k, H]
    pieces: list[int]
    logprobs_from: int
    answer: Prefilled

    def at(self, first: int, last: int) -> slice:
        """Rows of positions first..last."""
        return slice(*torch.searchsorted(self.kept, torch.tensor([first, last])).tolist())


def canary_lengths(facts: ServerFacts) -> tuple[int, int]:
    """Tokens of the long canary and of its beginning: the long one is cut, and the last piece is a short one."""
    chunk = facts.chunk_tokens
    length = chunk + min(2 * chunk, 128) - 10
    if not chunk or length > facts.longest_prompt:
        length = min(facts.longest_prompt, LOGPROB_ROWS)
    return length, min(length // 2, LOGPROB_ROWS, chunk or length)


def canary_ids(target: Target, length: int) -> list[int]:
    """Token ids of a text; random ids where the target's folder has no tokenizer that would make some."""
    chance = random.Random(0)
    words = _WORDS.split()
    token_ids: list[int] = []
    try:
        tokenizer = target.tokenizer
    except TargetError:
        tokenizer = None
    while tokenizer is not None and len(token_ids) < length:
        text = " ".join(chance.choice(words) for _ in range(256))
        token_ids += tokenizer.encode(text, add_special_tokens=False)
        # Transformers makes an empty tokenizer of some families where a folder has none: few ids, or the unknown one.
        if len(set(token_ids)) < _DISTINCT or max(token_ids) >= target.vocab_size:
            tokenizer, token_ids = None, []
    return token_ids[:length] or [chance.randrange(target.vocab_size) for _ in range(length)]


def take(ring: RingReader, client: EngineClient, token_ids: list[int], rid: str, watch: Callable[[], None]) -> Canary:
    """Send one prompt and take its rows off the ring."""
    count, logprobs_from = len(token_ids), max(0, len(token_ids) - LOGPROB_ROWS - 1)
    asking = _Asking(client, token_ids, rid, logprobs_from)
    kept = torch.tensor([at for at in range(count) if at < LAYER_ROWS or at >= logprobs_from])
    hidden = ring.layout.hidden_size
    aux = torch.zeros(len(kept), 3, hidden, dtype=torch.bfloat16)
    final = torch.zeros(len(kept), hidden, dtype=torch.bfloat16)
    came, pieces, before = torch.zeros(count, dtype=torch.bool), [], ring.counters()
    heard = time.monotonic()
    while not (came.all() and asking.ended):
        block = ring.read(0.2)
        watch()
        if block is None:
            silent = time.monotonic() - heard
            if asking.ended and silent > _LOST_AFTER_S:
                raise _lost(ring.counters(), before, int(came.sum()), count)
            if silent > _SILENT_S:
                raise EngineError(
                    f"self-test: {client.url} has not answered a prompt of {count} tokens for {silent:.0f} s"
                )
            continue
        heard = time.monotonic()
        for index, segment in enumerate(block.segments):
            if segment.rid != rid:
                continue
            ids, of_aux, of_final = block.piece(index)
            first, last = segment.start, segment.start + segment.length
            _same_ids(token_ids[first:last], ids, first)
            _sound(of_aux.faults, "aux states", first)
            _sound(of_final.faults, "final states", first)
            within = (kept >= first) & (kept < last)
            rows = kept[within] - first
            aux[within] = decode(of_aux.values[rows], None if of_aux.scales is None else of_aux.scales[rows])
            final[within] = decode(of_final.values[rows], None if of_final.scales is None else of_final.scales[rows])
            came[first:last] = True
            pieces.append(segment.length)
        ring.release(block)
    return Canary(token_ids, kept, aux, final, pieces, logprobs_from, asking.result())


class _Asking:
    """One request in a thread of its own, while this one reads the ring. A thread that hangs ends with the process."""

    def __init__(self, client: EngineClient, token_ids: list[int], rid: str, logprobs_from: int) -> None:
        self._answer: Prefilled | None = None
        self._fault: Exception | None = None

        async def ask() -> Prefilled:
            async with client:
                return await client.prefill(token_ids, rid, logprobs_from)

        def run() -> None:
            try:
                self._answer = asyncio.run(ask())
            except (Transient, Refused, EngineError) as fault:
                self._fault = fault

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether it was answered. Raises EngineError where it failed."""
        if self._thread.is_alive():
            return False
        if self._answer is None:
            if isinstance(self._fault, EngineError):
                raise self._fault
            raise EngineError(f"self-test: {self._fault}", expected="an answer to a prompt") from self._fault
        return True

    def result(self) -> Prefilled:
        assert self._answer is not None
        return self._answer


def _lost(now: Counters, before: Counters, came: int, count: int) -> EngineError:
    if now.rows == before.rows and now.dropped_rows == before.dropped_rows:
        return EngineError(
            f"self-test: the tap never fired: a prompt of {count} tokens was answered, and none of its rows came",
            expected=f"{count} rows of hidden states through the ring",
            cause="the tap is not in the process that runs the model, or this release calls it otherwise",
            next="look for `tap` and `plugin` in the server's log",
        )
    dropped = now.dropped_rows - before.dropped_rows
    return EngineError(
        f"self-test: {came} of {count} rows came, {dropped} were dropped",
        expected="all rows of a prompt that was answered",
        cause="the ring is too small" if dropped else "the tap takes only a part of each forward pass for its own",
        next="raise capture.ring_bytes" if dropped else "look for `tap` in the server's log",
    )


def _sound(faults: Tensor, kind: str, first: int) -> None:
    bad = (faults != FINE).nonzero()
    if len(bad):
        fault = FAULT_NAMES[int(faults[tuple(bad[0])])]
        raise EngineError(
            f"self-test: {kind} at position {first + int(bad[0, 0])} of the canary: {fault}",
            expected="finite states, not all zero in any row",
            cause="the engine's number type overflows (fp16), or its attention or quantisation kernel is at fault",
            next="another number type (--set engine.dtype=bfloat16), or another --attention-backend in engine.args",
        )


def _same_ids(sent: list[int], came: Tensor, first: int) -> None:
    expected = torch.tensor(sent, dtype=came.dtype)
    if len(sent) != len(came) or not torch.equal(expected, came):
        raise EngineError(
            f"self-test: rows {first} to {first + len(came)} came with token ids {came[:8].tolist()}...",
            expected=f"{sent[:8]}..., which were sent",
            cause="rows are filed under the wrong request or position: this release batches in another way",
        )
