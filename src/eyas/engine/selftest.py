"""Are the states that a server sends the target's? Asked at every start, before the first sample is captured.

A canary, a text that is longer than the server's chunks, and a short beginning of it are prefilled. Then

    same rows          of the long one, cut into chunks, and of the short one, whole, must agree
    final states       through the checkpoint's lm_head: the server's own log-probabilities and next token
    first aux layer    the embeddings, run through the checkpoint's first layers
    last aux layer     run through the checkpoint's remaining layers and norm: the final states
    middle aux layer   on request: the first one, run through the layers between

Each aux layer is compared with its two neighbours as well: ids off by one don't pass because layers are alike.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from eyas.engine.canary import LAYER_ROWS, Canary, canary_ids, canary_lengths, take
from eyas.engine.client import EngineClient, ServerFacts, Transient
from eyas.engine.compare import (
    LOGPROB_LIMIT,
    TIE,
    AuxCheck,
    Head,
    agreement_limit,
    cosine,
    cosine_limit,
    judge,
    logprob_error,
    reached,
)
from eyas.engine.partial import PartialDecoder, Unchecked, embeddings
from eyas.engine.ring import read_from
from eyas.errors import EngineError
from eyas.tap.reader import RingReader
from eyas.target import Target

_CPU = torch.device("cpu")  # the engine has taken the GPU


@dataclass(frozen=True)
class SelfTest:
    """Figures of a self-test that passed.

    Attributes:
        prompt_tokens, pieces: of the long canary; it came in pieces of so many rows.
        short_tokens: of its beginning.
        agreement: kind of state -> cosine that the rows in both reach.
        logprob_error: mean |difference| of log-probabilities, the larger of the two canaries'; None: not checked.
        aux: the layers that were compared.
        unchecked: what could not be checked -> why.
    """

    version: str
    dtype: str
    prompt_tokens: int
    pieces: list[int]
    short_tokens: int
    agreement: dict[str, float]
    logprob_error: float | None
    logprob_limit: float
    aux: list[AuxCheck] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people, one line a check."""
        worst = ", ".join(f"{kind} {value:.5f}" for kind, value in self.agreement.items())
        lines = [f"same rows in {self.pieces} and [{self.short_tokens}] tokens: worst cosine {worst}"]
        if self.logprob_error is not None:
            lines.append(
                f"final states: log-probabilities off by {self.logprob_error:.4f} (limit {self.logprob_limit})"
            )
        lines += [check.line() for check in self.aux if not check.unchecked]
        return lines + [f"{what}: unchecked: {why}" for what, why in self.unchecked.items()]


def self_test(
    target: Target,
    aux_layer_ids: Sequence[int],
    dtype: str,
    connect: Callable[[], EngineClient],
    ring: RingReader,
    *,
    middle: bool = False,
    watch: Callable[[], None] = lambda: None,
) -> SelfTest:
    """Run it against a server that is warm. It reads the ring while it runs, and closes it.

    Args:
        aux_layer_ids: what the server is believed to send.
        dtype: number type the server runs in: float32, bfloat16 or float16.
        connect: makes a client of the server.
        middle: check the middle layer as well.
        watch: called a few times a second while waiting; raises to give up (the server's process ended, a signal).
    Raises: EngineError with both values where states are not what they should be, or none came.
    """
    facts = asyncio.run(_facts(connect()))
    length, short = canary_lengths(facts)
    token_ids, stamp = canary_ids(target, length), time.time_ns()
    encodings = ring.layout.encoding, ring.layout.final_encoding
    try:
        read_from(ring)
        long_one = take(ring, connect(), token_ids, f"eyas-canary-{stamp}-long", watch)
        short_one = take(ring, connect(), token_ids[:short], f"eyas-canary-{stamp}-short", watch)
    finally:
        ring.close()
    limit = cosine_limit(target, dtype, "fp8" if "fp8" in encodings else "bf16")
    agreement = _agreement(target, long_one, short_one, aux_layer_ids, agreement_limit(target, dtype))
    unchecked: dict[str, str] = {}
    error, checks = None, []
    if not 0 < facts.chunk_tokens < length:  # `pieces` tells less: the ring may split what the server did not
        chunks = f"takes no prompt longer than its chunks of {facts.chunk_tokens} tokens"
        unchecked["chunks"] = f"the server {chunks if facts.chunk_tokens else 'prefills each prompt in one piece'}"
    if facts.dummy_weights:
        unchecked |= dict.fromkeys(("final", "aux"), "the server runs random weights (--load-format dummy)")
    else:
        try:
            head = Head(target, dtype)
            error = max(_check_final(head, canary, encodings[1]) for canary in (long_one, short_one))
        except Unchecked as reason:
            unchecked["final"] = str(reason)
        checks = _check_aux(target, aux_layer_ids, long_one, limit, middle, unchecked)
    return SelfTest(
        version=facts.version,
        dtype=dtype,
        prompt_tokens=length,
        pieces=long_one.pieces,
        short_tokens=short,
        agreement=agreement,
        logprob_error=error,
        logprob_limit=LOGPROB_LIMIT[encodings[1]],
        aux=checks,
        unchecked=unchecked,
    )


async def _facts(client: EngineClient) -> ServerFacts:
    async with client:
        try:
            return await client.facts()
        except Transient as fault:
            raise EngineError(
                f"self-test: {fault}", expected="an answer: the server is warm", cause="the server ended, or hangs"
            ) from None


def _agreement(
    target: Target, long_one: Canary, short_one: Canary, ids: Sequence[int], limit: float
) -> dict[str, float]:
    """Cosine that rows which both have reach, by kind. Raises EngineError where it is too low."""
    count = len(short_one.token_ids)
    rows, worst = long_one.at(0, count), {}
    pairs = [(f"aux {layer}", long_one.aux[rows, i], short_one.aux[:, i]) for i, layer in enumerate(ids)]
    for name, first, second in [*pairs, ("final", long_one.final[rows], short_one.final)]:
        worst[name] = reached(cosine(first, second), target)
        if not worst[name] >= limit:
            raise EngineError(
                f"self-test: {name}: a row of the canary has cosine {worst[name]:.4f} between a prefill in pieces of "
                f"{long_one.pieces} and one of {count} tokens",
                expected=f"at least {limit}: the rows before a cut don't depend on it",
                cause="rows are filed under wrong positions, or the attention backend computes chunks otherwise",
                next="try another --attention-backend in engine.args",
            )
    return worst


def _check_final(head: Head, canary: Canary, encoding: str) -> float:
    """Mean |difference| of log-probabilities. Raises EngineError where it, or the next token, is not the server's."""
    first, count = canary.logprobs_from, len(canary.token_ids)
    final = canary.final[canary.at(first, count)]
    ours = head.logprobs(final[:-1], torch.tensor(canary.token_ids[first + 1 :]))
    error = logprob_error(ours, torch.from_numpy(canary.answer.logprobs))
    behind, token = head.behind(final[-1], canary.answer.next_token), canary.answer.next_token
    if not error <= LOGPROB_LIMIT[encoding] or not behind <= TIE[encoding]:
        sample = ", ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(ours[-4:], canary.answer.logprobs[-4:], strict=True))
        raise EngineError(
            f"self-test: final states through the checkpoint's lm_head are off by {error:.4f} (mean) from the server's "
            f"log-probabilities, such as {sample}; its next token {token} stands {behind:.3f} behind the best",
            expected=f"at most {LOGPROB_LIMIT[encoding]}, and at most {TIE[encoding]} behind",
            cause="the states are not what lm_head consumes, or the server runs other weights than target.path",
        )
    return error


def _check_aux(
    target: Target,
    ids: Sequence[int],
    canary: Canary,
    limit: float,
    middle: bool,
    unchecked: dict[str, str],
) -> list[AuxCheck]:
    """The checks that can be done; others go to `unchecked`. Raises EngineError for one that fails."""
    count = min(len(canary.token_ids), LAYER_ROWS)
    rows, checks = canary.at(0, count), []
    aux, final = canary.aux[rows], canary.final[rows]
    token_ids = canary.token_ids[:count]
    steps: list[tuple[str, Callable[[], AuxCheck]]] = [
        (f"aux layer {ids[0]}", lambda: _check_first(target, ids[0], aux[:, 0], token_ids, limit)),
        (f"aux layer {ids[-1]}", lambda: _check_last(target, ids[-1], aux[:, -1], final, limit)),
    ]
    if middle:
        steps.append((f"aux layer {ids[1]}", lambda: _check_middle(target, ids, aux, limit)))
    for name, step in steps:
        try:
            check = step()
        except Unchecked as reason:
            unchecked[name] = str(reason)
            continue
        if check.fault:
            raise EngineError(
                f"self-test: {check.line()}",
                expected=f"at least {limit} in each row, and clearly less for its neighbours",
                cause=check.fault,
                next="check drafter.aux_layer_ids and engine.args, then start the server again",
            )
        if check.unchecked:
            unchecked[name] = check.unchecked
        checks.append(check)
    return checks


def _check_first(target: Target, layer: int, aux: Tensor, token_ids: list[int], limit: float) -> AuxCheck:
    part = PartialDecoder(target, 0, layer + 1, _CPU)
    entering = part.run(embeddings(target, token_ids)).entering
    near = {other: cosine(aux, entering[other]) for other in (layer - 1, layer, layer + 1) if other in entering}
    return judge(layer, f"the embeddings through {layer} layers", near, target, limit)


def _check_last(target: Target, layer: int, aux: Tensor, final: Tensor, limit: float) -> AuxCheck:
    count = target.num_layers
    part, near = PartialDecoder(target, max(layer - 1, 0), count, _CPU), {}
    for other in range(max(layer - 1, 0), layer + 2):
        ends = part.run(aux, other).final
        assert ends is not None
        near[other] = cosine(final, ends)
    return judge(layer, f"through {count - layer} layers and the norm to the final states", near, target, limit)


def _check_middle(target: Target, ids: Sequence[int], aux: Tensor, limit: float) -> AuxCheck:
    first, layer = ids[0], ids[1]
    entering = PartialDecoder(target, first, layer + 1, _CPU).run(aux[:, 0]).entering
    near = {other: cosine(aux[:, 1], entering[other]) for other in (layer - 1, layer, layer + 1) if other in entering}
    return judge(layer, f"aux layer {first} through {layer - first} layers", near, target, limit)
