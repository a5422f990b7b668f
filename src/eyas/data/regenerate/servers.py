"""The servers that are asked: the least loaded one first, those that fail left alone until they answer again.

A request that fails marks its server down. A down server is tried with a short question after 0.5, 1, 2, ... 30 s, and
used again once it answers that: so an outage costs each request in flight one attempt, however long it lasts, and
only a request that fails again and again on servers that work is given up.
"""

import asyncio
import os
from dataclasses import dataclass
from typing import Any, Self

import httpx

from eyas.clients import Clients
from eyas.data.records import Rejected
from eyas.data.regenerate.protocol import Aborted, Answer, Protocol
from eyas.errors import EngineError, RecipeError
from eyas.progress import duration, say

# What passes by itself: a server that restarts, is overloaded, or lost the connection in the middle of an answer.
TRANSIENT_STATUSES = (408, 429, 500, 502, 503, 504)
_REFUSALS = (400, 413, 422)
_PROBE_TIMEOUT_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class _Failed(Exception):
    """A named transient fault of one server."""


@dataclass
class Server:
    """One server.

    Attributes:
        model: the name it serves the target under.
        context: most tokens of prompt and answer; 0 where it doesn't say.
        in_flight: requests it has not answered yet.
        up: whether it answered last.
    """

    url: str
    model: str = ""
    context: int = 0
    in_flight: int = 0
    up: bool = False


class Servers:
    """Asks for answers. Use as an async context manager; entering it tries every server once.

    Args:
        probe: token ids of a short prompt.
    Raises: EngineError where no server answers, or one runs something else than the target.
    """

    def __init__(self, protocol: Protocol, probe: list[int]) -> None:
        self.protocol, self.settings, self._probe_ids = protocol, protocol.settings, probe
        self.all = [Server(url.rstrip("/")) for url in self.settings.servers]
        self._changed = asyncio.Event()
        self._revivals: set[asyncio.Task[None]] = set()
        self._fatal: EngineError | None = None
        self._last_fault = ""
        self._headers = _headers(self.settings.api_key_env)
        self._clients = Clients(httpx.create_ssl_context(), proxies=True)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self) -> None:
        faults = await asyncio.gather(*(self._try(server) for server in self.all))
        if not any(server.up for server in self.all):
            raise EngineError(
                "; ".join(faults),
                expected="at least one of regenerate.servers to answer",
                cause="the server is not started, still loads the model, or listens elsewhere",
                next="start it (for example: vllm serve TARGET --port 8000), then the same command",
            )
        for server, fault in zip(self.all, faults, strict=True):
            if fault:
                say(f"warning: {fault}; going on without it, it is tried again")
                self._revive(server)

    async def __aexit__(self, *error: object) -> None:
        for task in self._revivals:
            task.cancel()
        await asyncio.gather(*self._revivals, return_exceptions=True)
        await self._clients.close()

    @property
    def context(self) -> int:
        """Most tokens that every server takes; 0 where none says."""
        return min((server.context for server in self.all if server.context), default=0)

    async def ask(self, prompt: list[int], max_new_tokens: int, seed: int) -> Answer:
        """The answer to token ids.

        Raises: Rejected where servers refuse this prompt, or fail on it `regenerate.attempts` times; EngineError where
            all are down for `regenerate.patience_s`, or one isn't what it should be.
        """
        for _ in range(self.settings.attempts):
            server = await self._pick()
            server.in_flight += 1
            try:
                body = self.protocol.request(server.model, prompt, max_new_tokens, seed)
                return await self._post(server, body, prompt, self.settings.timeout_s)
            except _Failed as failure:
                self._last_fault = str(failure)
                self._revive(server)
            finally:
                server.in_flight -= 1
        raise Rejected("server_error", f"failed {self.settings.attempts} times; the last: {self._last_fault}")

    async def _pick(self) -> Server:
        """The server that is up and has the fewest requests; waits for one where all are down."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.patience_s
        while True:
            if self._fatal:
                raise self._fatal
            up = [server for server in self.all if server.up]
            if up:
                return min(up, key=lambda server: server.in_flight)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - loop.time())
            except TimeoutError:
                raise EngineError(
                    f"no server answered for {duration(self.settings.patience_s)}; the last fault: {self._last_fault}",
                    cause="the servers ended, or hang",
                    next="look into their logs, start them again, then the same command: finished answers are kept",
                ) from None

    def _revive(self, server: Server) -> None:
        """Leave a server alone until it answers again; the first fault of many starts the watch."""
        server.up = False
        if not any(task.get_name() == server.url for task in self._revivals):
            task = asyncio.create_task(self._until_up(server), name=server.url)
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)

    async def _until_up(self, server: Server) -> None:
        pause, told = _FIRST_PAUSE_S, False
        while True:
            await asyncio.sleep(pause)
            try:
                fault = await self._try(server)
            except EngineError as error:
                self._fatal = error
                fault = ""
            if not fault:
                break
            self._last_fault = fault
            if not told:
                say(f"regenerate: {fault}; it is tried again for {duration(self.settings.patience_s)}")
                told = True
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if told and self._fatal is None:
            say(f"regenerate: {server.url} answers again")
        self._changed.set()

    async def _try(self, server: Server) -> str:
        """Ask a server what it serves and for one token. Returns: its fault, or "" and it is up.

        Raises: EngineError where it is not what it should be.
        """
        try:
            if self.settings.kind == "openai":
                self._identify(server, await self._get(server, "/v1/models"))
            body = self.protocol.request(server.model, self._probe_ids, 1, 0)
            await self._post(server, body, self._probe_ids, _PROBE_TIMEOUT_S)
        except _Failed as failure:
            return str(failure)
        except Rejected as refusal:
            raise EngineError(
                f"{server.url}: refuses a prompt of {len(self._probe_ids)} tokens: {refusal.detail}",
                expected="an answer of one token",
                cause="a server that doesn't take token ids, or settings of [regenerate] that it doesn't know",
                next="mend [regenerate], or serve the target with vLLM or SGLang",
            ) from None
        server.up = True
        return ""

    def _identify(self, server: Server, body: Any) -> None:
        """Take the served name and the context length from /v1/models."""
        listed = {str(entry.get("id")): entry for entry in (body.get("data") or [])}
        wanted = self.settings.model or next(iter(listed), "")
        if wanted not in listed:
            raise EngineError(
                f"{server.url}: serves {', '.join(listed) or 'nothing'}",
                expected=f"regenerate.model = {wanted!r}",
                next="set regenerate.model to a name it serves, or leave it empty for the first",
            )
        server.model = wanted
        server.context = int(listed[wanted].get("max_model_len") or 0)

    async def _get(self, server: Server, path: str) -> Any:
        return await self._send(httpx.Request("GET", server.url + path, headers=self._headers), _PROBE_TIMEOUT_S)

    async def _post(self, server: Server, body: dict[str, Any], prompt: list[int], timeout_s: float) -> Answer:
        request = httpx.Request("POST", server.url + self.protocol.path, json=body, headers=self._headers)
        try:
            return self.protocol.answer(await self._send(request, timeout_s), prompt, server.url)
        except Aborted as aborted:
            raise _Failed(f"{request.url}: {aborted}") from None

    async def _send(self, request: httpx.Request, timeout_s: float) -> Any:
        """The parsed body of a response; faults as _Failed, Rejected or EngineError."""
        request.extensions["timeout"] = httpx.Timeout(timeout_s, connect=10.0).as_dict()
        try:
            with self._clients.one() as client:
                response = await client.send(request)
            if response.status_code == 200:
                return response.json()
        except (httpx.TransportError, httpx.DecodingError, ValueError) as error:
            said = str(error) or f"no answer within {duration(timeout_s)}"
            raise _Failed(f"{request.url}: {type(error).__name__}: {said}") from None
        said = f"HTTP {response.status_code}: {response.text[:300].strip()}"
        if response.status_code in TRANSIENT_STATUSES:
            raise _Failed(f"{request.url}: {said}")
        if response.status_code in _REFUSALS:
            raise Rejected("refused_by_server", said)
        raise EngineError(
            f"{request.url}: {said}",
            expected="HTTP 200",
            cause="a wrong URL or model name, or a missing key",
            next="mend regenerate.servers (no /v1 at its end), regenerate.model or regenerate.api_key_env",
        )


def _headers(api_key_env: str) -> dict[str, str]:
    if not api_key_env:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise RecipeError(
            f"regenerate.api_key_env = {api_key_env!r}, but no such environment variable is set",
            next=f"export {api_key_env}=..., or leave regenerate.api_key_env empty",
        )
    return {"Authorization": f"Bearer {key}"}
