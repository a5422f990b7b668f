"""The folder that brings the tap into an engine: found by importlib.metadata, alone, and loud when it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.engine.inject import write_plugin

SETTINGS = {
    "ring": "/nowhere/ring",
    "aux_layer_ids": [2, 15, 27],
    "encoding": "bf16",
    "final_encoding": "bf16",
    "rid_prefix": "eyas-",
    "hidden_size": 576,
    "num_layers": 30,
    "official_flag": False,
    "patience_s": 30,
}
# What SGLang's load_plugins does (0.5.23 plugins/__init__.py): failures are logged and forgotten.
LOAD = """
import sys
from importlib.metadata import entry_points
found = entry_points(group="sglang.srt.plugins")
assert [(point.name, point.dist.name) for point in found] == [("eyas_tap", "eyas_tap")], list(found)
def load_plugins():
    for point in found:
        register = point.load()
        try:
            register()
        except Exception as error:
            print("only logged:", error)
def run_scheduler_process():
    load_plugins()
(run_scheduler_process if "scheduler" in sys.argv else load_plugins)()
print("eyas" in sys.modules, "eyas_tap.ring" in sys.modules)
"""


def run_engine(tmp_path: Path, sglang: str, *words: str, **more):
    """A process in whose environment a plugin folder and a package `sglang` of some version lie."""
    (tmp_path / "engine/sglang").mkdir(parents=True, exist_ok=True)
    (tmp_path / "engine/sglang/__init__.py").write_text(f"__version__ = {sglang!r}\n")
    added = write_plugin(tmp_path / "plugin", SETTINGS | {"events": str(tmp_path / "events")} | more, vllm_stub=True)
    path = os.pathsep.join([added["PYTHONPATH"], str(tmp_path / "engine")])
    env = os.environ | added | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", LOAD, *words], env=env, capture_output=True, text=True, cwd=tmp_path)
    events = tmp_path / "events"
    return done, [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []


def test_it_is_found_and_needs_no_eyas(tmp_path: Path) -> None:
    done, events = run_engine(tmp_path, "0.5.23")
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr
    (event,) = events
    assert (event["event"], event["role"], event["version"], event["rank"]) == ("plugin", "other", "0.5.23", -1)
    assert event["pid"] > 0 and event["t"] > 1.7e9


def test_an_unknown_release_ends_the_process_with_the_reason(tmp_path: Path) -> None:
    done, events = run_engine(tmp_path, "0.5.24")
    assert done.returncode == 1 and "SGLang 0.5.24; expected: 0.5.11 to 0.5.23" in done.stderr
    assert [event["event"] for event in events] == ["refused"]
    assert (events[0]["seen"], events[0]["expected"]) == ("SGLang 0.5.24", "0.5.11 to 0.5.23") and events[0]["cause"]


def test_an_installation_without_the_hooks_ends_the_scheduler(tmp_path: Path) -> None:
    done, events = run_engine(tmp_path, "0.5.23", "scheduler")
    assert done.returncode == 1 and "only logged" not in done.stdout
    assert [event["event"] for event in events] == ["plugin", "refused"]
    assert "No module named 'sglang.srt'" in events[1]["seen"] and events[0]["role"] == "scheduler"


def test_it_does_nothing_where_no_server_of_eyas_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_plugin(tmp_path / "plugin", SETTINGS, vllm_stub=False)
    env = {key: value for key, value in os.environ.items() if key != "EYAS_TAP"} | {
        "PYTHONPATH": str(tmp_path / "plugin")
    }
    done = subprocess.run([sys.executable, "-c", LOAD], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr


def test_the_folder_is_made_anew(tmp_path: Path) -> None:
    write_plugin(tmp_path / "plugin", SETTINGS, vllm_stub=True)
    assert (tmp_path / "plugin/vllm/_custom_ops.py").exists()
    (tmp_path / "plugin/eyas_tap/old.py").write_text("raise SystemExit(1)")
    added = write_plugin(tmp_path / "plugin", SETTINGS | {"patience_s": 5}, vllm_stub=False)
    names = sorted(path.name for path in (tmp_path / "plugin").iterdir())
    assert names == ["eyas_tap", "eyas_tap-0.dist-info", "settings.json"]
    assert not (tmp_path / "plugin/eyas_tap/old.py").exists()
    assert json.loads(Path(added["EYAS_TAP"]).read_text())["patience_s"] == 5
