"""Training by several processes, as torchrun starts them: two of them on this CPU, with gloo."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers_capture import make_run, random_samples
from helpers_ranks import (
    copy_of,
    environment,
    farthest,
    farthest_norm,
    finish,
    losses,
    ranks_of,
    recipe_of,
    torchrun,
    two_ranks,
    wait_for_checkpoint,
)

from eyas.data.tokens import sample_id
from eyas.drafter.saved import newest
from eyas.errors import Interrupted
from eyas.record import load_record
from eyas.run import Run
from eyas.stages import last_error, run_stage
from eyas.store.reader import StoreReader
from eyas.train import trainer as trainer_module
from eyas.train.batch import Schedule, StepPlan

LONG = {"epochs": "10"}
ENDLESS = {"epochs": "4000"}


@pytest.fixture(scope="module")
def captured(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a run whose capture and verify are finished.

    Every fourth sample has one supervised token, so it trains nothing: at 90 tokens it fills a row, and its rank has
    nothing to do.
    """
    folder = tmp_path_factory.mktemp("captured")
    samples = random_samples([90 if i % 4 == 0 else 20 + 3 * i % 41 for i in range(40)])
    for number in range(0, 40, 4):
        ids = samples[number].token_ids
        mask = np.arange(len(ids)) == 5
        samples[number] = replace(samples[number], loss_mask=mask, id=sample_id(ids, mask))
    run = make_run(folder, tiny_target, samples)
    run_stage(run, "capture")
    run_stage(run, "verify")
    return folder


@pytest.fixture(scope="module")
def straight(captured: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A LONG run trained by one process, without a stop."""
    run = copy_of(captured, tmp_path_factory.mktemp("straight") / "run", **LONG)
    run_stage(run, "train")
    return run


def test_two_processes_learn_what_one_does_bit_for_bit(captured: Path, tmp_path: Path, straight: Run) -> None:
    """Two rows a step, one each: one process adds their gradients in the same order."""
    run = copy_of(captured, tmp_path / "run", **LONG)
    told = finish(torchrun(run, **LONG))
    assert farthest(run, straight) == 0
    assert losses(run) == losses(straight)
    ours, theirs = (load_record(each.dir, "train") for each in (run, straight))
    assert ours is not None and theirs is not None
    assert ours.output == theirs.output and ours.counts["heldout"] == theirs.counts["heldout"]
    assert (ours.counts["processes"], theirs.counts["processes"]) == (2, 1)
    assert told.count("train: done") == 1, "rank 0 alone speaks"


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_unequal_shares_are_no_other_mean(captured: Path, tmp_path: Path, parallel: str) -> None:
    """Three rows a step: a rank is without one in each, and rows train nothing on either."""
    alone = copy_of(captured, tmp_path / "alone", accumulation="3")
    run_stage(alone, "train")
    run = copy_of(captured, tmp_path / "run")
    finish(torchrun(run, accumulation="3", parallel=parallel))
    assert farthest(run, alone) < 1e-6
    assert losses(run) == pytest.approx(losses(alone), abs=2e-5)


def test_sharded_weights_train_with_muon_and_a_frozen_head(captured: Path, tmp_path: Path) -> None:
    more = {"optimizer": "muon", "freeze_lm_head": "true", "epochs": "1"}
    alone = copy_of(captured, tmp_path / "alone", **more)
    run_stage(alone, "train")
    run = copy_of(captured, tmp_path / "run")
    finish(torchrun(run, parallel="fsdp", **more))
    # Muon makes each gradient orthogonal by products in bf16, which are rounded otherwise in shards.
    assert farthest_norm(alone, run) < 1e-2
    assert losses(run) == pytest.approx(losses(alone), abs=2e-3)


def test_a_run_goes_on_with_any_number_of_processes(captured: Path, tmp_path: Path, straight: Run) -> None:
    """Two that hold shards, then one, then two that hold all: each takes the very samples that come next."""
    run = copy_of(captured, tmp_path / "run", **LONG)
    process = torchrun(run, parallel="fsdp", **LONG)
    sharded = stop_after_a_checkpoint(run, process, lambda: process.send_signal(signal.SIGTERM))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        stop_at(sharded + 3, patch)
        run_stage(run, "train")
    alone = step_of(run)
    assert sharded < alone < load_counts(straight)["steps"]
    told = finish(torchrun(run, **LONG))
    plan = next(Schedule(StoreReader(run.store_url), run.recipe.train).from_step(alone))
    assert f"going on from step-{alone} of {load_counts(straight)['steps']}, after {plan.first_sample} samples" in told
    assert farthest(run, straight) < 1e-6
    assert losses(run) == pytest.approx(losses(straight), abs=2e-5)


def test_two_processes_resume_bit_for_bit(captured: Path, tmp_path: Path, straight: Run) -> None:
    """After a signal that reached only one of them, and after a kill that left a checkpoint half-written."""
    run = copy_of(captured, tmp_path / "run", **LONG)
    process = torchrun(run, **LONG)
    stop_after_a_checkpoint(run, process, lambda: ranks_of(process)[1].send_signal(signal.SIGTERM))
    torn = run.train_dir / ".partial-step-999"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    finish(torchrun(run, **LONG))
    assert farthest(run, straight) == 0
    assert losses(run) == losses(straight)
    assert not torn.exists()


def test_a_signal_saves_once_and_all_leave_alike(captured: Path, tmp_path: Path) -> None:
    """Each process gets it twice, as where a scheduler signals all of them and the launcher hands its own on."""
    run = copy_of(captured, tmp_path / "run", **ENDLESS)
    with two_ranks(run, **ENDLESS) as ranks:
        wait_for_checkpoint(run, ranks[0])
        for _ in range(2):
            for process in ranks:
                process.send_signal(signal.SIGTERM)
        told = [process.communicate(timeout=300)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [143, 143], told
    assert stopped_at(told[0]) == step_of(run)
    assert "next: torchrun --nproc-per-node 2 -m eyas train" in told[0]
    assert told[1].strip().splitlines()[-1].startswith("rank 1 stopped: train stopped after step")
    assert load_record(run.dir, "train") is None


def test_torchrun_ends_the_others_of_a_killed_process(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path / "run", **ENDLESS)
    process = torchrun(run, **ENDLESS)
    wait_for_checkpoint(run, process)
    ranks = ranks_of(process)
    ranks[1].kill()
    _, told = process.communicate(timeout=300)
    assert process.returncode != 0 and "exitcode  : -9" in told
    assert not any(rank.is_running() for rank in ranks)


def test_the_others_of_a_killed_process_say_so_and_leave(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path / "run", **ENDLESS)
    with two_ranks(run, **ENDLESS) as ranks:
        wait_for_checkpoint(run, ranks[0])
        ranks[1].kill()
        _, told = ranks[0].communicate(timeout=300)
        assert ranks[0].returncode == 1, told
    assert "no word from rank 1" in told and "goes on from the newest checkpoint" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_process_that_hangs_is_waited_for_so_long_and_no_longer(
    captured: Path, tmp_path: Path, parallel: str
) -> None:
    more = {**ENDLESS, "timeout_s": "3", "parallel": parallel}
    run = copy_of(captured, tmp_path / "run", **more)
    with two_ranks(run, **more) as ranks:
        wait_for_checkpoint(run, ranks[0])
        ranks[1].send_signal(signal.SIGSTOP)
        _, told = ranks[0].communicate(timeout=300)
        assert ranks[0].returncode == 1, told
    assert "no word from rank 1" in told and "train.timeout_s = 3 s" in told
    assert "Traceback" not in told


def test_what_stops_one_process_is_told_by_the_first(captured: Path, tmp_path: Path, straight: Run) -> None:
    """A damaged sample is met by the process that has it in its share; rank 0 names it, and `eyas status` too."""
    run = copy_of(captured, tmp_path / "run", **ENDLESS)
    run.train_dir.mkdir()
    shutil.copy(straight.train_dir / "target_argmax.safetensors", run.train_dir)
    reader = StoreReader(run.store_url)
    (row,) = next(Schedule(reader, run.recipe.train).from_step(0)).share(1, 2)
    assert row is not None
    sample = reader.rows.id(int(row[0]))
    damage(run, int(row[0]))
    with two_ranks(run, **ENDLESS) as ranks:
        told = [process.communicate(timeout=300)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [1, 3], told
    assert told[1].startswith("rank 1 stopped: ") and f"sample {sample} has checksum" in told[1]
    assert "rank 1 stopped: " in told[0] and f"sample {sample} has checksum" in told[0]
    error = last_error(run)
    assert error is not None and sample in error["error"]


def test_more_processes_than_rows_of_a_step_are_refused(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path / "run")
    with two_ranks(run, accumulation="1") as ranks:
        told = [process.communicate(timeout=300)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [2, 2], told
    assert "train.accumulation = 1: 1 packed rows a step for 2 processes" in told[0]
    assert "--set train.accumulation=2" in told[0]


def test_processes_with_other_recipes_are_refused(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path / "run")
    with two_ranks(run, others={"lr": "1e-4"}) as ranks:
        told = [process.communicate(timeout=300)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [1, 1], told
    assert "recipe, target or store of rank 1 differ from those of rank 0" in told[0]


def test_other_stages_refuse_to_run_as_several(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path / "run")
    for name in ("run", "capture", "evaluate"):
        words = [sys.executable, "-m", "eyas", name, recipe_of(run)]
        done = subprocess.run(words, env=environment() | {"WORLD_SIZE": "2"}, capture_output=True, text=True)
        assert done.returncode == 2
        assert f"eyas {name} was started as 2 processes" in done.stderr
        assert "torchrun --nproc-per-node 2 -m eyas train RECIPE" in done.stderr


def stop_after_a_checkpoint(run: Run, process: subprocess.Popen[str], stop: Callable[[], object]) -> int:
    """Stop a run of torchrun in its midst; the step it was saved after."""
    wait_for_checkpoint(run, process)
    stop()
    _, told = process.communicate(timeout=300)
    assert process.returncode != 0
    step = stopped_at(told)
    assert step == step_of(run)
    return step


def stop_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Have this process get a SIGTERM in that step."""
    original = trainer_module.Trainer._step

    def signalled(self: object, plan: StepPlan, *arguments: object) -> object:
        if plan.number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, plan, *arguments)  # type: ignore[arg-type]

    patch.setattr(trainer_module.Trainer, "_step", signalled)


def stopped_at(told: str) -> int:
    """The step that a stopped run says it was saved after; said once by rank 0."""
    found = re.findall(r"^error: train stopped after step (\d+) of", told, re.MULTILINE)
    assert len(found) == 1, told
    return int(found[0])


def step_of(run: Run) -> int:
    folder = newest(run.train_dir)
    assert folder is not None
    return int(folder.name[5:])


def load_counts(run: Run) -> dict[str, int]:
    record = load_record(run.dir, "train")
    assert record is not None
    return record.counts


def damage(run: Run, row: int) -> None:
    """Flip a byte of a sample's aux states."""
    reader = StoreReader(run.store_url)
    layout, _ = reader._map(int(reader.rows.shard[row]))
    tensor = next(each for each in reader.tensors if each.name == "aux_hidden_states")
    path = Path(run.store_url) / "shards" / f"{int(reader.rows.shard[row]):06d}.safetensors"
    raw = bytearray(path.read_bytes())
    raw[layout.starts[tensor.name] + int(reader.rows.first_token[row]) * tensor.row_bytes] ^= 1
    path.write_bytes(raw)
