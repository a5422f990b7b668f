"""Checkpoints: train/step-N/, whole or absent, enough to go on bit for bit.

drafter.json            shape of the drafter and its aux layers
model.safetensors       fp32 master weights, d2t, t2d
optimizer.safetensors   the optimizer's moments, fp32, by parameter name
state.json              step, samples consumed, and the inputs that the run was started with
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
from eyas.errors import TrainError


def latest(train_dir: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    found = [path for path in train_dir.glob("step-*") if path.name[5:].isdigit() and (path / "state.json").is_file()]
    return max(found, key=lambda path: int(path.name[5:]), default=None)


def save_checkpoint(
    train_dir: Path,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    keep: int,
    spare: Path | None = None,
) -> Path:
    """Write step-N durably (partial folder, fsync, rename) and drop the oldest beyond `keep`, `spare` excepted."""
    train_dir.mkdir(parents=True, exist_ok=True)
    final = train_dir / f"step-{state['step']}"
    partial = train_dir / f"{fs.PARTIAL_PREFIX}{final.name}"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    fs.write_json(partial / "drafter.json", asdict(drafter.config))
    save_file(
        {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}, partial / "model.safetensors"
    )
    save_file(_moments(drafter, optimizer), partial / "optimizer.safetensors")
    fs.write_json(partial / "state.json", state)
    fs.commit_folder(partial, final)
    for old in sorted(train_dir.glob("step-*"), key=lambda path: int(path.name[5:]))[:-keep]:
        if old != spare:
            shutil.rmtree(old)
    return final


def load_checkpoint(folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put a checkpoint's weights and moments in place; returns its state.

    Raises: TrainError where the checkpoint has other tensors than this drafter.
    """
    state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    device = next(drafter.parameters()).device
    try:
        drafter.load_state_dict(load_file(folder / "model.safetensors", device=str(device)))
    except RuntimeError as error:
        raise TrainError(f"{folder}: its weights do not fit this drafter: {error}", next=f"rm -r {folder}") from None
    moments = load_file(folder / "optimizer.safetensors", device=str(device))
    for name, parameter in drafter.named_parameters():
        own = {key.rpartition(".")[2]: value for key, value in moments.items() if key.rpartition(".")[0] == name}
        if own:
            optimizer.state[parameter] = own
    return state


def _moments(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Of all parameters that a step has moved: none before the first step that trained something."""
    return {
        f"{name}.{moment}": value.contiguous()
        for name, parameter in drafter.named_parameters()
        if parameter in optimizer.state
        for moment, value in optimizer.state[parameter].items()
    }
