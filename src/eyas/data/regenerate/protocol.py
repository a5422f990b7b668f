"""Two ways to ask a server for tokens, token ids in and out: OpenAI's completions as vLLM extends them, and SGLang's.

Every sampling parameter is sent: what a request leaves out, servers take from the model's generation_config.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.errors import EngineError
from eyas.settings import Regenerate

Json = Mapping[str, Any]


class Aborted(Exception):
    """The server gave up on an answer that it had begun (it is shutting down, or ran out of room)."""


@dataclass(frozen=True)
class Answer:
    """What a server emitted.

    Attributes:
        token_ids: with the end-of-turn token, where it was reached.
        cut: whether the answer was cut off at its longest length.
    """

    token_ids: list[int]
    cut: bool


@dataclass(frozen=True)
class Protocol:
    """Requests and answers of one kind of server.

    Attributes:
        ends: ids that end a turn; a server stops at each of them.
        vocab_size: of the target; other ids are another model's.
    """

    settings: Regenerate
    ends: frozenset[int]
    vocab_size: int

    @property
    def path(self) -> str:
        return "/generate" if self.settings.kind == "sglang" else "/v1/completions"

    def request(self, model: str, prompt: list[int], max_new_tokens: int, seed: int) -> dict[str, Any]:
        """The body of a request for one answer."""
        settings = self.settings
        sampling: dict[str, Any] = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": sorted(self.ends),
        }
        if settings.kind == "sglang":
            sampling |= {"max_new_tokens": max_new_tokens, "sampling_seed": seed}
            return {"input_ids": prompt, "sampling_params": sampling, "stream": False}
        sampling |= {"max_tokens": max_new_tokens, "seed": seed}
        return {"model": model, "prompt": prompt, "return_token_ids": True, "stream": False, **sampling}

    def answer(self, body: Json, prompt: list[int], where: str) -> Answer:
        """The answer in a response's body.

        Raises: EngineError where it holds no token ids, or ids that this target never emits; Aborted.
        """
        sglang = self.settings.kind == "sglang"
        ids, reason, stopped_by, seen = _read_sglang(body) if sglang else _read_openai(body)
        if not isinstance(ids, list) or not all(isinstance(index, int) for index in ids):
            raise EngineError(
                f"{where}{self.path}: the answer holds no token ids (keys: {', '.join(sorted(body))})",
                expected="choices[0].token_ids of vLLM 0.10.2 or later, or output_ids of SGLang's /generate",
                cause="another kind of server, or an older one: text alone can't give the emitted ids back",
                next='set regenerate.kind = "sglang" for SGLang; for others, serve the target with vLLM',
            )
        if seen is not None and seen != prompt:
            raise EngineError(
                f"{where}{self.path}: {len(seen)} prompt ids were read that are not the {len(prompt)} sent",
                cause="a server or proxy that adds or cuts tokens",
                next="ask the server itself, without what lies between",
            )
        outside = [index for index in ids if not 0 <= index < self.vocab_size]
        if outside:
            raise self._wrong_model(where, f"token id {outside[0]}", f"ids of 0 to {self.vocab_size - 1}")
        if reason not in ("stop", "length"):
            raise Aborted(f"finish reason {reason!r}")
        # Some servers leave out the token that ended the turn and name it beside.
        if reason == "stop" and isinstance(stopped_by, int) and ids[-1:] != [stopped_by]:
            ids = [*ids, stopped_by]
        if not ids or (reason == "stop" and ids[-1] not in self.ends):
            ended = f"an answer that stops after token {ids[-1]}" if ids else "an answer without tokens"
            raise self._wrong_model(where, ended, f"one of the target's end-of-turn tokens {sorted(self.ends)}")
        return Answer(ids, reason == "length")

    def _wrong_model(self, where: str, seen: str, expected: str) -> EngineError:
        return EngineError(
            f"{where}{self.path}: {seen}",
            expected=f"{expected}, as the target's folder says",
            cause="the server runs another model than target.path",
            next="serve the target itself; answers that are finished are kept",
        )


Read = tuple[Any, str, Any, list[int] | None]


def _read_openai(body: Json) -> Read:
    """Token ids, finish reason, the token that stopped it, and the prompt as the server read it."""
    choice = (body.get("choices") or [{}])[0]
    return (
        choice.get("token_ids"),
        str(choice.get("finish_reason")),
        choice.get("stop_reason"),
        choice.get("prompt_token_ids"),
    )


def _read_sglang(body: Json) -> Read:
    finish = (body.get("meta_info") or {}).get("finish_reason") or {}
    return body.get("output_ids"), str(finish.get("type")), finish.get("matched"), None
