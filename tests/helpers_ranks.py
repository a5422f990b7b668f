"""Training in processes of its own, one or several: real torchrun, real signals."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file

from eyas.drafter.saved import newest
from eyas.run import Run, open_run
from eyas.train.log import read_log

# [train], on a CPU, of tiny samples.
SETTINGS = {
    "draft_vocab_size": "200",
    "epochs": "2",
    "batch_tokens": "128",
    "accumulation": "2",
    "ttt_steps": "3",
    "lr": "3e-3",
    "device": "cpu",
    "precision": "fp32",
    "checkpoint_every": "4",
    "eval_every": "8",
    "timeout_s": "30",
}


def copy_of(captured: Path, folder: Path, **train: str) -> Run:
    """An own copy of a run's folder; `train` are settings of [train] besides SETTINGS."""
    shutil.copytree(captured / "runs", folder / "runs")
    text = (captured / "recipe.toml").read_text().replace(str(captured), str(folder))
    (folder / "recipe.toml").write_text(text)
    return again(folder, **train)


def again(folder: Path, **train: str) -> Run:
    """The run in that folder, with other settings."""
    return open_run(folder / "recipe.toml", overrides(train))


def overrides(train: Mapping[str, str]) -> list[str]:
    return [f"train.{key}={value}" for key, value in (SETTINGS | dict(train)).items()]


def environment() -> dict[str, str]:
    """Equal bits need equal threads: sums are split among them."""
    return os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}


def recipe_of(run: Run) -> str:
    return str(run.dir.parent.parent / "recipe.toml")


def command(run: Run, train: Mapping[str, str]) -> list[str]:
    options = [part for text in overrides(train) for part in ("--set", text)]
    return ["-m", "eyas", "train", recipe_of(run), *options]


def torchrun(run: Run, processes: int = 2, **train: str) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--master-port", str(free_port()), "--nproc-per-node", str(processes)]
    words = [sys.executable, *launcher, *command(run, train)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment())


def finish(process: subprocess.Popen[str], timeout_s: float = 300) -> str:
    """Wait for the end of a run that must succeed; what it said."""
    _, told = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, told
    return told


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def two_ranks(run: Run, others: Mapping[str, str] | None = None, **train: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes with nobody above them who ends one when the other dies, as on two hosts.

    `others`: settings of the second that differ.
    """
    port = str(free_port())
    ranks = []
    for rank, settings in (("0", train), ("1", train | dict(others or {}))):
        env = environment() | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = [sys.executable, *command(run, settings)]
        ranks.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env))
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """torchrun's own processes, by rank."""
    children = psutil.Process(launcher.pid).children()
    return sorted((child for child in children if "RANK" in child.environ()), key=lambda each: each.environ()["RANK"])


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else what
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def wait_for_checkpoint(run: Run, process: subprocess.Popen[str]) -> None:
    wait_for(lambda: newest(run.train_dir) is not None, process, "no checkpoint came")


def weights(run: Run) -> dict[str, torch.Tensor]:
    folder = newest(run.train_dir)
    assert folder is not None
    return load_file(folder / "model.safetensors")


def farthest(one: Run, other: Run) -> float:
    """Largest difference between two runs' last weights."""
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


def farthest_norm(one: Run, other: Run) -> float:
    """Largest norm of a difference between two runs' last weights, against that of the weight."""
    ours, theirs = weights(one), weights(other)
    return max(
        float((theirs[name].double() - tensor.double()).norm() / tensor.double().norm().clamp(min=1e-9))
        for name, tensor in ours.items()
    )


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in read_log(run.logs_dir / "train.jsonl") if "loss" in line]
