"""Runs that capture from a real SGLang on this machine's CPU, in processes of their own."""

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from eyas.engine.state import ServerState, load_state
from eyas.run import Run, open_run
from eyas.store.reader import StoreReader

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 40
RECIPE = """
name = "{name}"
runs_dir = "{folder}/runs"
[target]
path = "{target}"
[[data.sources]]
path = "{folder}/samples.jsonl"
[data]
max_tokens = 320
[engine]
kind = "sglang"
python = "{python}"
dtype = "float32"
device = "cpu"
args = ["--chunked-prefill-size", "64"]
[capture]
in_flight = 8
check_middle = true
ring_bytes = 2097152 # 450 rows: full every now and then
[store]
shard_bytes = 3_000_000
min_free_bytes = 0
[drafter]
aux_layer_ids = [2, 15, 27]
"""


def sglang_python() -> Path:
    """Interpreter of the environment that sglang_venv.sh makes, once."""
    command = ["bash", ROOT / "tests/engines/sglang_venv.sh"]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(made.stdout.strip()) / "bin/python"


def write_samples(path: Path) -> None:
    """40 samples of the demo's data: 34 short ones, and 6 of 257 to 320 tokens, which are conversations joined."""
    with gzip.open(ROOT / "examples/smollm2/answers.jsonl.gz", "rt") as lines:
        records = [json.loads(line) for line in lines]
    parts = [
        (
            record["prompt_ids"] + record["response_ids"],
            [0] * len(record["prompt_ids"]) + [1] * len(record["response_ids"]),
        )
        for record in records
    ]
    short = [part for part in parts if 50 <= len(part[0]) <= 80][:34]
    middle = [part for part in parts if 130 <= len(part[0]) <= 160][:12]
    long = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(middle[::2], middle[1::2], strict=True)]
    rows = [json.dumps({"input_ids": ids, "loss_mask": mask}) for ids, mask in [*short, *long]]
    path.write_text("".join(f"{row}\n" for row in rows))


def make_run(folder: Path, target: Path, name: str = "served", *overrides: str) -> Run:
    write_samples(folder / "samples.jsonl")
    recipe = folder / f"{name}.toml"
    text = RECIPE.format(name=name, folder=folder, target=target, python=sglang_python())
    recipe.write_text(text)
    return open_run(recipe, overrides)


def start(run: Run, *words: str) -> subprocess.Popen[str]:
    """`eyas WORDS RECIPE` in a process of its own."""
    command = [sys.executable, "-m", "eyas", *words, *shlex.split(run.arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


def finish(process: "subprocess.Popen[str]", code: int = 0) -> str:
    """What it said, once it ended with this exit code."""
    out, errors = process.communicate(timeout=900)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{errors}"
    return out + errors


def eyas(run: Run, *words: str, code: int = 0) -> str:
    return finish(start(run, *words), code)


def shards_of(run: Run) -> list[Path]:
    return sorted(Path(run.store_url).glob("shards/0*.safetensors"))


def wait_for_shards(run: Run, count: int, process: "subprocess.Popen[str]") -> None:
    """Return as soon as so many shards are committed."""
    deadline = time.monotonic() + 800
    while len(shards_of(run)) < count:
        assert process.poll() is None, f"it ended too early:\n{process.communicate()}"
        assert time.monotonic() < deadline, "no shard in time"
        time.sleep(0.02)


def server_of(run: Run) -> ServerState:
    state = load_state(run)
    assert state is not None
    return state


def kill_server(run: Run) -> ServerState:
    """kill -9 of the server's first process; its children go with it."""
    state = server_of(run)
    os.kill(state.pid, signal.SIGKILL)
    return state


def left_of(state: ServerState) -> list[str]:
    """Processes, files and the port that a stopped server must not leave."""
    left = [path for path in (state.ring, *state.shm, state.plugin) if path and Path(path).exists()]
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:  # it has ended, and holds nothing; init collects it
                continue
            if os.getsid(process.pid) == state.pid or process.environ().get("EYAS_SERVER") == state.mark:
                left.append(f"process {process.pid} {process.name()}")
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue
    held = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == state.port]
    return left + [f"port {state.port}" for _ in held]


def samples_of(run: Run) -> list[str]:
    """Ids of the samples in the store, in order."""
    return [ref.sample_id for ref in StoreReader(run.store_url).samples()]
