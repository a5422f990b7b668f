"""Capture from a real vLLM on CPU in float32: 40 samples in steps of 64 tokens, 8 in flight, whatever is killed.

Run by `make test-engines`. The tests of this file follow one another on one run: a server costs half a minute to start.
The first three are SGLang's, on vLLM's store.
"""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from sglang_runs import (
    RECIPE,
    eyas,
    finish,
    kill_server,
    left_of,
    server_of,
    shards_of,
    start,
    wait_for_shards,
    write_samples,
)
from test_sglang_capture import (
    assert_undisturbed,
    model,  # noqa: F401
    test_every_row_is_transformers_state_of_its_layer,  # noqa: F401
    test_the_record_tells_how_it_was_checked,  # noqa: F401
    test_the_store_equals_the_local_engines,  # noqa: F401
)

from eyas.engine import vllm
from eyas.engine.inject import write_plugin
from eyas.engine.server import start_server
from eyas.errors import EngineError
from eyas.run import Run, open_run
from eyas.store.reader import StoreReader

pytestmark = pytest.mark.timeout(1800)  # on a machine that does much else a server takes minutes to start
ARGS = ["--max-num-batched-tokens", "64", "--max-num-seqs", "16"]


def make_run(folder: Path, target: Path, name: str = "vllm") -> Run:
    venv = os.environ.get("EYAS_VLLM_VENV")
    assert venv, "EYAS_VLLM_VENV is not set: run `make test-engines`"
    write_samples(folder / "samples.jsonl")
    recipe = folder / f"{name}.toml"
    recipe.write_text(RECIPE.format(name=name, folder=folder, target=target, python=f"{venv}/bin/python"))
    return open_run(recipe, ['engine.kind="vllm"', f"engine.args={json.dumps(ARGS)}"])


@pytest.fixture(scope="module")
def run(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = make_run(tmp_path_factory.mktemp("vllm"), demo_target)
    eyas(run, "prepare")
    yield run
    eyas(run, "serve", "stop")


@pytest.fixture(scope="module")
def captured(run: Run) -> Path:
    """A copy of the store that a capture made which nothing disturbed; its server runs on."""
    print(eyas(run, "serve", "start"))
    print(eyas(run, "capture"))
    return Path(shutil.copytree(run.store_url, run.dir / "undisturbed"))


def capture_anew(run: Run) -> Any:
    """A capture from the beginning, in a process of its own, as soon as its first two shards are committed."""
    process = start(run, "capture", "--redo")
    while shards_of(run):  # the old store is removed first
        time.sleep(0.01)
    wait_for_shards(run, 2, process)
    return process


def test_kill_9_of_the_worker_and_then_of_the_server(run: Run, captured: Path) -> None:
    process = capture_anew(run)
    process.kill()
    process.communicate()
    kept, state = shards_of(run), server_of(run)
    total = StoreReader(str(captured)).plan.shards
    assert 2 <= len(kept) < total and state.alive()
    print(f"worker killed with {len(kept)} of {total} shards committed; the server lived on")
    process = start(run, "capture")
    wait_for_shards(run, len(kept) + 1, process)
    dead = kill_server(run)
    said = finish(process, 1)
    assert dead.pid == state.pid and f"pid {dead.pid}" in said and dead.log in said and "Traceback" not in said
    committed = {path: path.stat().st_mtime_ns for path in shards_of(run)}
    assert len(kept) < len(committed) < total
    print(f"server killed with {len(committed)} committed:\n{said}")

    said = eyas(run, "capture")  # starts a server of its own, and stops it
    assert all(path.stat().st_mtime_ns == made for path, made in committed.items())
    last = server_of(run)
    print(f"servers {dead.pid} and {last.pid}; left of them: {left_of(dead)}, {left_of(last)}\n{said}")
    assert last.pid != dead.pid and not left_of(dead) and not left_of(last)
    assert_undisturbed(run, captured)


def test_ids_off_by_one_fail_the_start(run: Run, demo_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that collects the layers after those of the recipe: its flags and the tap's settings say so."""
    shifted = make_run(run.dir.parent.parent, demo_target, "shifted")
    flags, plugin = vllm.capture_flags, write_plugin

    def next_flags(target: Any, ids: list[int]) -> list[str]:
        return flags(target, [layer + 1 for layer in ids])

    def next_plugin(folder: Path, settings: dict[str, Any], **more: Any) -> dict[str, str]:
        return plugin(folder, settings | {"aux_layer_ids": [layer + 1 for layer in settings["aux_layer_ids"]]}, **more)

    monkeypatch.setattr(vllm, "capture_flags", next_flags)
    monkeypatch.setattr("eyas.engine.begin.write_plugin", next_plugin)
    with pytest.raises(EngineError) as caught:
        start_server(shifted)
    print(caught.value)
    assert "self-test: aux layer 2: cosine" in caught.value.seen and "as layer 3" in caught.value.seen
    assert "the server gives the state after 3 layers under id 2: ids off by 1" in caught.value.cause
    assert not left_of(server_of(shifted))
