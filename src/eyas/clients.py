"""HTTP clients for many requests in flight."""

import contextlib
import ssl
from collections.abc import Iterator
from typing import Literal

import httpx

# SGLang and vLLM close a connection that was idle for 5 s (uvicorn's default), and httpx would use one for as long:
# what is sent just then is lost. Of 11,930 requests to an SGLang on an H200 87 failed without a word in its log.
_IDLE_S = 2.0


class Clients:
    """httpx clients, each for one request at a time: the pool of one client looks at all its connections at every
    request, which held 512 in flight down to 35 requests a second.

    Args:
        verify: for HTTPS. False: all is plain HTTP on this machine, no certificates are loaded.
        proxies: whether those of the environment are heeded.
    """

    def __init__(self, verify: ssl.SSLContext | Literal[False] = False, proxies: bool = False) -> None:
        self._verify, self._proxies = verify, proxies
        self._idle: list[httpx.AsyncClient] = []
        self._all: list[httpx.AsyncClient] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[httpx.AsyncClient]:
        """A client that nobody else uses meanwhile."""
        client = self._idle.pop() if self._idle else self._make()
        try:
            yield client
        finally:
            self._idle.append(client)

    async def close(self) -> None:
        for client in self._all:
            await client.aclose()

    def _make(self) -> httpx.AsyncClient:
        limits = httpx.Limits(keepalive_expiry=_IDLE_S)
        self._all.append(httpx.AsyncClient(verify=self._verify, trust_env=self._proxies, limits=limits))
        return self._all[-1]
