"""logs/train.jsonl: one JSON object a line, drawn by the report; logs/tensorboard/ beside it where the recipe asks.

every LOG_EVERY steps   {"step", "tokens_per_s", "first_step_s", "memory_gib", "mfu", "data_wait", "loss",
                         "loss_per_step", "acceptance", "grad_norm", "lr"}; "mfu" where the device's peak is known
every eval_every steps  {"step", "heldout": {"acceptance_length", "acceptance_per_position", "verifications"}}

`mfu` is of the vendor's dense bf16 rate (eyas.train.flops). Lists are by step k of the training-time test, or by draft
position.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas import fs
from eyas.errors import TrainError

LOG_EVERY = 10


class TrainLog:
    """Appends lines; opened at a step, it first drops what a killed run wrote beyond the checkpoint it goes on from.

    Args:
        logs_dir: the run's logs/.
        from_step: finished steps.
        tensorboard: write TensorBoard's event files too.
    """

    def __init__(self, logs_dir: Path, from_step: int, *, tensorboard: bool = False) -> None:
        logs_dir.mkdir(parents=True, exist_ok=True)
        path = logs_dir / "train.jsonl"
        kept = [line for line in read_log(path) if line["step"] <= from_step] if path.is_file() else []
        fs.write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._events = _event_writer(logs_dir / "tensorboard", from_step) if tensorboard else None
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "TrainLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, line: dict[str, Any]) -> None:
        """One whole line, handed to the kernel at once: a kill can cut only the line being written."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in scalars(line):
                self._events.add_scalar(name, value, line["step"])

    def sync(self) -> None:
        """Make all lines durable (done with each checkpoint)."""
        os.fsync(self._file.fileno())
        if self._events is not None:
            self._events.flush()


def scalars(line: dict[str, Any], prefix: str = "train") -> Iterator[tuple[str, float]]:
    """A line's numbers by TensorBoard name: lists as NAME/0, NAME/1..., the held-out ones under heldout/."""
    for key, value in line.items():
        if isinstance(value, dict):
            yield from scalars(value, key)
        elif isinstance(value, list):
            yield from ((f"{prefix}/{key}/{k}", float(each)) for k, each in enumerate(value))
        elif isinstance(value, int | float) and key != "step":
            yield f"{prefix}/{key}", float(value)


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole lines. A last line cut by a kill is left out: its step is repeated on resume."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def _event_writer(folder: Path, from_step: int) -> Any:
    """TensorBoard's writer; what an earlier process wrote beyond `from_step` is taken back."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise TrainError(
            f"train.tensorboard = true, but {error.name} is not installed",
            next="pip install 'eyas[tensorboard]', or --set train.tensorboard=false: logs/train.jsonl has it all",
        ) from None
    return SummaryWriter(str(folder), purge_step=from_step + 1)
