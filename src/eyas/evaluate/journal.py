"""Finished measurements, one JSON line each, so that a call that was stopped goes on where it was."""

import json
import os
from pathlib import Path
from typing import Any

from eyas import fs

JOURNAL = "journal.jsonl"


class Journal:
    """Results by unit of work. A line is durable before `add` returns; a torn last line is dropped.

    Args:
        path: the file. One of another key is begun anew: its results are of other settings.
        key: digest of all that the results depend on.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self._found = path, dict[str, Any]()
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        if not lines or json.loads(lines[0]) != {"key": key}:
            lines = [json.dumps({"key": key}).encode()]
        # Rewritten, so that what a kill tore off doesn't run into the next line.
        fs.write_atomic(path, b"".join(line + b"\n" for line in lines))
        for line in lines[1:]:
            entry = json.loads(line)
            self._found[fs.digest_json(entry["unit"])] = entry["result"]

    def __len__(self) -> int:
        return len(self._found)

    def get(self, unit: Any) -> Any:
        """What was measured of a unit (JSON-able), or None."""
        return self._found.get(fs.digest_json(unit))

    def add(self, unit: Any, result: Any) -> None:
        line = json.dumps({"unit": unit, "result": result}, separators=(",", ":"), ensure_ascii=False)
        with self.path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._found[fs.digest_json(unit)] = result
