"""One engine process and all it starts: launched in a session of its own, recognised again later, measured, ended.

The session outlives the terminal and a kill of Eyas. Three marks tell its processes from all others: the pair of pid
and creation time of the first, the session id, and the variable EYAS_SERVER in their environment, which they inherit.
Nothing else is ever signalled. Pids and session ids are used again, in a restarted container soon: see `session_of`.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from eyas.pids import began

MARK = "EYAS_SERVER"
_GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)
_POLL_S = 0.2


def launch(command: list[str], env: Mapping[str, str], log: Path) -> psutil.Process:
    """Start a command in a new session, its output appended to `log`; returns at once.

    Raises: OSError where the program can't be executed.
    """
    with log.open("ab") as output:
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
        ]
        # Not subprocess.Popen: it warns when its object goes before the process does, and that is the point here.
        return psutil.Process(os.posix_spawn(command[0], command, env, file_actions=files, setsid=True))


def session_of(pid: int, created: float, mark: str, noted: Iterable[tuple[int, float]] = ()) -> int:
    """The session that a server's first process made, as long as one of its processes is left in it; otherwise 0.

    Args:
        pid, created: of the first process.
        mark: in the environment of all; lost by those that set a title for themselves (setproctitle writes over it).
        noted: pids and creation times of others that were seen in it.
    """
    known = dict([*noted, (pid, created)])
    for process in psutil.process_iter() if pid else ():
        try:
            if os.getsid(process.pid) == pid and (
                (process.pid in known and began(process, known[process.pid]))
                or (mark and mark_of_process(process) == mark)
            ):
                return pid
        except (*_GONE, ProcessLookupError, PermissionError):
            continue
    return 0


def reap(pid: int) -> int | None:
    """Collect a dead child of ours; its exit code (negative: the signal), None where it is not ours or not dead."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


def members(session: int, mark: str) -> list[psutil.Process]:
    """The living processes of a server: those in its session, and those that carry its mark outside it.

    Args:
        session: as `session_of` tells it, asked once: it counts until they are all gone; 0: none.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if (session and os.getsid(process.pid) == session) or (mark and mark_of_process(process) == mark):
                found.append(process)
        except (*_GONE, ProcessLookupError, psutil.AccessDenied, PermissionError):
            continue
    return found


def identities(processes: Iterable[psutil.Process]) -> list[tuple[int, float]]:
    """Pid and creation time of each that is still there."""
    found = []
    for process in processes:
        with contextlib.suppress(*_GONE):
            found.append((process.pid, process.create_time()))
    return found


def mark_of_process(process: psutil.Process) -> str:
    """The value of EYAS_SERVER in its environment; "" without one."""
    try:
        return str(process.environ().get(MARK, ""))
    except (*_GONE, psutil.AccessDenied, OSError):  # another user's, or a kernel thread
        return ""


def end(session: int, mark: str, patience_s: float) -> tuple[int, int]:
    """SIGTERM to all members, after `patience_s` SIGKILL to what is left; returns (how many there were, how many had
    to be killed).

    A stopped process can't act on SIGTERM: it is continued first.
    """
    first = members(session, mark)
    _signal_all(first, signal.SIGTERM)
    _signal_all(first, signal.SIGCONT)
    if _gone_within(session, mark, patience_s):
        return len(first), 0
    killed: set[int] = set()
    for _ in range(10):  # those killed may just have started others
        left = members(session, mark)
        if not left:
            break
        killed |= {process.pid for process in left}
        _signal_all(left, signal.SIGKILL)
        _gone_within(session, mark, 2.0)
    return len(first), len(killed)


def _signal_all(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(*_GONE):
            process.send_signal(number)


def _gone_within(session: int, mark: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while members(session, mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    if session:  # 0 would be any child of ours
        reap(session)
    return True


@dataclass(frozen=True)
class Work:
    """What a server's processes have done so far; two of these, some time apart, say whether they work.

    Attributes:
        cpu_s: processor time of all living members, seconds.
        read_bytes: what they read, from the page cache or from disks, also through memory maps.
        memory_bytes: what they hold; it grows while weights are mapped from a file system that counts no reads.
        log_bytes: length of the log.
    """

    cpu_s: float
    read_bytes: int
    memory_bytes: int
    log_bytes: int


def work(processes: Sequence[psutil.Process], log: Path) -> Work:
    """Counters of now."""
    cpu_s, read, memory = 0.0, 0, 0
    for process in processes:
        try:
            times, counted = process.cpu_times(), process.io_counters()
            cpu_s += times.user + times.system
            read += counted.read_chars + counted.read_bytes
            memory += process.memory_info().rss
        except (*_GONE, psutil.AccessDenied):
            continue
    return Work(cpu_s, read, memory, log.stat().st_size if log.exists() else 0)


def command_of(pid: int) -> str:
    """What a pid runs, shortened for messages; "" where it is gone or another user's."""
    try:
        process = psutil.Process(pid)
        words = process.cmdline() or [process.name()]
    except (*_GONE, psutil.AccessDenied):
        return ""
    text = " ".join(words)
    return text if len(text) <= 120 else text[:117] + "..."


def mark_of(pid: int) -> str:
    """`mark_of_process` by pid; "" where it is gone."""
    try:
        return mark_of_process(psutil.Process(pid))
    except _GONE:
        return ""


def port_holder(port: int) -> tuple[int, str] | None:
    """Who listens on a TCP port of this machine: (pid, command); (0, "") where it can't be seen; None: nobody."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            pid = connection.pid or 0
            return pid, command_of(pid) if pid else ""
    return None
