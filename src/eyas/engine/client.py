"""A server's HTTP interface, as much of it as capturing needs: token ids in, log-probabilities of the prompt out.

What servers have in common, and SGLang's; vLLM's is in vllm_client.py. Facts from SGLang 0.5.14 and 0.5.23:
`/server_info` holds the server's resolved arguments and the scheduler's limits; a prompt of `max_req_input_len` tokens
or more is refused; `logprob_start_len = s` gives entries for tokens s..N-1, the first without a value; a request id
that is in flight already is refused with HTTP 400.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx
import numpy as np
import numpy.typing as npt

from eyas.clients import Clients
from eyas.errors import EngineError
from eyas.tap.releases import SGLANG

# What passes by itself: a server that is overloaded, warming up or shutting down, or a lost connection.
_TRANSIENT_STATUSES = (408, 429, 500, 502, 503, 504)
_REFUSALS = (400, 413, 422)
_KEY_WANTED = (401, 403)
_CONNECT_S, _INFO_S = 10.0, 60.0


class Transient(Exception):
    """A named fault that may pass: the request can be sent again."""


class Refused(Exception):
    """The server doesn't take this prompt; the text is its reason."""


@dataclass(frozen=True)
class ServerFacts:
    """What a running server says of itself.

    Attributes:
        version: the engine's.
        longest_prompt: most tokens that it takes.
        chunk_tokens: prompts are prefilled in pieces of at most so many tokens; 0: in one.
        dtype: number type it was started with.
        dummy_weights: it runs random weights instead of the checkpoint's.
    """

    version: str
    longest_prompt: int
    chunk_tokens: int
    dtype: str
    dummy_weights: bool


@dataclass(frozen=True)
class Prefilled:
    """Answer to one prompt.

    Attributes:
        next_token: the server's greedy choice after the prompt.
        logprobs: float32 [N - 1 - s]: log-probability of tokens s+1..N-1 given those before; empty where not asked for.
    """

    next_token: int
    logprobs: npt.NDArray[np.float32]


class EngineClient:
    """Asks one server. A request has no time limit: a worker that was stopped for minutes must lose nothing by it, and
    whether the server lives is seen by its process. A request that is cancelled is dropped by the server, as its
    connection closes. Use as an async context manager, from one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._clients = Clients()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._clients.close()

    async def facts(self) -> ServerFacts:
        """Ask what runs there.

        Raises: Transient; EngineError where it is another kind of server, or one that hides rows.
        """
        raise NotImplementedError

    async def prefill(self, token_ids: Sequence[int], rid: str, logprobs_from: int | None = None) -> Prefilled:
        """Have the server run one prompt, and emit one token.

        Args:
            token_ids: the prompt, N ids.
            rid: request id; its rows come under this name.
            logprobs_from: s; log-probabilities of tokens s+1..N-1 are asked for. None: none.
        Raises: Transient; Refused; EngineError for an answer that is no answer.
        """
        raise NotImplementedError

    async def _send(self, request: httpx.Request, timeout_s: float | None) -> Any:
        """The parsed body of a response with HTTP 200; other outcomes as Transient, Refused or EngineError."""
        request.extensions["timeout"] = httpx.Timeout(timeout_s, connect=_CONNECT_S, pool=None).as_dict()
        try:
            with self._clients.one() as client:
                response = await client.send(request)
            if response.status_code == 200:
                return response.json()
        except (httpx.TransportError, httpx.DecodingError, ValueError) as error:
            raise Transient(f"{request.url}: {type(error).__name__}: {error or 'no answer'}") from None
        said = f"HTTP {response.status_code}: {response.text[:300].strip()}"
        if response.status_code in _TRANSIENT_STATUSES:
            raise Transient(f"{request.url}: {said}")
        if response.status_code in _REFUSALS:
            raise Refused(said)
        if response.status_code in _KEY_WANTED:
            raise EngineError(
                f"{request.url}: {said}",
                expected="a server that takes requests without a key: Eyas sends none",
                cause="--api-key in engine.args or the profile, or VLLM_API_KEY in engine.env or this shell",
                next="take it out (the server listens on engine.host alone), then start it again",
            )
        raise EngineError(f"{request.url}: {said}", expected="HTTP 200", cause="another kind of server at this address")


class SGLangClient(EngineClient):
    """Asks an SGLang server. `facts` refuses one that hides rows behind its prefix cache."""

    async def facts(self) -> ServerFacts:
        info = await self._send(httpx.Request("GET", f"{self.url}/server_info"), _INFO_S)
        try:
            facts = ServerFacts(
                version=str(info["version"]),
                longest_prompt=int(info["max_req_input_len"]) - 1,
                chunk_tokens=max(int(info["chunked_prefill_size"] or 0), 0),
                dtype=str(info["dtype"]),
                dummy_weights=info["load_format"] == "dummy",
            )
            prefix_cache = not info["disable_radix_cache"]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url}/server_info: {type(error).__name__}: {error}",
                expected="version, max_req_input_len, chunked_prefill_size, dtype, load_format, disable_radix_cache",
                cause=f"another kind of server, or a release of SGLang outside {SGLANG}",
            ) from None
        if prefix_cache:
            raise EngineError(
                f"{self.url}: its prefix cache is on",
                expected="--disable-radix-cache: what is cached is not computed again, so its states never come",
                next="start the server with Eyas (eyas serve start), or add that flag to engine.args",
            )
        return facts

    async def prefill(self, token_ids: Sequence[int], rid: str, logprobs_from: int | None = None) -> Prefilled:
        body: dict[str, Any] = {
            "input_ids": list(token_ids),
            "rid": rid,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            "stream": False,
        }
        if logprobs_from is not None:
            body |= {"return_logprob": True, "logprob_start_len": logprobs_from}
        answer = await self._send(httpx.Request("POST", f"{self.url}/generate", json=body), None)
        return self._read(answer, len(token_ids), logprobs_from)

    def _read(self, answer: Any, tokens: int, logprobs_from: int | None) -> Prefilled:
        try:
            meta = answer["meta_info"]
            if meta["finish_reason"]["type"] == "abort":
                raise Transient(f"{self.url}/generate: aborted: {meta['finish_reason'].get('message', 'no reason')}")
            read, (next_token,) = meta["prompt_tokens"], answer["output_ids"]
            entries = meta["input_token_logprobs"][1:] if logprobs_from is not None else []
            logprobs = np.array([entry[0] for entry in entries], np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url}/generate: {type(error).__name__}: {error}",
                expected="meta_info with finish_reason and prompt_tokens, and one output id",
                cause=f"another kind of server, or a release of SGLang outside {SGLANG}",
            ) from None
        wanted = 0 if logprobs_from is None else tokens - 1 - logprobs_from
        if read != tokens or len(logprobs) != wanted:
            raise EngineError(
                f"{self.url}/generate: {read} prompt tokens were read, {len(logprobs)} log-probabilities came",
                expected=f"{tokens} and {wanted}",
                cause="a server that cuts prompts (--allow-auto-truncate) or adds tokens to them",
            )
        return Prefilled(int(next_token), logprobs)
