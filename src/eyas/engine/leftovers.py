"""What a server leaves, and how it is removed: only what is of this run, or whose owner is dead.

A ring's name carries the start that it belongs to and the pid namespace that it was made in:
/dev/shm/eyas-NAMESPACE-RUN-TOKEN.ring. In a container that shares /dev/shm with others only its own are touched.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from eyas import fs
from eyas.engine import process
from eyas.engine.gpu import Gpu, gpus
from eyas.engine.ring import SHM
from eyas.engine.state import STATE_FILE, read_state
from eyas.errors import EngineError
from eyas.progress import size

_RING = re.compile(r"eyas-(\d+)-.*-([0-9a-f]{8})\.ring$")
_SGLANG = "sglang_loads_*.shm"
_FRESH_S = 60.0  # a ring, and a process, are there before it is noted whose they are
_PORT_PATIENCE_S = 5.0
_GPU_PATIENCE_S = 30.0
_GPU_SLACK_BYTES = 512 << 20


def namespace() -> str:
    """Number of this process' pid namespace."""
    return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))  # noqa: PTH115


def ring_path(run_name: str, token: str) -> str:
    return str(SHM / f"eyas-{namespace()}-{run_name}-{token}.ring")


def shm_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Files in /dev/shm that these processes have mapped, as far as they can be looked at.

    Told by inode: a semaphore is mapped under a name that it has for a moment only.
    """
    inodes: set[int] = set()
    for one in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines():
                if f" {SHM}/" in line:
                    inodes.add(int(line.split()[4]))
    return {str(path) for path in SHM.iterdir() if path.is_file() and path.stat().st_ino in inodes}


def end_server(
    session: int,
    mark: str,
    patience_s: float,
    *,
    port: int = 0,
    shm: Iterable[str] = (),
    gpu_bytes: Mapping[str, int] | None = None,
) -> tuple[list[str], bool]:
    """End all processes of a server and remove its shared memory; verify each thing.

    Args:
        port: where it listened; 0: not looked at.
        shm: paths that are its own, the ring among them; what its processes map now is added.
        gpu_bytes: what was in use on each GPU before its start, by uuid; none for a server on a CPU.
    Returns: lines for the user, and whether all is gone; lines about what is not start with `left:`.
    """
    members = process.members(session, mark)
    pids, own = {member.pid for member in members}, {*filter(None, shm)} | shm_of(members)
    count, killed = process.end(session, mark, patience_s)
    lines = [f"{count} processes ended" + (f", {killed} of them by SIGKILL" if killed else "")] if count else []
    left = [f"left: process {one.pid}: {process.command_of(one.pid)}" for one in process.members(session, mark)]
    lines += remove_shm(own)
    left += [f"left: {path}: still there" for path in sorted(own) if Path(path).exists()]
    holder = _port_holder(port) if port else None
    if port and holder is None:
        lines.append(f"port {port} is free")
    elif holder is not None:
        left.append(f"left: port {port} is held by process {holder[0]}: {holder[1]}")
    lines += _gpu_lines(gpu_bytes, pids) if gpu_bytes else []
    left += [line for line in lines if line.startswith("left:")]
    return [line for line in lines if line not in left] + left, not left


def remove_shm(paths: Iterable[str]) -> list[str]:
    """Remove files that are there; a line for each."""
    lines = []
    for path in sorted(set(paths)):
        with contextlib.suppress(FileNotFoundError):
            amount = Path(path).stat().st_size
            fs.remove(Path(path))
            lines.append(f"{path} ({size(amount)}) removed")
    return lines


def _port_holder(port: int) -> tuple[int, str] | None:
    """Who listens there after up to 5 s: the kernel closes a killed process's sockets a moment after it is gone."""
    deadline = time.monotonic() + _PORT_PATIENCE_S
    while (holder := process.port_holder(port)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return holder


def _gpu_lines(before: Mapping[str, int], pids: set[int]) -> list[str]:
    """Whether each GPU's memory is back after up to 30 s: the driver takes a while.

    In a container nvidia-smi may name processes by other pids, so what is in use is compared too. What it names as
    another process' is not waited for.
    """
    deadline = time.monotonic() + _GPU_PATIENCE_S
    while True:
        try:
            held = [gpu for gpu in gpus() if gpu.uuid in before and _holds_more(gpu, before[gpu.uuid], pids)]
        except EngineError as error:
            return [f"whether GPU memory is back is not known: {error.seen}"]
        if not held:
            return ["GPU memory is as before the start"]
        if time.monotonic() > deadline or not any(_may_fall(gpu, before[gpu.uuid], pids) for gpu in held):
            break
        time.sleep(0.5)
    return [_gpu_line(gpu, before[gpu.uuid], pids) for gpu in held]


def _holds_more(gpu: Gpu, before: int, pids: set[int]) -> bool:
    return bool(pids & gpu.holders.keys()) or gpu.used_bytes > before + _GPU_SLACK_BYTES


def _may_fall(gpu: Gpu, before: int, pids: set[int]) -> bool:
    """Whether some of what is in use is the server's, or nobody's that nvidia-smi shows."""
    others = sum(amount for pid, amount in gpu.holders.items() if pid not in pids)
    return bool(pids & gpu.holders.keys()) or gpu.used_bytes - others > before + _GPU_SLACK_BYTES


def _gpu_line(gpu: Gpu, before: int, pids: set[int]) -> str:
    ours = "left: " if pids & gpu.holders.keys() else ""  # others may have come meanwhile
    who = ", ".join(f"process {pid}" for pid in gpu.holders) or "nobody that nvidia-smi shows"
    return f"{ours}GPU {gpu.index}: {size(gpu.used_bytes - before)} more in use than before the start, by {who}"


@dataclass(frozen=True)
class Leftovers:
    """What dead servers left on this machine.

    Attributes:
        rings: files of dead starts.
        orphans: processes whose server's first process is gone.
        others: SGLang's own files that nobody maps and no run of Eyas recorded; they are not removed.
    """

    rings: list[str]
    orphans: list[psutil.Process]
    others: list[str]


def find_leftovers() -> Leftovers:
    """Look through /dev/shm and all processes. Nothing is changed."""
    everyone, now = list(psutil.process_iter()), time.time()
    mapped = shm_of(everyone)
    marks = {one.pid: process.mark_of_process(one) for one in everyone}
    tokens = {mark.rpartition(":")[2] for mark in marks.values() if mark}
    rings = [
        str(path)
        for path in sorted(SHM.glob("eyas-*.ring"))
        if (match := _RING.search(path.name))
        and match[1] == namespace()
        and match[2] not in tokens
        and str(path) not in mapped
        and now - path.stat().st_ctime > _FRESH_S
    ]
    others = [str(path) for path in sorted(SHM.glob(_SGLANG)) if str(path) not in mapped]
    dead = {
        mark for mark in set(marks.values()) - {""} if not _lives(mark, [pid for pid in marks if marks[pid] == mark])
    }
    orphans = [one for one in everyone if marks[one.pid] in dead and now - one.create_time() > _FRESH_S]
    return Leftovers(rings, orphans, others)


def _lives(mark: str, pids: Iterable[int]) -> bool:
    """Whether the first process of the start that this mark names is alive: by its run's server.json, or where that is
    not there (its folder was renamed), or another start's or version's, by whether the first of a session is.

    Args:
        pids: of the processes that carry the mark.
    """
    with contextlib.suppress(EngineError):
        state = read_state(Path(mark.rpartition(":")[0]) / STATE_FILE)
        if state is not None and state.mark == mark:
            return state.alive()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if psutil.pid_exists(os.getsid(pid)):
                return True
    return False


def clean(found: Leftovers) -> list[str]:
    """Remove what `find_leftovers` found; a line for each."""
    lines = []
    for mark in sorted({process.mark_of_process(one) for one in found.orphans} - {""}):
        count, _ = process.end(0, mark, 10.0)
        lines.append(f"{count} processes of a dead server ended ({mark.rpartition(':')[0]})")
    return lines + remove_shm(found.rings)
