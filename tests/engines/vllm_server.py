"""A real vLLM server on this machine's CPU, in fp32, for tests."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx

# Two busy cores took 80 s; an idle machine takes 25.
_READY_WITHIN_S = 400


class VllmServer:
    """One server on loopback; it may be killed and started again on the same port.

    Args:
        venv: what `make engine-vllm` made.
        target: model folder.
        log: file that its output goes to.
    """

    def __init__(self, venv: Path, target: Path, log: Path) -> None:
        self.venv, self.target, self.log = venv, target, log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns at once."""
        command = [self.venv / "bin/vllm", "serve", self.target, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--served-model-name", "target", "--dtype", "float32", "--enforce-eager"]
        command += ["--max-model-len", "512", "--max-num-seqs", "16"]
        settings = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        # By itself it leaves one core free: on two cores that is half of them.
        settings["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{(os.cpu_count() or 1) - 1}"
        unset = ("OMP_NUM_THREADS", "PYTHONPATH")
        env = {name: value for name, value in os.environ.items() if name not in unset} | settings
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)

    def wait(self) -> None:
        """Return once it answers. Raises AssertionError with the end of its log where it doesn't."""
        assert self._process is not None
        deadline = time.monotonic() + _READY_WITHIN_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        raise AssertionError(f"vLLM did not get ready, exit code {self._process.poll()}; its log ends:\n{tail}")

    def kill(self) -> None:
        """SIGKILL to it and all its workers: it started its own process group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
