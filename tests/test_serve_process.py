"""Processes: a session of their own, known again, measured, ended whole; real ones throughout."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from eyas.engine import gpu, leftovers, process
from eyas.engine.state import ServerState
from eyas.pids import alive
from eyas.tap.ring import Layout, Ring

SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
# A child in a session of its own, a grandchild that ignores SIGTERM: as engines have them.
FAMILY = """
import os, signal, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
subprocess.Popen([sys.executable, "-c",
  "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"])
time.sleep(600)
"""


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark of this test; whatever carries it is ended."""
    text = f"/test:{os.getpid():08x}"
    yield text
    process.end(0, text, 0.1)


def start(command: list[str], mark: str, log: Path) -> psutil.Process:
    return process.launch(command, os.environ | {process.MARK: mark}, log)


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_a_process_has_its_own_session_and_log(tmp_path: Path, mark: str) -> None:
    started = start(SLEEPS, mark, tmp_path / "log")
    wait_for(tmp_path / "log", "up")
    assert os.getsid(started.pid) == started.pid != os.getsid(0)
    assert alive(started.pid, started.create_time())
    assert not alive(started.pid, started.create_time() - 60)  # an earlier process of that pid
    assert process.mark_of(started.pid) == mark
    assert process.end(started.pid, mark, 5) == (1, 0)
    assert not alive(started.pid, started.create_time())


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        process.launch(["/nowhere/python"], {}, tmp_path / "log")


def test_the_exit_code_of_a_dead_one_is_kept_until_it_is_asked_for(tmp_path: Path, mark: str) -> None:
    started = start([sys.executable, "-c", "raise SystemExit(7)"], mark, tmp_path / "log")
    deadline = time.monotonic() + 20
    while alive(started.pid, started.create_time()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert process.reap(started.pid) == 7
    assert process.reap(started.pid) is None


def test_a_family_is_ended_whole(tmp_path: Path, mark: str) -> None:
    """Also the child that left the session, and the one that ignores SIGTERM."""
    started = start([sys.executable, "-c", FAMILY], mark, tmp_path / "log")
    wait_for(tmp_path / "log", "deaf")
    deadline = time.monotonic() + 10
    while len(process.members(started.pid, mark)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    count, killed = process.end(started.pid, mark, 1.0)
    assert (count, killed) == (3, 1)
    assert process.members(started.pid, mark) == []


def test_a_stopped_one_is_ended_by_sigterm(tmp_path: Path, mark: str) -> None:
    started = start(SLEEPS, mark, tmp_path / "log")
    wait_for(tmp_path / "log", "up")
    started.suspend()
    assert process.end(started.pid, mark, 10) == (1, 0)


SHELL = [
    sys.executable,
    "-c",
    "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\nprint('up', flush=True)\ntime.sleep(600)",
]


def test_a_session_of_the_same_number_is_not_the_servers(tmp_path: Path, mark: str) -> None:
    """Pids are used again after the server is dead: whoever has them now, and what they leave behind, is no member."""
    other = process.launch(SHELL, dict(os.environ), tmp_path / "log")
    try:
        wait_for(tmp_path / "log", "up")
        began = other.create_time()
        assert process.session_of(other.pid, began, mark) == other.pid
        assert process.session_of(other.pid, began - 3600, mark) == 0
        assert process.session_of(other.pid, began - 3600, "") == 0  # no mark is nobody's
        (child,) = other.children()
        other.kill()
        other.wait()
        assert child.is_running() and os.getsid(child.pid) == other.pid
        assert process.session_of(other.pid, began - 3600, mark) == 0
        assert process.session_of(other.pid, began - 3600, mark, [(child.pid, child.create_time() - 60)]) == 0
        assert process.session_of(other.pid, began, mark, [(child.pid, child.create_time())]) == other.pid
    finally:
        for one in process.members(other.pid, ""):
            one.kill()


def test_a_session_is_known_by_a_mark_when_its_first_process_is_gone(tmp_path: Path, mark: str) -> None:
    started = start(SHELL, mark, tmp_path / "log")
    wait_for(tmp_path / "log", "up")
    created = started.create_time()
    started.kill()
    started.wait()
    assert process.session_of(started.pid, created, mark) == started.pid
    assert process.end(started.pid, mark, 5) == (1, 0)
    assert process.session_of(started.pid, created, mark) == 0


def test_others_are_left_alone(tmp_path: Path, mark: str) -> None:
    other = subprocess.Popen(SLEEPS, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        started = start(SLEEPS, mark, tmp_path / "log")
        wait_for(tmp_path / "log", "up")
        process.end(started.pid, mark, 5)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_server_outlives_a_kill_of_who_started_it(tmp_path: Path, mark: str) -> None:
    program = (
        "import os, pathlib, time\nfrom eyas.engine import process\n"
        f"log = pathlib.Path({str(tmp_path)!r}) / 'log'\n"
        f"one = process.launch({SLEEPS!r}, os.environ | {{process.MARK: {mark!r}}}, log)\n"
        "print(one.pid, one.create_time(), flush=True)\ntime.sleep(600)\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert starter.stdout is not None
    pid, created = starter.stdout.readline().split()
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    assert alive(int(pid), float(created))
    assert [one.pid for one in process.members(0, mark)] == [int(pid)]


def test_signs_of_work(tmp_path: Path, mark: str) -> None:
    log = tmp_path / "log"
    started = start([sys.executable, "-c", "print('up', flush=True)\nwhile True: pass"], mark, log)
    wait_for(log, "up")
    before = process.work([started], log)
    time.sleep(0.5)
    after = process.work([started], log)
    assert after.cpu_s > before.cpu_s and after.log_bytes == before.log_bytes == 3


def test_who_listens(mark: str, tmp_path: Path) -> None:
    program = (
        "import socket, time\nlistening = socket.socket()\nlistening.bind(('127.0.0.1', 0))\nlistening.listen()\n"
        "print('port', listening.getsockname()[1], flush=True)\ntime.sleep(600)"
    )
    log = tmp_path / "log"
    started = start([sys.executable, "-c", program], mark, log)
    wait_for(log, "\n")
    holder = process.port_holder(int(log.read_text().split()[1]))
    assert holder is not None and holder[0] == started.pid and "socket" in holder[1]
    assert process.port_holder(1) is None


MAPS = """
import mmap, multiprocessing, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(file, 0)
os.close(file)
print('mapped', flush=True)
time.sleep(600)
"""


def make_ring(name: str) -> str:
    path = leftovers.ring_path(f"pytest{os.getpid()}", name)
    Ring.create(path, 1 << 20, Layout(48, "bf16", "bf16"))
    return path


def test_a_dead_servers_ring_is_a_leftover_and_a_living_ones_is_not(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, mapped, marked, fresh = (make_ring(f"{number:08x}") for number in range(1, 5))
    elsewhere = leftovers.SHM / f"eyas-1-pytest{os.getpid()}-00000005.ring"
    elsewhere.write_bytes(b"another container's")
    try:
        start([sys.executable, "-c", MAPS, mapped], mark, tmp_path / "log")
        start(SLEEPS, "/run:00000003", tmp_path / "log3")
        wait_for(tmp_path / "log", "mapped")
        wait_for(tmp_path / "log3", "up")
        real = time.time
        monkeypatch.setattr(leftovers.time, "time", lambda: real() + 61)
        Path(fresh).touch()
        os.utime(fresh)
        found = leftovers.find_leftovers()
        assert dead in found.rings
        assert not {mapped, marked, str(elsewhere)} & set(found.rings)
        monkeypatch.setattr(leftovers.time, "time", real)
        assert dead not in leftovers.find_leftovers().rings  # made just now: its server is about to start
        assert leftovers.clean(leftovers.Leftovers([dead], [], [])) == [f"{dead} (1.05 MB) removed"]
        assert not Path(dead).exists() and Path(mapped).exists()
    finally:
        process.end(0, "/run:00000003", 0.1)
        for path in (dead, mapped, marked, fresh, str(elsewhere)):
            Path(path).unlink(missing_ok=True)


def test_processes_of_a_server_whose_first_is_gone_are_orphans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"{tmp_path}:{os.getpid():08x}"
    started = start([sys.executable, "-c", FAMILY], mark, tmp_path / "log")
    words: list[str] = [""]
    state = ServerState("", 0, "", "", "", "", words, "", "", "", [], {}, mark, started.pid, started.create_time())
    (tmp_path / "server.json").write_text(json.dumps(asdict(state)))
    wait_for(tmp_path / "log", "deaf")

    def orphans() -> list[psutil.Process]:
        return [one for one in leftovers.find_leftovers().orphans if process.mark_of_process(one) == mark]

    try:
        monkeypatch.setattr(leftovers, "_FRESH_S", -1.0)
        assert orphans() == []
        started.kill()
        started.wait()
        found = orphans()
        assert len(found) == 2
        monkeypatch.setattr(leftovers, "_FRESH_S", 60.0)
        assert orphans() == []  # just started: not noted yet, perhaps
        assert leftovers.clean(leftovers.Leftovers([], found, [])) == [
            f"2 processes of a dead server ended ({tmp_path})"
        ]
        assert process.members(0, mark) == []
    finally:
        process.end(0, mark, 0.1)


@pytest.mark.parametrize("becomes", ["renamed", "another start's", "another version's"])
def test_a_server_whose_folder_tells_nothing_lives_as_long_as_its_first_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    monkeypatch.setattr(leftovers, "_FRESH_S", -1.0)
    folder = tmp_path / "engine"
    folder.mkdir()
    mark = f"{folder}:{os.getpid():08x}"
    started = start(SHELL, mark, tmp_path / "log")
    state = ServerState("", 0, "", "", "", "", [""], "", "", "", [], {}, mark, started.pid, started.create_time())
    texts = {"another start's": json.dumps(asdict(state) | {"mark": f"{folder}:0"}), "another version's": '{"old": 1}'}
    if becomes in texts:
        (folder / "server.json").write_text(texts[becomes])
    else:
        folder.rename(tmp_path / "moved")
    wait_for(tmp_path / "log", "up")

    def orphans() -> list[psutil.Process]:
        return [one for one in leftovers.find_leftovers().orphans if process.mark_of_process(one) == mark]

    try:
        assert len(process.members(0, mark)) == 2 and orphans() == []
        started.kill()
        started.wait()
        assert [one.name() for one in orphans()] == ["sleep"]
    finally:
        process.end(0, mark, 0.1)


def test_shared_memory_is_told_by_inode(tmp_path: Path, mark: str) -> None:
    """A semaphore of multiprocessing is mapped under a name that is gone a moment later."""
    program = (
        "import multiprocessing, time\nlock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True)\ntime.sleep(600)"
    )
    started = start([sys.executable, "-c", program], mark, tmp_path / "log")
    wait_for(tmp_path / "log", "/mp-")
    name = (tmp_path / "log").read_text().strip().removeprefix("/")
    assert leftovers.shm_of([started]) == {f"/dev/shm/sem.{name}"}
    lines, whole = leftovers.end_server(started.pid, mark, 5)
    assert whole and lines[0] == "2 processes ended" and not Path(f"/dev/shm/sem.{name}").exists()


SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) printf '%s\\n' "0, GPU-aa, NVIDIA H200, 143771, {used}, 0, 9.0";;
  --query-compute-apps*) test -z "{pid}" || printf '%s\\n' "GPU-aa, {pid}, {used}";;
esac
"""


@pytest.mark.parametrize(
    ("used", "pid", "line", "whole"),
    [
        (1100, "", "GPU memory is as before the start", True),
        (90000, "", "GPU 0: 93.3 GB more in use than before the start, by nobody that nvidia-smi shows", True),
        (90000, "1", "GPU 0: 93.3 GB more in use than before the start, by process 1", True),
        (90000, "server", "left: GPU 0: 93.3 GB more in use than before the start, by process SERVER", False),
    ],
)
def test_gpu_memory_that_is_given_back_or_not(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, used: int, pid: str, line: str, whole: bool
) -> None:
    """1,000 MiB were in use before the start. What another process holds since then is said and is not ours."""
    monkeypatch.setattr(leftovers, "_GPU_PATIENCE_S", 0.5)
    started = start(SLEEPS, mark, tmp_path / "log")
    program, server = tmp_path / "nvidia-smi", str(started.pid)
    program.write_text(SMI.format(used=used, pid=pid.replace("server", server)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = leftovers.end_server(started.pid, mark, 5, gpu_bytes={"GPU-aa": 1000 << 20})
    assert told == (["1 processes ended", line.replace("SERVER", server)], whole)


@pytest.mark.parametrize(("holds", "waits"), [(89500, False), (1000, True)])
def test_what_another_process_holds_on_a_gpu_is_not_waited_for(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch, holds: int, waits: bool
) -> None:
    """90,000 MiB are in use, `holds` of it by a process that nvidia-smi shows: another server of ours, say."""
    monkeypatch.setattr(leftovers, "_GPU_PATIENCE_S", 2.0)
    started = start(SLEEPS, mark, tmp_path / "log")
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.format(used=90000, pid="1").replace("GPU-aa, 1, 90000", f"GPU-aa, 1, {holds}"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.monotonic()
    lines = leftovers._gpu_lines({"GPU-aa": 0}, {started.pid})
    assert (time.monotonic() - began > 2) is waits
    assert lines == ["GPU 0: 94.4 GB more in use than before the start, by process 1"]


def test_a_server_is_ended_although_nvidia_smi_hangs(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu, "_PATIENCE_S", 0.3)
    started = start(SLEEPS, mark, tmp_path / "log")
    lines, whole = leftovers.end_server(started.pid, mark, 5, gpu_bytes={"GPU-aa": 0})
    assert whole and lines[0] == "1 processes ended" and "does not answer within 0.3 s" in lines[1]
    assert not alive(started.pid, started.create_time())
