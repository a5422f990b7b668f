"""Servers that live together: ended at the same time, so that none is seen to leave the others' memory behind."""

import threading
from pathlib import Path

import pytest
from helpers_export import make_run

from eyas.errors import EngineError
from eyas.evaluate import pool as module
from eyas.evaluate.pool import pool


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
