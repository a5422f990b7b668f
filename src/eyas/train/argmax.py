"""The target's argmax at every supervised position, computed once for a store.

It needs the whole lm_head (V rows), the most costly product of training on a large vocabulary, and never changes:
4 bytes a position on disk save it in every later epoch and run.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas import fs
from eyas.drafter.align import IntArray
from eyas.progress import Progress
from eyas.run import Run
from eyas.store.reader import StoreReader
from eyas.tap.encode import decode
from eyas.train.parallel import Parallel

_ROWS = 1024  # x 49,152 logits in fp32 = 200 MB


def cache_path(run: Run, reader: StoreReader) -> Path:
    """Where the argmax is kept: beside a store that `store.url` names, for all runs on it; else, and where nothing can
    be written there or it is remote, with the run's checkpoints."""
    place = reader.files.root
    if run.recipe.store.url and not reader.files.remote and os.access(place.parent, os.W_OK):
        return place.with_name(f"{place.name}.argmax.safetensors")
    return run.train_dir / "target_argmax.safetensors"


class TargetArgmax:
    """int64 argmax of lm_head(final) for each stored sample."""

    def __init__(self, flat: Tensor, ends: IntArray) -> None:
        self._flat, self._ends = flat, ends

    def of(self, row: int) -> Tensor:
        """At the supervised positions of the sample in a row of the store's index, int64 [F]."""
        low = int(self._ends[row - 1]) if row else 0
        return self._flat[low : int(self._ends[row])].long()


def load_or_make(
    path: Path, reader: StoreReader, load_lm_head: Callable[[], Tensor], parallel: Parallel, logs_dir: Path
) -> TargetArgmax:
    """Read the cache if it belongs to this store, else compute it, each process a share, and keep it.

    Args:
        load_lm_head: the target's whole lm_head [V, H] in its checkpoint's dtype; asked for where there is no cache.
    """
    written = reader.written()
    counts = np.zeros(len(reader.rows), np.int64)
    counts[written] = reader.rows.supervised[written]
    ends = np.cumsum(counts)
    cached = _load(path, reader.digest)
    if parallel.add([cached is not None]) == [parallel.world]:
        assert cached is not None
        return TargetArgmax(cached, ends)
    flat = torch.zeros(int(ends[-1]), dtype=torch.int32)
    mine = written[parallel.rank :: parallel.world]
    total = int(counts[mine].sum())
    lm_head = _factor(load_lm_head())
    with torch.no_grad(), Progress("train (target argmax)", total, "positions", logs_dir) as progress:
        for row in mine.tolist():
            low = int(ends[row] - counts[row])
            values, scales = reader.encoded(row).final
            final = decode(values.to(lm_head.device), None if scales is None else scales.to(lm_head.device))
            for first in range(0, len(final), _ROWS):
                rows = final[first : first + _ROWS]
                flat[low + first : low + first + len(rows)] = _argmax(_logits(rows, lm_head))
            progress.advance(int(counts[row]))
    parallel.add_tensor(flat)
    if parallel.leads:
        partial = path.with_name(f"{fs.PARTIAL_PREFIX}{path.name}.{os.getpid()}")  # other runs may make it too
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"argmax": flat}, partial, metadata={"store": reader.digest})
        fs.commit_file(partial, path)
    return TargetArgmax(flat, ends)


def _load(path: Path, store_digest: str) -> Tensor | None:
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as handle:
        if (handle.metadata() or {}).get("store") != store_digest:
            return None
        flat: Tensor = handle.get_tensor("argmax")
        return flat


def _factor(lm_head: Tensor) -> Tensor:
    """lm_head in the dtype that it is multiplied in: at least fp32, but bf16 as it is on a GPU."""
    as_it_is = lm_head.is_cuda and lm_head.dtype == torch.bfloat16
    return lm_head if as_it_is else lm_head.to(torch.promote_types(lm_head.dtype, torch.float32))


def _logits(rows: Tensor, lm_head: Tensor) -> Tensor:
    """bf16 states [n, H] -> logits [n, V], at least fp32.

    Products of two bf16 numbers are exact in fp32 and are summed up there; from bf16 factors tensor cores make them,
    ten times as fast as from fp32 ones.
    """
    if rows.is_cuda and lm_head.dtype == rows.dtype:
        return torch.mm(rows, lm_head.T, out_dtype=torch.float32)
    return rows.to(lm_head.dtype) @ lm_head.T


def _argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit of each row, on the CPU. numpy's is vectorised there, torch's is not (0.15 G/s)."""
    if logits.is_cuda:
        return logits.argmax(-1).cpu()
    return torch.from_numpy(logits.numpy().argmax(-1))
