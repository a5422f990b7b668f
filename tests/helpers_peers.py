"""The other tools, each in an environment of its own from PyPI, made on first use and kept in the user's cache."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from eyas import fs

SCRIPTS = Path(__file__).resolve().parent / "peers"
CACHE = Path.home() / ".cache/eyas/venvs"
# As in the Makefile: PyPI's own torch brings CUDA, TORCH_INDEX may name an index of CPU builds.
_TORCH, _INDEX = os.environ.get("TORCH", "torch==2.13.0"), os.environ.get("TORCH_INDEX", "")
_COMMON = [
    *("click", "httpx", "huggingface-hub", "loguru<=0.7.3", "numpy<=2.4.6", "openai>=2", "protobuf", "psutil"),
    *("pydantic", "pydantic-settings", "rich", "safetensors", "typer"),
]
# The tools come without their dependencies, for those name torchvision and torchaudio, which nothing here imports.
ENVIRONMENTS: dict[str, tuple[list[str], list[str]]] = {
    "speculators 0.7": (
        ["speculators==0.7.0.1"],
        [*_COMMON, "datasets<=5.0.0", "tqdm<=4.70.0", "transformers<5.15.0"],
    ),
    "speculators 0.9": (
        ["speculators==0.9.0", "hs-connectors==0.9.0", "specforge==0.2.0"],
        [*_COMMON, "aiohttp", "datasets<=5.1.0", "tqdm<=4.70.1", "transformers<=5.19.0"],
    ),
}


def environment(name: str) -> Path:
    """The interpreter of an environment; makes it where it isn't there (a minute or two)."""
    tools, packages = ENVIRONMENTS[name]
    folder = CACHE / fs.digest_json([_TORCH, _INDEX, tools, packages, sys.version])
    interpreter, whole = folder / "bin/python", folder / ".whole"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test runs wait
        if not whole.is_file():
            print(f"making the environment {name} in {folder}")
            shutil.rmtree(folder, ignore_errors=True)
            _run(sys.executable, "-m", "venv", str(folder))
            pip = (str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            _run(*pip, *(["--index-url", _INDEX] if _INDEX else []), _TORCH)
            _run(*pip, *packages)
            _run(*pip, "--no-deps", *tools)
            whole.touch()
    return interpreter


def run_peer(name: str, script: str, *arguments: str | Path) -> str:
    """Run a script of tests/peers in an environment; returns what it printed."""
    command = [environment(name), "-W", "ignore", SCRIPTS / script, *arguments]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables.pop("PYTHONPATH", None)
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
