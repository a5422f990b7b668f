"""HTTP clients: one for each request in flight, and none kept for as long as servers keep a connection."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from eyas.clients import Clients

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
def server() -> Iterator[tuple[str, list[int]]]:
    """A server that keeps every connection open, and the number of requests of each of its connections."""
    listening, requests = socket.create_server(("127.0.0.1", 0)), []

    def serve(connection: socket.socket, number: int) -> None:
        with connection:
            while connection.recv(65536):
                requests[number] += 1
                connection.sendall(ANSWER)

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            requests.append(0)
            threading.Thread(target=serve, args=(connection, len(requests) - 1), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}", requests
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


def test_a_client_for_each_request_in_flight_and_no_more(server: tuple[str, list[int]]) -> None:
    url, requests = server

    async def ask(clients: Clients) -> None:
        with clients.one() as client:
            assert (await client.get(url)).text == "ok"

    async def go() -> None:
        clients = Clients()
        for _ in range(3):
            await asyncio.gather(*(ask(clients) for _ in range(4)))
        await clients.close()

    asyncio.run(go())
    assert sum(requests) == 12 and len(requests) == 4


def test_a_connection_that_was_idle_for_long_is_not_used_again(server: tuple[str, list[int]]) -> None:
    """Servers close theirs after 5 s; a request that is sent just then would be lost."""
    url, requests = server

    async def go() -> None:
        clients = Clients()
        for pause in (0.0, 0.0, 2.5):
            time.sleep(pause)
            with clients.one() as client:
                await client.get(url)
        await clients.close()

    asyncio.run(go())
    assert requests == [2, 1]
