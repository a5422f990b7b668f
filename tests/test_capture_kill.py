"""Capture that is ended in the middle, by kill -9 and by signals, and then goes on: real processes, real signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_capture import make_run, random_samples

from eyas.record import load_record
from eyas.run import Run
from eyas.store.reader import StoreReader

SAMPLES = random_samples([20 + 13 * i % 100 for i in range(120)])


def start(run: Run) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "eyas", "capture", run.arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def finish(run: Run) -> str:
    process = start(run)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return errors


def stop_after(run: Run, new_shards: int, signum: int) -> tuple[int, str]:
    """Start a capture, send the signal once so many more shards are committed; exit code and standard error."""
    shards = Path(run.store_url) / "shards"
    before = len(list(shards.glob("0*.safetensors")))
    process = start(run)
    while len(list(shards.glob("0*.safetensors"))) < before + new_shards:
        assert process.poll() is None, "it ended before it could be stopped"
        time.sleep(0.002)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@pytest.fixture(scope="module")
def undisturbed(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of the store that a capture in one go makes."""
    run = make_run(tmp_path_factory.mktemp("undisturbed"), tiny_target, SAMPLES)
    finish(run)
    record = load_record(run.dir, "capture")
    assert record is not None
    assert record.counts["samples"] == len(SAMPLES)
    return record.output


def test_a_killed_capture_goes_on_to_the_same_store(tiny_target: Path, tmp_path: Path, undisturbed: str) -> None:
    run = make_run(tmp_path, tiny_target, SAMPLES)
    code, _ = stop_after(run, 3, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert load_record(run.dir, "capture") is None
    committed = StoreReader(run.store_url)
    kept = {path: path.stat().st_mtime_ns for path in Path(run.store_url, "shards").glob("0*.safetensors")}
    assert 3 <= len(kept) < committed.plan.shards

    code, errors = stop_after(run, 3, signal.SIGTERM)
    assert code == 143, errors
    assert "SIGTERM: finishing this batch" in errors
    assert f"next: eyas run {run.arguments}" in errors
    assert "Traceback" not in errors
    assert load_record(run.dir, "capture") is None

    finish(run)
    store = StoreReader(run.store_url)
    assert store.digest == undisturbed
    assert len(store.samples()) == len(SAMPLES)
    assert all(path.stat().st_mtime_ns == made for path, made in kept.items())  # committed shards were not made again
    assert not list(Path(run.store_url).rglob(".partial-*"))


def test_sigint_ends_with_130_and_says_what_is_kept(tiny_target: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, tiny_target, SAMPLES)
    code, errors = stop_after(run, 2, signal.SIGINT)
    assert code == 130, errors
    samples = len(StoreReader(run.store_url).samples())
    assert f"stopped; {samples} samples (" in errors
    assert samples < len(SAMPLES)
