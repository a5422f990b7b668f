"""A real SGLang on this machine's CPU, started, watched, diagnosed and stopped by Eyas."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers_tiny import make_tiny_target
from sglang_runs import eyas, finish, left_of, make_run, server_of, start

from eyas.engine import process
from eyas.engine.events import read_events
from eyas.engine.readiness import LAYERS
from eyas.engine.server import attach
from eyas.engine.state import ServerState, load_state
from eyas.run import Run

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def run(tmp_path: Path, demo_target: Path) -> Iterator[Run]:
    """A run that captures from SGLang; its server is ended whatever happens."""
    made = make_run(tmp_path, demo_target, "served", "engine.patience_s=30")
    yield made
    state = load_state(made)
    if state is not None:
        process.end(state.session, state.mark, 1)


def wait_for_event(run: Run, starter: "subprocess.Popen[str]", name: str, **having: str) -> ServerState:
    """Return once the tap of the run's server has told this."""
    deadline = time.monotonic() + 600
    while True:
        state = load_state(run)
        if state is not None and read_events(Path(state.events), event=name, **having):
            return state
        assert starter.poll() is None, starter.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def scheduler(state: ServerState) -> psutil.Process:
    """The process that will load and run the model."""
    return psutil.Process(read_events(Path(state.events), role="scheduler")[0]["pid"])


def test_from_start_to_stop(run: Run) -> None:
    """The command that starts it is killed half-way; another takes over; a third process uses it; nothing is left."""
    starter = start(run, "serve", "start")
    state = wait_for_event(run, starter, "plugin", role="other")
    os.kill(starter.pid, signal.SIGKILL)
    starter.communicate()
    assert state.alive() and not state.ready
    assert f"pid {state.pid}: starting" in eyas(run, "serve", "status")

    told = eyas(run, "serve", "start")
    assert f"ready    {state.url} (pid {state.pid})" in told
    state = server_of(run)
    assert list(state.layers) == list(LAYERS)
    assert state.self_test and "self-test: final states" in told
    print("\n".join(line for line in told.splitlines() if line.startswith("serve:")))

    program = "from pathlib import Path\nfrom eyas.run import open_run\nfrom eyas.engine.server import attach\n"
    program += f"print(attach(open_run(Path({str(run.dir)!r}))).pid)"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout == f"{state.pid}\n"
    here = attach(run)
    assert here is not None and here.url == state.url

    status = eyas(run, "serve", "status")
    assert "ready, started" in status and "0 dropped, read by nobody" in status
    assert "Load weight end" in eyas(run, "serve", "logs", "--lines", "200")
    told = eyas(run, "doctor")
    assert "none of the known ones; the server is ready" in told
    assert any(line.startswith("stack     ") and "event_loop" in line for line in told.splitlines()), told
    print(told)

    told = eyas(run, "serve", "stop")
    print(told)
    assert f"{state.ring} (" in told and f"port {state.port} is free" in told
    assert "sglang_loads_" in told  # SGLang itself leaves this file
    assert left_of(state) == []
    assert "stopped" in eyas(run, "serve", "status")


def test_a_process_that_is_stopped_while_it_loads(run: Run) -> None:
    starter = start(run, "serve", "start")
    state = wait_for_event(run, starter, "plugin", role="scheduler")
    stopped = scheduler(state)
    stopped.suspend()
    time.sleep(1)
    told = eyas(run, "doctor", code=1)
    assert "cause     a process was stopped (SIGSTOP, or ^Z)" in told and f"kill -CONT {stopped.pid}" in told
    print(told)
    told = finish(starter, 1)
    print(told[told.index("error:") :])
    assert "gives no sign of work while waiting for: weights loaded" in told
    assert f"likely cause: a process was stopped (SIGSTOP, or ^Z): state T: process {stopped.pid} (" in told
    assert f"next: kill -CONT {stopped.pid}" in told
    assert left_of(state) == []


def test_two_ranks_under_sglangs_own_flag(tmp_path: Path) -> None:
    """Its layers are read back at the first forward pass, by rank 0 alone: no start may wait for them."""
    made = make_tiny_target(tmp_path / "target", hidden=128)
    # A core for each rank; and no NCCL, which SGLang opens on a CPU too where its library is found, and dies of.
    env = 'engine.env={ SGLANG_CPU_OMP_THREADS_BIND = "0|1", SGLANG_NCCL_SO_PATH = "/nowhere" }'
    flags = 'engine.args=["--chunked-prefill-size", "64", "--tp-size", "2"]'
    run = make_run(tmp_path, made, "ranks", env, flags, "drafter.aux_layer_ids=[2, 4, 6]")
    try:
        told = eyas(run, "serve", "start")
        state = server_of(run)
        print("\n".join(line for line in told.splitlines() if line.startswith("serve:")))
        assert "--enable-return-aux-hidden-states" in state.command and list(state.layers) == list(LAYERS)
        ranks = {
            name: [one["rank"] for one in read_events(Path(state.events), event=name)] for name in ("weights", "layers")
        }
        assert sorted(ranks["weights"]) == [0, 1] and ranks["layers"] == [0]
        print(eyas(run, "serve", "stop"))
        assert left_of(state) == []
    finally:
        if (left := load_state(run)) is not None:
            process.end(left.session, left.mark, 1)


def copy_with_shards(target: Path, folder: Path) -> Path:
    """The target with an index that names a second file, which is missing."""
    folder.mkdir()
    for path in target.iterdir():
        name = "model-00001-of-00002.safetensors" if path.name == "model.safetensors" else path.name
        (folder / name).symlink_to(path)
    from safetensors import safe_open

    with safe_open(target / "model.safetensors", "pt") as whole:
        names = sorted(whole.keys())
    places = {
        name: f"model-0000{1 + (number > len(names) // 2)}-of-00002.safetensors" for number, name in enumerate(names)
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_doctor_names_what_would_stop_a_start(tmp_path: Path, demo_target: Path) -> None:
    """Each cause alone, and found before anything is started."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        cases = {
            f"engine.python={sys.executable}": "No module named sglang",
            f"engine.port={port}": f"port {port} is held by process {os.getpid()}",
            f"target.path={copy_with_shards(demo_target, tmp_path / 'cut')}": "1 weight files are missing",
            "capture.ring_bytes=1099511627776": "/dev/shm has ",
            'engine.args=["--tp-sise", "2"]': "does not know --tp-sise (in engine.args)",
            'engine.args=["--enable-two-batch-overlap"]': "--enable-two-batch-overlap is True",
            'engine.args=["--pp-size", "2"]': "--pp-size is 2",
        }
        for override, cause in cases.items():
            run = make_run(tmp_path, demo_target, "served", override)
            told = eyas(run, "doctor", code=1)
            causes = [line for line in told.splitlines() if line.startswith("cause ")]
            print("\n".join(line for line in told.splitlines() if line.startswith(("cause", "  "))))
            assert cause in causes[0], told
            # A ring of a terabyte is too large for memory as well.
            assert len(causes) == 1 + ("ring_bytes" in override), told
            assert load_state(run) is None
    run = make_run(tmp_path, demo_target)
    assert "nothing found; next: eyas serve start" in eyas(run, "doctor")
