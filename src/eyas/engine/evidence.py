"""What a server does right now, seen from outside: processes, stacks, GPUs, ports, log. Nothing is signalled."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from eyas.engine.gpu import Gpu, gpus, links
from eyas.errors import EngineError

_SAMPLE_S = 1.5
_STACK_PATIENCE_S = 10
_LOG_LINES = 400
# Compilers that an engine starts while it warms up (CUDA, Triton, C++ extensions).
_BUILDERS = frozenset(
    {"nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "ninja", "cc1plus", "hipcc", "clang++"}
)
_NETWORK_FS = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "lustre",
    "ceph",
    "gpfs",
    "beegfs",
    "9p",
    "virtiofs",
    "glusterfs",
    "gcsfuse",
)


@dataclass(frozen=True)
class Member:
    """One process of the server.

    Attributes:
        state: as /proc has it: R runs, S sleeps, D waits for a disk, T is stopped.
        cores: processors' worth of work over the sample.
        read_bytes_s: what it read, page cache included, bytes per second.
        waits_in: kernel function it sleeps in, "" where unknown.
        stacks: one text a thread, innermost frame first; empty where py-spy can't read them.
    """

    pid: int
    name: str
    state: str
    cores: float
    read_bytes_s: float
    threads: int
    waits_in: str = ""
    stacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """All that causes are recognised by.

    Attributes:
        layer: layer of readiness that is waited for; "" for a server that is ready.
        exit_code: of a first process that is gone; negative: the signal. None: it lives, or its code is not known.
        log: its last lines; `log_age_s`: seconds since the last one was written.
        stacks_note: why there are no stacks.
        listening: TCP ports that its processes listen on.
        links: how GPUs are connected: NV4 and the like is NVLink, the rest PCIe.
        model_fs: type of the file system that the model lies on.
        iommu: GPUs' peer-to-peer traffic is translated by an IOMMU.
        flags: tp_size, pp_size, nnodes and device as started; absent ones are not known.
        refused: the tap's refusal, if there was one.
        table: of the recipe, that says how it is started: engine or serving.
    """

    layer: str = ""
    alive: bool = True
    exit_code: int | None = None
    members: tuple[Member, ...] = ()
    log: tuple[str, ...] = ()
    log_age_s: float | None = None
    stacks_note: str = ""
    listening: tuple[int, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpu_note: str = ""
    links: frozenset[str] = frozenset()
    builders: tuple[str, ...] = ()
    model_path: str = ""
    model_fs: str = ""
    iommu: bool = False
    flags: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, Any] | None = None
    table: str = "engine"


def examine(
    processes: Sequence[psutil.Process],
    *,
    log: Path | None,
    layer: str = "",
    engine_python: str = "",
    model_path: str = "",
    flags: dict[str, Any] | None = None,
    exit_code: int | None = None,
    refused: dict[str, Any] | None = None,
    table: str = "engine",
) -> Evidence:
    """Look at these processes for 1.5 s, then at their stacks and surroundings."""
    before = {one.pid: _counters(one) for one in processes}
    began = time.monotonic()
    if processes:
        time.sleep(_SAMPLE_S)
    passed = time.monotonic() - began
    spy = find_py_spy(engine_python)
    members = [found for one in processes if (found := _member(one, before[one.pid], passed, spy)) is not None]
    note = "" if any(member.stacks for member in members) or not members else _why_no_stacks(spy)
    gpu_note, cards, connected = "", list[Gpu](), set[str]()
    try:
        cards = gpus()
        connected = links() if len(cards) > 1 else connected
    except EngineError as error:
        gpu_note = error.seen
    return Evidence(
        layer=layer,
        alive=bool(members),
        exit_code=exit_code,
        members=tuple(members),
        log=tuple(tail(log, _LOG_LINES)) if log else (),
        log_age_s=time.time() - log.stat().st_mtime if log and log.exists() else None,
        stacks_note=note,
        listening=_ports({member.pid for member in members}),
        gpus=tuple(cards),
        gpu_note=gpu_note,
        links=frozenset(connected),
        builders=tuple(member.name for member in members if member.name in _BUILDERS),
        model_path=model_path,
        model_fs=file_system(Path(model_path)) if model_path else "",
        iommu=iommu_translates(),
        flags=flags or {},
        refused=refused,
        table=table,
    )


def _counters(one: psutil.Process) -> tuple[float, int]:
    try:
        times = one.cpu_times()
        return times.user + times.system, one.io_counters().read_chars
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0, 0


def _member(one: psutil.Process, before: tuple[float, int], passed: float, spy: str) -> Member | None:
    try:
        status = (Path(f"/proc/{one.pid}/stat")).read_text().rpartition(")")[2].split()[0]
        name, threads = one.name(), one.num_threads()
    except (psutil.Error, OSError):
        return None
    cpu, read = _counters(one)
    return Member(
        one.pid,
        name,
        status,
        round(max(0.0, cpu - before[0]) / max(passed, 1e-9), 2),
        max(0, read - before[1]) / max(passed, 1e-9),
        threads,
        _wait_channel(one.pid),
        tuple(stacks(one.pid, spy)) if spy and name not in _BUILDERS else (),
    )


def _wait_channel(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/wchan").read_text().strip()
    except OSError:
        return ""
    return "" if text == "0" else text


def find_py_spy(engine_python: str = "") -> str:
    """py-spy beside Eyas's interpreter, beside the engine's (SGLang depends on it), or on PATH; "" where it isn't."""
    beside = [Path(python).parent / "py-spy" for python in (sys.executable, engine_python) if python]
    return next((str(path) for path in beside if path.is_file()), shutil.which("py-spy") or "")


def stacks(pid: int, spy: str) -> list[str]:
    """Python stacks of a process, a line a thread: "MainThread: inner (file:line) < outer (file:line) ...".

    The process is not paused: one that is stopped or in the kernel can be read too.
    """
    command = [spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_STACK_PATIENCE_S)
        threads = json.loads(ran.stdout) if ran.returncode == 0 else []
    except (subprocess.TimeoutExpired, ValueError, OSError):
        return []
    return [f"{thread['thread_name'] or thread['os_thread_id']}: {_frames(thread['frames'])}" for thread in threads]


def _frames(frames: Sequence[dict[str, Any]]) -> str:
    return " < ".join(f"{frame['name']} ({frame['short_filename']}:{frame['line']})" for frame in frames)


def _why_no_stacks(spy: str) -> str:
    if not spy:
        return "py-spy is not here: pip install 'eyas[doctor]'"
    return f"{spy} can't read them: run as the same user, or allow ptrace (docker run --cap-add SYS_PTRACE)"


def _ports(pids: set[int]) -> tuple[int, ...]:
    found = psutil.net_connections("tcp")
    return tuple(sorted({one.laddr.port for one in found if one.pid in pids and one.status == psutil.CONN_LISTEN}))


def tail(log: Path, lines: int) -> list[str]:
    """The last lines of a log that are not empty, progress bars as they stand at their end."""
    if not log.exists():
        return []
    with log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - (256 << 10)))
        text = handle.read().decode("utf-8", errors="replace")
    kept = [line.rstrip("\r").rsplit("\r", 1)[-1].strip() for line in text.split("\n")]
    return [line for line in kept if line][-lines:]


def file_system(path: Path) -> str:
    """Type of the file system that a path lies on, by /proc/mounts."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    real = path.resolve()
    fitting = [(len(mount[1]), mount[2]) for mount in mounts if real.is_relative_to(mount[1])]
    return max(fitting)[1] if fitting else ""


def is_network_fs(kind: str) -> bool:
    return kind.startswith(_NETWORK_FS)


def iommu_translates(root: Path = Path("/sys")) -> bool:
    """Whether an NVIDIA GPU's memory accesses go through an IOMMU that translates them (type DMA, not identity)."""
    for vendor in (root / "bus/pci/devices").glob("*/vendor"):
        if vendor.read_text().strip() != "0x10de":
            continue
        kind = vendor.parent / "iommu_group/type"
        if kind.is_file() and kind.read_text().startswith("DMA"):
            return True
    return False
