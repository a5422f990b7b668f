"""Training on a tiny random target: it learns, resumes bit for bit, survives kills, and refuses what changed."""

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers_capture import make_run, random_samples
from safetensors.torch import load_file
from torch import Tensor

from eyas import checkpoint as target_checkpoint
from eyas.data.tokens import sample_id
from eyas.drafter.align import IntArray
from eyas.drafter.saved import newest
from eyas.errors import Interrupted, RecipeError, TrainError
from eyas.record import load_record
from eyas.run import Run
from eyas.stages import run_stage
from eyas.target import Target
from eyas.train import trainer as trainer_module
from eyas.train.feed import Row, RowMaker
from eyas.train.log import read_log
from eyas.train.step import Learner
from eyas.train.watch import Anomaly

SETTINGS = ["train.draft_vocab_size=200", "train.epochs=3", "train.batch_tokens=128", "train.ttt_steps=3"]
SETTINGS += [
    "train.lr=3e-3",
    "train.device=cpu",
    "train.precision=fp32",
    "train.checkpoint_every=4",
    "train.eval_every=8",
]


@pytest.fixture(scope="module")
def captured(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a run whose capture and verify are finished."""
    folder = tmp_path_factory.mktemp("captured")
    run = make_run(folder, tiny_target, random_samples([20 + 3 * i % 41 for i in range(40)]), overrides=SETTINGS)
    run_stage(run, "capture")
    run_stage(run, "verify")
    return folder


def copy_of(captured: Path, folder: Path, *more: str) -> Run:
    """An own copy of the captured run."""
    from eyas.run import open_run

    shutil.copytree(captured / "runs", folder / "runs")
    text = (captured / "recipe.toml").read_text().replace(str(captured), str(folder))
    (folder / "recipe.toml").write_text(text)
    return open_run(folder / "recipe.toml", [*SETTINGS, *more])


def weights(run: Run) -> dict[str, torch.Tensor]:
    folder = newest(run.train_dir)
    assert folder is not None
    return load_file(folder / "model.safetensors")


def losses(run: Run) -> list[float]:
    return [line["loss"] for line in read_log(run.logs_dir / "train.jsonl") if "loss" in line]


def test_training_learns_and_leaves_a_record(captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "LOG_EVERY", 1)
    run = copy_of(captured, tmp_path, "train.epochs=16")
    record = run_stage(run, "train")
    epoch = record.counts["steps"] // 16
    assert sum(losses(run)[-epoch:]) < 0.9 * sum(losses(run)[:epoch])
    assert record.counts["steps"] == max(line["step"] for line in read_log(run.logs_dir / "train.jsonl"))
    assert record.counts["heldout"]["verifications"] > 0
    assert {"drafter.json", "model.safetensors", "optimizer.safetensors", "state.json"} == {
        path.name for path in (run.train_dir / record.counts["checkpoint"]).iterdir()
    }
    masters = weights(run)
    assert all(tensor.dtype == torch.float32 for name, tensor in masters.items() if name not in ("d2t", "t2d"))


def test_golden_losses(captured: Path, tmp_path: Path) -> None:
    """A change of code that is no change of maths leaves these numbers alone (torch 2.13, fp32, CPU)."""
    run = copy_of(captured, tmp_path)
    run_stage(run, "train")
    assert losses(run) == pytest.approx(GOLDEN, rel=2e-4)


def test_the_targets_lm_head_does_not_stay_in_memory(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny target's is not tied to its embedding, which has to stay."""
    heads, alive = [], []
    original, step = target_checkpoint.read_float, trainer_module.Trainer._step

    def loaded(target: Target, part: target_checkpoint.Part) -> Tensor:
        tensor = original(target, part)
        if part == "lm_head":
            heads.append(weakref.ref(tensor))
        return tensor

    def looking(self: object, *arguments: object) -> object:
        gc.collect()
        alive.extend(ref for ref in heads if ref() is not None)
        return step(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(target_checkpoint, "read_float", loaded)
    monkeypatch.setattr(trainer_module.Trainer, "_step", looking)
    run_stage(copy_of(captured, tmp_path, "train.epochs=1"), "train")
    assert heads and not alive


GOLDEN = [9.10329, 12.07803, 9.86664, 10.54884]


class Stopped(Exception):
    """Stands for a kill right after a step."""


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the trainer die after so many steps of this process."""
    done = 0
    original = trainer_module.Trainer._step

    def counted(self: object, *arguments: object) -> object:
        nonlocal done
        if done == step:
            raise Stopped
        done += 1
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer_module.Trainer, "_step", counted)


@pytest.mark.parametrize("after", [1, 6, 9])
def test_resume_is_bit_equal(captured: Path, tmp_path: Path, after: int) -> None:
    straight = copy_of(captured, tmp_path / "straight")
    run_stage(straight, "train")
    broken = copy_of(captured, tmp_path / "broken")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(after, patch)
        run_stage(broken, "train")
    run_stage(broken, "train")
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(broken)[name]), name
    assert losses(straight) == losses(broken)
    first, second = (load_record(run.dir, "train") for run in (straight, broken))
    assert first is not None and second is not None and first.output == second.output
    assert first.counts["tokens"] == second.counts["tokens"] > 0


def test_a_kill_between_the_last_checkpoint_and_the_record_costs_no_figure(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path)
    whole = run_stage(run, "train")
    (run.dir / "records" / "train.json").unlink()
    again = run_stage(run, "train")
    assert again.output == whole.output
    for name in ("steps", "tokens", "heldout", "checkpoint"):
        assert again.counts[name] == whole.counts[name], name


def command(run: Run, folder: Path, *more: str) -> Sequence[str]:
    options = [part for text in [*SETTINGS, *more] for part in ("--set", text)]
    return [sys.executable, "-m", "eyas", "train", str(folder / "recipe.toml"), *options]


def wait_for(condition, process: subprocess.Popen, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else what
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


LONG = "train.epochs=200"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(captured: Path, tmp_path: Path, number: signal.Signals) -> None:
    run = copy_of(captured, tmp_path, LONG)
    process = subprocess.Popen(command(run, tmp_path, LONG), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: newest(run.train_dir) is not None, process, "no checkpoint came")
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number, told
    stopped = re.search(r"train stopped after step (\d+) of", told)
    assert stopped, told
    assert newest(run.train_dir) == run.train_dir / f"step-{stopped[1]}"
    assert "next: eyas run" in told
    assert load_record(run.dir, "train") is None


def test_kill_9_in_training_then_run_again_gives_the_same_drafter(captured: Path, tmp_path: Path) -> None:
    straight = copy_of(captured, tmp_path / "straight", "train.epochs=20")
    run_stage(straight, "train")
    killed = copy_of(captured, tmp_path / "killed", "train.epochs=20")
    for checkpoint in (8, 24):
        # Equal bits need equal threads: sums are split among them.
        threads = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        words = command(killed, tmp_path / "killed", "train.epochs=20")
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=threads)
        wait_for(
            lambda least=checkpoint: (found := newest(killed.train_dir)) is not None and int(found.name[5:]) >= least,
            process,
            "no checkpoint came",
        )
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    run_stage(killed, "train")
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(killed)[name]), name
    assert losses(straight) == losses(killed)


def test_unfinished_training_refuses_another_recipe(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(5, patch)
        run_stage(run, "train")
    from eyas.run import open_run

    changes = {
        "train.lr=1e-5": "train.lr was 0.003 and is now 1e-05",
        # Shapes of the drafter too: nothing asks to delete a checkpoint that is good.
        "train.draft_vocab_size=150": "train.draft_vocab_size was 200 and is now 150",
        "drafter.intermediate_size=64": "drafter.intermediate_size was 0 and is now 64",
    }
    for change, told in changes.items():
        with pytest.raises(TrainError) as error:
            run_stage(open_run(tmp_path / "recipe.toml", [*SETTINGS, change]), "train")
        assert told in str(error.value)
        assert "--redo" in error.value.next
    assert newest(run.train_dir) is not None, "nothing is lost"


def test_finished_training_is_skipped_and_refuses_another_recipe(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path)
    first = run_stage(run, "train")
    assert run_stage(run, "train") == first
    from eyas.run import open_run

    with pytest.raises(RecipeError, match=r"train.ttt_steps was 3 and is now 2"):
        run_stage(open_run(tmp_path / "recipe.toml", [*SETTINGS, "train.ttt_steps=2"]), "train")


def test_a_loss_that_is_not_finite_stops_and_names_the_samples(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy_of(captured, tmp_path)
    original = RowMaker.row

    def poisoned(self: RowMaker, samples: IntArray) -> Row:
        row = original(self, samples)
        row.pack.aux[3, 5] = float("nan")
        return row

    monkeypatch.setattr(RowMaker, "row", poisoned)
    with pytest.raises(TrainError) as error:
        run_stage(run, "train")
    assert "step 1: loss nan" in str(error.value)
    assert re.search(r"samples [0-9a-f]{32}", str(error.value))


def test_a_card_that_is_too_small_is_told_in_words(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other processes of a run get words too: an EyasError is what they are told."""

    def too_much(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.\nmore")

    monkeypatch.setattr(Learner, "step", too_much)
    with pytest.raises(TrainError) as error:
        run_stage(copy_of(captured, tmp_path), "train")
    assert "out of memory with packed rows of 128 tokens (CUDA out of memory. Tried to alloc" in error.value.seen
    for key in ("train.recompute=true", "train.parallel=fsdp", "--redo --set train.batch_tokens=64 (starts again)"):
        assert key in error.value.next


def test_folders_of_the_users_own_beside_the_checkpoints_are_left_alone(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path, "train.keep_checkpoints=1")
    for name in ("step-200.bak", "step-old", "step-99"):  # the last is empty: nothing that training wrote
        (run.train_dir / name).mkdir(parents=True)
    run_stage(run, "train")
    record = load_record(run.dir, "train")
    assert record is not None
    kept = {path.name for path in run.train_dir.glob("step-*")}
    assert kept == {"step-200.bak", "step-old", "step-99", record.counts["checkpoint"]}


class Following:
    """A second process, whose first one has saved the weights already, or not yet."""

    leads = False

    def __init__(self, first_saw: int) -> None:
        self.first_saw = first_saw

    def add(self, values: Sequence[int]) -> list[int]:
        return [values[0] + self.first_saw]


@pytest.mark.parametrize("first_saw", [0, 1])
def test_the_first_process_decides_whether_the_weights_before_an_anomaly_are_saved(
    tmp_path: Path, first_saw: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow process looks when the first one may be done saving; were it to leave then, the save would hang."""
    (tmp_path / "step-3").mkdir()
    trainer = object.__new__(trainer_module.Trainer)
    trainer.run = SimpleNamespace(train_dir=tmp_path, command=lambda *words: "eyas")  # type: ignore[assignment]
    trainer.parallel = Following(first_saw)  # type: ignore[assignment]
    trainer.schedule = SimpleNamespace(samples_before=lambda step: 9)  # type: ignore[assignment]
    trainer.reader = trainer.rows = trainer.learner = None  # type: ignore[assignment]
    saved: list[object] = []
    monkeypatch.setattr(trainer_module, "anomaly_told", lambda *words: TrainError("told"))
    monkeypatch.setattr(trainer_module.Trainer, "_save", lambda self, *words: saved.append(words))
    with pytest.raises(TrainError, match="told"):
        trainer._refuse_anomaly(Anomaly(3, float("nan"), 1.0, ["0"]))
    assert saved == ([] if first_saw else [(3, 9)])


def test_status_and_log_are_whole_lines_after_a_kill(captured: Path, tmp_path: Path) -> None:
    """A line cut by a kill is dropped and written again, never half kept."""
    run = copy_of(captured, tmp_path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(9, patch)
        run_stage(run, "train")
    log = run.logs_dir / "train.jsonl"
    log.write_text(log.read_text() + '{"step": 9, "loss": 1.')
    run_stage(run, "train")
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == sorted(
        line["step"] for line in read_log(log)
    )


def test_interrupted_is_no_error_of_the_run(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        original = trainer_module.Trainer._step

        def signalled(self: object, *arguments: object) -> object:
            os.kill(os.getpid(), signal.SIGTERM)
            return original(self, *arguments)  # type: ignore[arg-type]

        patch.setattr(trainer_module.Trainer, "_step", signalled)
        with pytest.raises(Interrupted) as stopped:
            run_stage(run, "train")
    assert stopped.value.exit_code == 143
    assert not (run.logs_dir / "last_error.json").exists()


def test_samples_that_train_nothing_neither_break_nor_move_anything(tiny_target: Path, tmp_path: Path) -> None:
    """The longest packs hold one sample each, and those have one supervised token: steps of nothing."""
    samples = random_samples([20 + i % 5 for i in range(12)])
    lone = [
        replace(sample, loss_mask=np.arange(len(sample.token_ids)) == 5) for sample in random_samples([127] * 6, seed=9)
    ]
    lone = [replace(sample, id=sample_id(sample.token_ids, sample.loss_mask)) for sample in lone]
    run = make_run(tmp_path, tiny_target, samples, overrides=SETTINGS)
    for stage in ("capture", "verify", "train"):
        run_stage(run, stage)
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values() if tensor.is_floating_point())
