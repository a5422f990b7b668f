"""NVIDIA GPUs of this machine and who holds their memory, as `nvidia-smi` tells it."""

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from eyas.errors import EngineError

_GPU_KEYS = "index,uuid,name,memory.total,memory.used,utilization.gpu,compute_cap"
_APP_KEYS = "gpu_uuid,pid,used_memory"
_PATIENCE_S = 20
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        total_bytes, used_bytes: its memory.
        busy: share of the last second or so in which a kernel ran, 0 to 1. A kernel that only waits counts too.
        capability: compute capability, such as (12, 0).
        holders: pid -> bytes; pids of other containers are not of this one's numbering.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    busy: float
    capability: tuple[int, int]
    holders: dict[int, int]


def gpus() -> list[Gpu]:
    """All GPUs that nvidia-smi lists; none where it is missing or finds no driver.

    Raises: EngineError where it hangs.
    """
    holders: dict[str, dict[int, int]] = {}
    for uuid, pid, used in _ask("--query-compute-apps", _APP_KEYS):
        holders.setdefault(uuid, {})[_number(pid)] = _number(used) << 20
    return [
        Gpu(
            _number(index),
            uuid,
            name,
            _number(total) << 20,
            _number(used) << 20,
            _number(busy) / 100,
            _capability(capability),
            holders.get(uuid, {}),
        )
        for index, uuid, name, total, used, busy, capability in _ask("--query-gpu", _GPU_KEYS)
    ]


def visible(found: list[Gpu], env: Mapping[str, str]) -> list[Gpu]:
    """Those that a process with this environment sees, in its order (CUDA_VISIBLE_DEVICES)."""
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return found
    wanted = [word.strip() for word in text.split(",") if word.strip()]
    return [gpu for word in wanted for gpu in found if word == str(gpu.index) or gpu.uuid.startswith(word)]


def links() -> set[str]:
    """How GPUs are connected, by `nvidia-smi topo -m`: NV4 and the like is NVLink, PIX to SYS is PCIe."""
    rows = [line.split() for line in _run("topo", "-m").splitlines() if line.startswith("GPU")]
    return {cell for row in rows for cell in row[1:] if _LINK.fullmatch(cell)}


def _ask(query: str, keys: str) -> list[list[str]]:
    width = len(keys.split(","))
    rows = csv.reader(_run(f"{query}={keys}", "--format=csv,noheader,nounits").splitlines())
    return [[cell.strip() for cell in row] for row in rows if len(row) == width]


def _run(*words: str) -> str:
    """What nvidia-smi says; nothing where it is missing or finds no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, *words]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, env=os.environ | {"LC_ALL": "C"}
        )
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"{program} does not answer within {_PATIENCE_S} s",
            cause="the GPU driver hangs, often after a GPU fell off the bus",
            next="look at the kernel's log: dmesg | grep -i -e nvrm -e xid",
        ) from None
    return asked.stdout if asked.returncode == 0 else ""


def _number(text: str) -> int:
    """`[N/A]` and the like count as 0."""
    return int(float(text)) if text.replace(".", "", 1).isdigit() else 0


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return _number(major), _number(minor)
