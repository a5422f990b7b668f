"""A real SGLang server on this machine's CPU with the tap in it, and what Transformers says of the same prompts."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import torch
from transformers import AutoModelForCausalLM

from eyas.engine.inject import write_plugin
from eyas.tap.reader import RingReader
from eyas.tap.ring import Layout, Ring

# 25 s on two idle cores; ten times that where six of them share the cores.
_READY_WITHIN_S = 500


class TapServer:
    """One server, its ring, and the reader of it. `settings` are the tap's, `flags` SGLang's, on top of the usual.

    Attributes:
        url, log: where it answers and writes.
        rows: (rid, position) -> [token id, aux bf16 [3, H], final bf16 [H]], in a list: one entry for each arrival.
    """

    def __init__(
        self,
        python: Path,
        folder: Path,
        target: Path,
        aux_layer_ids: list[int],
        flags: list[str],
        official: list[int] | None = None,
        env: dict[str, str] | None = None,
        plugins: dict[str, str] | None = None,
    ) -> None:
        config = json.loads((target / "config.json").read_text())
        self.folder, self.log, self._events = folder, folder / "log", folder / "events"
        self.ring_path = Path(f"/dev/shm/eyas-tap-{os.getpid()}-{folder.name}")
        layout = Layout(config["hidden_size"], "bf16", "bf16")
        Ring.create(str(self.ring_path), 32 << 20, layout)
        settings = {
            "ring": str(self.ring_path),
            "events": str(self._events),
            "aux_layer_ids": aux_layer_ids,
            "rid_prefix": "eyas-",
            "num_layers": config["num_hidden_layers"],
            "official_flag": official is not None,
            "patience_s": 30,
        } | layout._asdict()
        added = write_plugin(folder / "plugin", settings, vllm_stub=True)
        for name, text in (plugins or {}).items():
            (folder / "plugin" / name).parent.mkdir(exist_ok=True)
            (folder / "plugin" / name).write_text(text)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [str(python), "-m", "sglang.launch_server", "--model-path", str(target), "--device", "cpu"]
        command += ["--dtype", "float32", "--port", str(port), "--chunked-prefill-size", "64", "--disable-radix-cache"]
        command += ["--max-total-tokens", "8192", "--random-seed", "0", *flags]
        if official is not None:
            command += ["--enable-return-aux-hidden-states", "--speculative-algorithm", "DFLASH"]
            command += ["--return-aux-hidden-state-layer-ids", *map(str, official)]
        unset = ("SGLANG_USE_CPU_ENGINE",)
        whole = {name: value for name, value in os.environ.items() if name not in unset} | added | (env or {})
        self.began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=whole, start_new_session=True)
        self.rows: dict[tuple[str, int], list] = {}
        self.ring: RingReader | None = None

    def wait(self) -> None:
        """Return once it is warm. Raises AssertionError with the end of its log where it ends before."""
        while self.process.poll() is None and time.monotonic() - self.began < _READY_WITHIN_S:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=30).status_code == 200:
                    print(f"{self.folder.name}: ready after {time.monotonic() - self.began:.0f} s")
                    return
            time.sleep(0.3)
        raise AssertionError(f"exit code {self.process.poll()}; the log ends:\n{self.log.read_text()[-4000:]}")

    def events(self, name: str) -> list[dict]:
        lines = self._events.read_text().splitlines() if self._events.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def generate(self, rid: str, token_ids: list[int], new_tokens: int = 1, **more) -> dict:
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": token_ids, "rid": rid, "sampling_params": sampling} | more
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=400)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate_all(self, requests: dict[str, list[int]], new_tokens: int = 1) -> dict[str, dict]:
        """All at once, each in a thread of its own."""
        answers: dict[str, dict] = {}

        def one(rid: str) -> None:
            answers[rid] = self.generate(rid, requests[rid], new_tokens)

        threads = [threading.Thread(target=one, args=(rid,)) for rid in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers.keys() == requests.keys()
        return answers

    def open(self) -> None:
        self.ring = RingReader.attach(str(self.ring_path))
        self.ring.open()

    def collect(self) -> None:
        """Take what has come into the ring; all rows of answered requests are there, on a CPU."""
        assert self.ring is not None
        while (block := self.ring.read(0.2)) is not None:
            for i, segment in enumerate(block.segments):
                ids, aux, final = block.piece(i)
                assert not aux.faults.any() and not final.faults.any()
                for row in range(segment.length):
                    arrived = [int(ids[row]), aux.values[row].clone(), final.values[row].clone()]
                    self.rows.setdefault((segment.rid, segment.start + row), []).append(arrived)
            self.ring.release(block)

    def states(self, rid: str, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Aux [n, 3, H] and final states [n, H] of a request, float32, all rows checked: there once, with their id."""
        found = {position: arrived for (owner, position), arrived in self.rows.items() if owner == rid}
        assert sorted(found) == list(range(len(token_ids))), f"{rid}: positions {sorted(found)}"
        assert {len(arrived) for arrived in found.values()} == {1}, f"{rid}: rows that came twice"
        rows = [found[position][0] for position in range(len(token_ids))]
        assert [row[0] for row in rows] == token_ids
        return torch.stack([row[1] for row in rows]).float(), torch.stack([row[2] for row in rows]).float()

    def stop(self) -> None:
        """End it and all that it started. What it has in /dev/shm is removed by Python's resource trackers, which end
        when those are gone that they serve, but for SGLang's own file."""
        if self.ring is not None:
            self.ring.close()
        left, trackers = {str(self.ring_path)}, []
        with suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            for process in [*main.children(recursive=True), main]:
                with suppress(psutil.Error):
                    left |= {entry.path for entry in process.memory_maps() if "/dev/shm/sglang" in entry.path}
                    if "resource_tracker" in " ".join(process.cmdline()):
                        trackers.append(process)
                    else:
                        process.kill()
        psutil.wait_procs(trackers, timeout=20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for path in left:
            Path(path).unlink(missing_ok=True)


class Reference:
    """A target through Transformers, float32."""

    def __init__(self, target: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    @torch.no_grad()
    def states(self, token_ids: list[int]) -> list[torch.Tensor]:
        """[n, H] for each i: the stream after i layers; the last one is after the norm."""
        given = self.model(torch.tensor([token_ids]), output_hidden_states=True)
        return [state[0] for state in given.hidden_states]


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The lowest cosine of a row."""
    return float(torch.cosine_similarity(found.double(), expected.double(), dim=-1).min())


def compare(
    server: TapServer,
    reference: Reference,
    prompts: dict[str, list[int]],
    aux_layer_ids: list[int],
    least: float = 0.999,
) -> None:
    """Assert that every row equals Transformers', and that the neighbouring layers' rows don't; print the figures."""
    last = reference.model.config.num_hidden_layers
    table: dict[str, float] = {}
    for rid, token_ids in prompts.items():
        aux, final = server.states(rid, token_ids)
        states = reference.states(token_ids)
        figures = {"final": worst(final, states[-1])}
        for number, layer in enumerate(aux_layer_ids):
            for near in (layer - 1, layer, layer + 1):
                if near < last:
                    figures[f"layer {layer} against {near}"] = worst(aux[:, number], states[near])
        table = {name: min(value, table.get(name, 1.0)) for name, value in figures.items()}
    print("lowest cosine of a row:", {name: round(value, 5) for name, value in table.items()})
    assert table["final"] >= least
    for layer in aux_layer_ids:
        assert table[f"layer {layer} against {layer}"] >= least
        for near in (layer - 1, layer + 1):
            assert table.get(f"layer {layer} against {near}", 0.0) < 0.98
