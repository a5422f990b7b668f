"""Servers that live together: ended at the same time, so that none is seen to leave the others' memory behind."""

import dataclasses
import os
import sys
import threading
from pathlib import Path

import pytest
from helpers_export import make_run

from eyas.engine import process
from eyas.engine.server import OtherSettings
from eyas.engine.state import ServerState, load_state, save_state
from eyas.errors import EngineError
from eyas.evaluate import pool as module
from eyas.evaluate import serving
from eyas.evaluate.pool import pool
from eyas.pids import alive


@pytest.mark.parametrize("broken", [False, True])
def test_all_servers_are_ended_at_the_same_time(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Each waits for the two others to be ended too; the error of one hinders none."""
    together, ended = threading.Barrier(3, timeout=10), list[str]()

    def stop(run: object) -> list[str]:
        together.wait()
        ended.append("one")
        if broken:
            raise EngineError("a process is left")
        return ["1 processes ended"]

    run = make_run(tmp_path, tiny_target, '[serving]\nkind = "sglang"')
    monkeypatch.setattr(module, "start_server", lambda run, *, stop: object())
    monkeypatch.setattr(module, "stop_server", stop)
    servers = pool(dict.fromkeys("abc", run), 3, None)
    with servers as made:
        assert made.prepare(["a", "b", "c"]) == {} and made.living == ["a", "b", "c"]
        if broken:
            with pytest.raises(EngineError, match="a process is left"):
                made.close()
    assert ended == ["one"] * 3 and made.living == []


def test_a_server_that_a_killed_call_left_is_ended_though_none_is_asked(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All passes were measured before the kill: nothing is asked of the server again."""
    run = make_run(tmp_path, tiny_target, '[serving]\nkind = "sglang"')
    runs = {name: dataclasses.replace(run, engine_folder=f"serving/{name}") for name in ("left", "ended", "unknown")}
    left = process.launch([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ), tmp_path / "log")
    try:
        for name, pid in (("left", left.pid), ("ended", 2**22)):
            state = dict.fromkeys(
                ("url", "ring", "log", "events", "plugin", "version", "profile", "device", "mark"), ""
            )
            told = ServerState(**state, port=0, command=[], aux_layer_ids=[], settings={}, pid=pid)
            told.created = left.create_time()
            save_state(runs[name], told)
        with pool(runs, 2, None):
            pass
        assert not alive(left.pid, left.create_time())
        assert load_state(runs["left"]).stopped > 0 and not load_state(runs["ended"]).stopped
    finally:
        process.end(left.pid, "", 0.1)


def test_a_left_server_of_other_settings_is_ended_before_the_start(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = make_run(tmp_path, tiny_target, '[serving]\nkind = "sglang"'), list[str]()

    def start(run: object, *, stop: object) -> str:
        said.append("start")
        if said == ["start"]:
            raise OtherSettings("a server of this run lives (pid 7) with command ['--tp-size 2']")
        return "server"

    monkeypatch.setattr(module, "start_server", start)
    monkeypatch.setattr(module, "stop_server", lambda run: said.append("stop") or [])
    with pool({"a": run}, 1, None) as made:
        assert made.get("a") == "server"
    assert said == ["start", "stop", "start", "stop"]


def test_redo_ends_what_a_killed_call_left_and_no_server_that_users_are_served_by(
    tmp_path: Path, tiny_target: Path
) -> None:
    run = make_run(tmp_path, tiny_target, '[serving]\nkind = "sglang"')
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    processes = {}
    try:
        for folder in ("serving", "serving/with", "serving/replay+1/engine"):
            server = dataclasses.replace(run, engine_folder=folder)
            mark = f"{run.dir / folder}:{os.getpid():08x}"
            started = process.launch(sleep, os.environ | {process.MARK: mark}, tmp_path / "log")
            processes[folder] = (started.pid, started.create_time())
            told = ServerState(
                **dict.fromkeys(("url", "ring", "log", "events", "plugin", "version", "profile", "device"), ""),
                port=0,
                command=[],
                aux_layer_ids=[],
                settings={},
                pid=started.pid,
                created=started.create_time(),
                mark=mark,
            )
            save_state(server, told)
        (run.dir / "serving/journal.jsonl").write_text("{}\n")
        serving.discard(run)
        assert [alive(*processes[folder]) for folder in processes] == [True, False, False]
        assert sorted(path.name for path in (run.dir / "serving").iterdir()) == ["server.json"]
    finally:
        for pid, _ in processes.values():
            process.end(pid, "", 0.1)
