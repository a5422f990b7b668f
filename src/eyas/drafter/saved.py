"""Checkpoints that training has saved, as all stages find them: train/step-N/, each whole or absent."""

from pathlib import Path


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
