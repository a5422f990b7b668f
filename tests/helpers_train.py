"""A captured run with a tiny target, and copies of it to train in."""

import shutil
from pathlib import Path

import torch
from helpers_capture import make_run, random_samples
from safetensors.torch import load_file

from eyas.drafter.saved import newest
from eyas.run import Run, open_run
from eyas.stages import run_stage
from eyas.train.log import read_log

SETTINGS = [
    "train.draft_vocab_size=200",
    "train.epochs=3",
    "train.batch_tokens=128",
    "train.ttt_steps=3",
    "train.lr=3e-3",
    "train.device=cpu",
    "train.precision=fp32",
    "train.checkpoint_every=4",
    "train.eval_every=8",
]


def capture_run(folder: Path, target: Path, count: int = 40) -> Path:
    """A folder with a recipe and a run whose capture and verify are finished."""
    run = make_run(folder, target, random_samples([20 + 3 * i % 41 for i in range(count)]), overrides=SETTINGS)
    run_stage(run, "capture")
    run_stage(run, "verify")
    return folder


def copy_of(captured: Path, folder: Path, *more: str) -> Run:
    """An own copy of a captured run, with these settings on top."""
    shutil.copytree(captured / "runs", folder / "runs")
    text = (captured / "recipe.toml").read_text().replace(str(captured), str(folder))
    (folder / "recipe.toml").write_text(text)
    return open_run(folder / "recipe.toml", [*SETTINGS, *more])


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    folder = newest(run.train_dir)
    assert folder is not None
    return load_file(folder / "model.safetensors")


def losses(run: Run) -> list[float]:
    """As logged."""
    return [line["loss"] for line in read_log(run.logs_dir / "train.jsonl") if "loss" in line]
