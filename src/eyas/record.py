"""Stage records: what a finished stage read, what it counted, and the proof that lets a second run skip it.

A record is the last thing a stage writes. It holds the stage's inputs as flat key -> value pairs; a later run with
equal inputs skips the stage, and one with other inputs is refused, naming the first key that differs.
"""

import json
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from eyas import __version__, fs
from eyas.errors import RecipeError

Inputs = dict[str, Any]
_PACKAGES = ("torch", "transformers", "safetensors", "numpy", "pyarrow")


@dataclass(frozen=True)
class Record:
    """One finished stage.

    Attributes:
        stage: its name.
        inputs: flat JSON-able pairs that the result depends on (recipe values, digests of files read).
        output: digest of what it wrote; the next stage has it among its inputs.
        counts: figures for people and the report.
        duration_s: wall time, seconds.
        finished: UTC time, ISO 8601.
        versions: Eyas, Python and the packages that compute.
    """

    stage: str
    inputs: Inputs
    output: str
    counts: dict[str, Any]
    duration_s: float
    finished: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Versions of Eyas, Python and the packages that compute, for records and reports."""
    return {"eyas": __version__, "python": platform.python_version()} | {
        name: metadata.version(name) for name in _PACKAGES
    }


def record_path(run_dir: Path, stage: str) -> Path:
    return run_dir / "records" / f"{stage}.json"


def save_record(run_dir: Path, record: Record) -> None:
    finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    fs.write_json(record_path(run_dir, record.stage), asdict(record) | {"finished": finished, "versions": versions()})


def load_record(run_dir: Path, stage: str) -> Record | None:
    """The record of a finished stage, or None where it hasn't finished."""
    path = record_path(run_dir, stage)
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise RecipeError(
            f"{path}: not a stage record ({error})",
            cause="edited by hand, or written by another version of Eyas",
            next=f"rm {path}   # then run again: the stage is checked and redone, other stages are kept",
        ) from None


def changed_input(record: Record, inputs: Inputs) -> str:
    """Words for the first input that differs from the record's, or "" where all are equal."""
    for key in sorted(record.inputs.keys() | inputs.keys()):
        was, now = record.inputs.get(key), inputs.get(key)
        if was != now:
            return f"{key} was {_short(was)} and is now {_short(now)}"
    return ""


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 90 else f"{text[:60]}... (digest {fs.digest(text)[:8]})"
