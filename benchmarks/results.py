"""How benchmarks keep what they measured: never from a dirty tree, without CUDA only what claims nothing of a GPU."""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def machine_facts() -> dict[str, Any]:
    """Date, machine, versions and commit of a measurement."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    packages = ("torch", "transformers", "numpy", "safetensors")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": {
            "gpu": gpu,
            "cpu": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": {name: metadata.version(name) for name in packages},
        "commit": commit(),
    }


def commit() -> str:
    """The commit of this tree; where a copy travelled without .git, EYAS_COMMIT names the (clean) one it came from."""
    named = os.environ.get("EYAS_COMMIT", "")
    if re.fullmatch("[0-9a-f]{40}", named):
        return named
    return _git("rev-parse", "HEAD")


def save_result(name: str, result: dict[str, Any], of_gpu: bool = True) -> None:
    """Write results/NAME.json. Refuses from a tree that differs from its commit, and without CUDA where it is `of_gpu`:
    figures of a CPU are kept only where their name and machine say so."""
    if of_gpu and not torch.cuda.is_available():
        sys.exit(f"{name}: no CUDA here; results/ holds GPU figures only")
    apart = (":/", ":(top,exclude)benchmarks/results")  # figures change no figure
    changed = "" if os.environ.get("EYAS_COMMIT") else _git("status", "--porcelain", "--", *apart)
    if changed:
        sys.exit(f"{name}: the tree differs from its commit, so the figure could not be repeated:\n{changed}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"git {' '.join(arguments)}: {done.stderr.strip()}\nRun benchmarks in a clone: a figure names its commit"
        )
    return done.stdout.strip()
