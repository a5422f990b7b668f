"""Checkpoints that training has saved, as all stages find and read them: train/step-N/, each whole or absent."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyas.drafter.eagle3 import Drafter, DrafterConfig
from eyas.errors import TrainError

SHAPE_FILE, WEIGHTS_FILE = "drafter.json", "model.safetensors"


def checkpoints(train_dir: Path) -> list[Path]:
    """All whole ones, the newest last. Other names that begin alike (`step-200.bak`) are somebody's own."""
    found = [path for path in train_dir.glob("step-*") if path.name[5:].isdigit() and (path / "state.json").is_file()]
    return sorted(found, key=step_of)


def newest(train_dir: Path) -> Path | None:
    """The newest whole one, or None."""
    return next(reversed(checkpoints(train_dir)), None)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps behind a checkpoint."""
    return int(checkpoint.name[5:])


def read_shape(checkpoint: Path) -> DrafterConfig:
    """A checkpoint's drafter.json. Raises TrainError where it is missing or isn't one."""
    path = checkpoint / SHAPE_FILE
    try:
        return DrafterConfig(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise _not_whole(path, "missing") from None
    except (ValueError, TypeError) as error:
        raise _not_whole(path, f"not readable: {error}") from None


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """A checkpoint's weights, fp32. Raises TrainError where the file is missing or cut."""
    path = checkpoint / WEIGHTS_FILE
    try:
        return load_file(path)
    except FileNotFoundError:
        raise _not_whole(path, "missing") from None
    except SafetensorError as error:
        raise _not_whole(path, f"not readable: {error}") from None


def load_drafter(checkpoint: Path) -> Drafter:
    """The drafter of a checkpoint, fp32, on the CPU.

    Raises: TrainError where a file is missing, cut, or of another drafter.
    """
    drafter = Drafter(read_shape(checkpoint))
    try:
        drafter.load_state_dict(read_weights(checkpoint))
    except RuntimeError as error:
        raise _not_whole(checkpoint / WEIGHTS_FILE, f"not the weights of {SHAPE_FILE}: {error}") from None
    return drafter


def _not_whole(path: Path, fault: str) -> TrainError:
    return TrainError(
        f"{path}: {fault}",
        expected="a whole checkpoint of the train stage",
        cause="files were moved or edited by hand, or come from another version of Eyas",
        next=f"rm -r {path.parent}   # then export takes the checkpoint before it, and train --redo makes it again",
    )
