"""vLLM's HTTP interface, as much of it as capturing needs.

Facts from vLLM 0.27.0 to 0.33.0 (entrypoints/openai/completion): a prompt of token ids is taken as it is; with
`prompt_logprobs: 0` an answer has an entry for each token of the prompt, the first is null, the others map the token's
id to its log-probability; `kv_transfer_params` go to the connector as they are; a request ends when its connection
does. What the server was started with stands in no answer, but in the tap's events.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from eyas.engine.client import EngineClient, Prefilled, ServerFacts
from eyas.engine.events import read_events
from eyas.errors import EngineError
from eyas.tap.releases import VLLM

_INFO_S = 60.0


class VLLMClient(EngineClient):
    """Asks a vLLM server with the tap.

    Args:
        events: the tap's events file.
    """

    def __init__(self, url: str, events: Path) -> None:
        super().__init__(url)
        self._events = events

    async def facts(self) -> ServerFacts:
        await self._send(httpx.Request("GET", f"{self.url}/version"), _INFO_S)
        told = read_events(self._events, event="layers")
        if not told:
            raise EngineError(
                f"{self._events}: the tap has not told what runs at {self.url}",
                expected="its event `layers`",
                cause="the server was started without Eyas, or its plugin folder is gone",
                next="start the server with Eyas: eyas serve start",
            )
        return ServerFacts(
            version=told[-1]["version"],
            longest_prompt=told[-1]["longest_prompt"],
            chunk_tokens=told[-1]["chunk_tokens"],
            dtype=told[-1]["dtype"],
            dummy_weights=told[-1]["load_format"] == "dummy",
        )

    async def prefill(self, token_ids: Sequence[int], rid: str, logprobs_from: int | None = None) -> Prefilled:
        body: dict[str, Any] = {
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": {"eyas_rid": rid},
        }
        if logprobs_from is not None:
            body["prompt_logprobs"] = 0
        answer = await self._send(httpx.Request("POST", f"{self.url}/v1/completions", json=body), None)
        return self._read(answer, list(token_ids), logprobs_from)

    def _read(self, answer: Any, token_ids: list[int], logprobs_from: int | None) -> Prefilled:
        try:
            (choice,) = answer["choices"]
            (next_token,) = choice["token_ids"]
            read, logprobs = choice["prompt_token_ids"], []
            if logprobs_from is not None:
                entries = list(zip(token_ids, choice["prompt_logprobs"], strict=True))[logprobs_from + 1 :]
                logprobs = [entry[str(token)]["logprob"] for token, entry in entries]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self.url}/v1/completions: {type(error).__name__}: {error}",
                expected="one choice with token_ids, prompt_token_ids and prompt_logprobs",
                cause=f"another kind of server, or a release of vLLM outside {VLLM}",
            ) from None
        if read != token_ids:
            raise EngineError(
                f"{self.url}/v1/completions: {len(read)} prompt tokens were read",
                expected=f"the {len(token_ids)} that were sent",
                cause="a server that cuts prompts or adds tokens to them",
            )
        return Prefilled(int(next_token), np.array(logprobs, np.float32))
