"""speculators' format since 0.5: an Arrow data set of ids and masks, and hidden_states/hs_{row}.safetensors.

Each safetensors file has hidden_states [T, 4, H], three aux layers and the final state before the target's last norm,
and token_ids [T]; from 0.9 perhaps in float8 with hidden_states_scales [T, 1, 1]. Layer ids mean what ours mean.
The Arrow files are read and written with pyarrow: they are plain IPC streams, listed in state.json.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eyas import fs
from eyas.errors import StoreError
from eyas.store.convert.peer import BadFile, Conventions, Head, Heads, Sink, Source, check_head, check_layers
from eyas.store.convert.torch_files import save

CONVENTIONS = Conventions("speculators", "speculators 0.5 and later (Arrow, hs_{row}.safetensors)", 0, "pre_norm")
_STATES, _SCALES = "hidden_states", "hidden_states_scales"
_ARROW, _STATE, _INFO, _COUNTS = "data-00000-of-00001.arrow", "state.json", "dataset_info.json", "token_freq.pt"
_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())])
_BATCH = 1000


class SpeculatorsSource(Source):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._batches = list(_batches(folder))
        self._starts = np.cumsum([0, *(len(batch) for batch in self._batches)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def path(self, row: int) -> Path:
        return self._folder / _STATES / f"hs_{row}.safetensors"

    def head(self, row: int) -> Head:
        path = self.path(row)
        if not path.is_file():
            raise BadFile(path, "no hidden states", "the data set has this row, but it was not captured")
        ids, mask = self._column(row, "input_ids"), self._column(row, "loss_mask")
        with _open(path) as handle:
            shape = handle.get_slice(_STATES).get_shape()
        if len(shape) != 3 or shape[0] != len(ids):
            raise BadFile(path, "states don't fit the tokens", f"{len(ids)} tokens, {_STATES} {shape}")
        check_layers(path, shape[1] - 1)
        return check_head(path, ids, mask, shape[2])

    def states(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        path = self.path(row)
        with _open(path) as handle:
            states, ids = handle.get_tensor(_STATES), handle.get_tensor("token_ids")
            scales = handle.get_tensor(_SCALES) if _SCALES in handle.keys() else None  # noqa: SIM118
        if not torch.equal(ids.to(torch.int64), self._column(row, "input_ids").to(torch.int64)):
            raise BadFile(path, "token ids differ from the data set's")
        if scales is not None:
            states = states.float() * scales.float()
        return states[:, :-1], states[:, -1]

    def _column(self, row: int, name: str) -> torch.Tensor:
        batch = int(np.searchsorted(self._starts, row, side="right")) - 1
        cell = self._batches[batch].column(name)[row - int(self._starts[batch])]
        return torch.from_numpy(np.array(cell.values.to_numpy(zero_copy_only=False)))


class SpeculatorsSink(Sink):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokens: dict[int, tuple[Any, Any]] = {}  # rows that wait for those before them
        self._guard, self._next = threading.Lock(), 0
        self._partial = folder / f"{fs.PARTIAL_PREFIX}{_ARROW}"
        fs.make_folder(folder / _STATES)
        self._writer = pa.ipc.new_stream(pa.OSFile(str(self._partial), "wb"), _SCHEMA)
        self._rows: list[tuple[Any, Any]] = []

    def write(self, row: int, ids: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> None:
        path = self._folder / _STATES / f"hs_{row}.safetensors"
        if not path.exists():
            partial = path.with_name(f"{fs.PARTIAL_PREFIX}{os.getpid()}-{path.name}")
            states = torch.cat([aux, final.unsqueeze(1)], 1)
            save_file({_STATES: states, "token_ids": ids}, partial)
            fs.commit_file(partial, path)
        with self._guard:
            self._tokens[row] = (ids.numpy(), mask.numpy())
            while self._next in self._tokens:
                self._rows.append(self._tokens.pop(self._next))
                self._next += 1
            if len(self._rows) >= _BATCH:
                self._flush()

    def finish(self, heads: Heads) -> None:
        """The Arrow file and its two JSON files, and the counts of supervised tokens (token_freq.pt)."""
        self._flush()
        self._writer.close()
        fs.commit_file(self._partial, self._folder / _ARROW)
        state: dict[str, Any] = {
            "_data_files": [{"filename": _ARROW}],
            "_fingerprint": fs.digest_json(heads.lengths)[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        }
        counts = {int(token): int(heads.token_counts[token]) for token in np.flatnonzero(heads.token_counts)}
        save(self._folder / _COUNTS, counts)
        fs.write_json(self._folder / _INFO, {"citation": "", "description": "", "homepage": "", "license": ""})
        fs.write_json(self._folder / _STATE, state)

    def _flush(self) -> None:
        if self._rows:
            ids, masks = zip(*self._rows, strict=True)
            columns = [pa.array(ids, _SCHEMA.field(0).type), pa.array(masks, _SCHEMA.field(1).type)]
            lengths = pa.array([len(row) for row in ids], pa.int64())
            self._writer.write_batch(pa.record_batch([*columns, lengths], schema=_SCHEMA))
            self._rows = []


def _batches(folder: Path) -> list[Any]:
    """Record batches of the data set, mapped."""
    path = folder / _STATE
    if not path.is_file():
        return []
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in state["_data_files"]]
        batches: list[Any] = []
        for name in names:
            with pa.ipc.open_stream(pa.memory_map(str(folder / name))) as stream:
                batches += [batch for batch in stream if len(batch)]
    except (ValueError, KeyError, TypeError, OSError, pa.ArrowException) as error:
        raise StoreError(
            f"{folder}: not a whole data set: {error}",
            expected="state.json and the Arrow files that it lists, as `speculators prepare-data` writes them",
        ) from None
    missing = {"input_ids", "loss_mask"} - set(batches[0].schema.names if batches else ())
    if missing or state.get("_indices_data_files"):
        raise StoreError(
            f"{folder}: no column {', '.join(sorted(missing))}" if missing else f"{folder}: rows picked by an index",
            expected="the data set as `speculators prepare-data` writes it",
        )
    return batches


def _open(path: Path) -> Any:
    try:
        handle = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BadFile(path, "unreadable", str(error), expected="a whole safetensors file") from None
    missing = {_STATES, "token_ids"} - set(handle.keys())
    if missing:
        raise BadFile(path, f"no {', '.join(sorted(missing))}")
    return handle
