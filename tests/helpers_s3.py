"""A real S3 server on loopback (moto's), and a wire to it that can be cut in the middle of an upload."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

START_S = 60.0


@contextmanager
def s3_server(log: Path) -> Iterator[str]:
    """URL of moto's S3 server in a process of its own."""
    port = _free_port()
    environment = os.environ | {"AWS_ACCESS_KEY_ID": "server", "AWS_SECRET_ACCESS_KEY": "server"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait(port, process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(10)


class Wire:
    """Passes connections on to a server. With `cut_after` set, a connection is cut after so many bytes towards it."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut_after: int | None = None
        self.cuts = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._upstream)
            for pair, counted in (((near, far), True), ((far, near), False)):
                threading.Thread(target=self._pass, args=(*pair, counted), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        passed = 0
        with suppress(OSError):
            while block := source.recv(1 << 14):
                passed += len(block)
                if counted and self.cut_after is not None and passed > self.cut_after:
                    self.cuts += 1
                    break
                sink.sendall(block)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    raise AssertionError(f"moto's server did not start in {START_S:.0f} s: {log.read_text()}")
