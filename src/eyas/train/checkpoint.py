"""Checkpoints: train/step-N/, whole or absent, enough to go on bit for bit, with any number of processes.

drafter.json            shape of the drafter and its aux layers
model.safetensors       fp32 master weights, d2t, t2d
optimizer.safetensors   the optimizer's moments, fp32, by parameter name
state.json              step, samples consumed, and the inputs that the run was started with

Tensors are whole, whatever shards the processes hold: rank 0 gathers them one by one and writes. A drafter is one
layer (1.7 GB in fp32 at 8B shape, its moments twice that): one file is soon written, is what evaluation and export
read, and fits any number of processes. torch.distributed.checkpoint would write a file for each process with a pickled
index, and no stage reads pickles.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eyas import fs
from eyas.drafter.eagle3 import Drafter
from eyas.drafter.saved import SHAPE_FILE, WEIGHTS_FILE, checkpoints, read_weights
from eyas.errors import TrainError
from eyas.train.parallel import Parallel


def sweep(train_dir: Path) -> None:
    """Remove what a kill left half-written."""
    for path in train_dir.glob(f"{fs.PARTIAL_PREFIX}*"):
        shutil.rmtree(path) if path.is_dir() else fs.remove(path)


def save_checkpoint(
    train_dir: Path,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    parallel: Parallel,
    *,
    keep: int,
    spare: Path | None = None,
) -> None:
    """Write step-N durably (partial folder, fsync, rename) and drop the oldest beyond `keep`, `spare` excepted.

    All processes call; when they return it is there.
    """
    weights = _gather(drafter.state_dict(), parallel)
    moments = _gather(_moments(drafter, optimizer), parallel)
    if parallel.leads:
        train_dir.mkdir(parents=True, exist_ok=True)
        final = train_dir / f"step-{state['step']}"
        partial = train_dir / f"{fs.PARTIAL_PREFIX}{final.name}"
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir()
        fs.write_json(partial / SHAPE_FILE, asdict(drafter.config))
        save_file(weights, partial / WEIGHTS_FILE)
        save_file(moments, partial / "optimizer.safetensors")
        fs.write_json(partial / "state.json", state)
        fs.commit_folder(partial, final)
        for old in checkpoints(train_dir)[:-keep]:
            if old != spare:
                shutil.rmtree(old)
    parallel.wait()


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it, as `save_checkpoint` was given it."""
    return dict(json.loads((folder / "state.json").read_text(encoding="utf-8")))


def load_checkpoint(folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer, parallel: Parallel) -> None:
    """Put a checkpoint's weights and moments in place, each process its shards of them.

    Raises: TrainError where the checkpoint has other tensors than this drafter.
    """
    own = drafter.state_dict()
    weights = read_weights(folder)
    try:
        drafter.load_state_dict({name: parallel.like(value, own.get(name, value)) for name, value in weights.items()})
    except RuntimeError as error:
        raise TrainError(f"{folder}: its weights do not fit this drafter: {error}", next=f"rm -r {folder}") from None
    moments = load_file(folder / "optimizer.safetensors")
    for name, parameter in drafter.named_parameters():
        parts = {key.rpartition(".")[2]: value for key, value in moments.items() if key.rpartition(".")[0] == name}
        if parts:
            optimizer.state[parameter] = {key: parallel.like(value, parameter) for key, value in parts.items()}


def _gather(tensors: dict[str, torch.Tensor], parallel: Parallel) -> dict[str, torch.Tensor]:
    """The whole of each tensor, in host memory; empty on processes that do not write."""
    whole = {}
    for name, tensor in tensors.items():
        full = parallel.full(tensor)  # by all processes, one tensor at a time
        if parallel.leads:
            whole[name] = full.cpu().contiguous()
    return whole


def _moments(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Of all parameters that a step has moved: none before the first step that trained something."""
    return {
        f"{name}.{moment}": value
        for name, parameter in drafter.named_parameters()
        if parameter in optimizer.state
        for moment, value in optimizer.state[parameter].items()
    }
