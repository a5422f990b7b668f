"""logs/train.jsonl: one JSON object a line, drawn by the report.

{"step", "loss", "loss_per_step", "lr", "grad_norm", "tokens_per_s", "acceptance"}   every LOG_EVERY steps
{"step", "heldout": {"acceptance_length", "acceptance_per_position", "verifications"}}   every eval_every steps
"""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas import fs

LOG_EVERY = 10


class TrainLog:
    """Appends lines; opened at a step, it first drops what a killed run wrote beyond the checkpoint it goes on from."""

    def __init__(self, path: Path, from_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(path) if line["step"] <= from_step] if path.is_file() else []
        fs.write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "TrainLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, line: dict[str, Any]) -> None:
        """One whole line, handed to the kernel at once: a kill can cut only the line being written."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Make all lines durable (done with each checkpoint)."""
        os.fsync(self._file.fileno())


def read_log(path: Path) -> list[dict[str, Any]]:
    """All whole lines. A last line cut by a kill is left out: its step is repeated on resume."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]
