"""The target's argmax at every supervised position, computed once for a store.

It needs the whole lm_head (V rows), the most costly product of training on a large vocabulary, and never changes:
4 bytes a position on disk save it in every later epoch and run.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from eyas import fs
from eyas.drafter.target import TargetHead
from eyas.progress import Progress
from eyas.store.reader import StoreReader

_ROWS = 1024  # x 49,152 logits in fp32 = 200 MB


class TargetArgmax:
    """int64 argmax of lm_head(final) for each stored sample."""

    def __init__(self, flat: Tensor, offsets: dict[str, tuple[int, int]]) -> None:
        self._flat, self._offsets = flat, offsets

    def of(self, sample_id: str) -> Tensor:
        """At the sample's supervised positions, int64 [F]."""
        low, high = self._offsets[sample_id]
        return self._flat[low:high].long()


def load_or_make(path: Path, reader: StoreReader, head: TargetHead, logs_dir: Path) -> TargetArgmax:
    """Read the cache if it belongs to this store, else compute and keep it."""
    offsets, position = {}, 0
    for ref in reader.samples():
        offsets[ref.sample_id] = (position, position + ref.supervised)
        position += ref.supervised
    if path.is_file():
        with safe_open(path, framework="pt") as handle:
            if (handle.metadata() or {}).get("store") == reader.digest:
                return TargetArgmax(handle.get_tensor("argmax"), offsets)
    flat = torch.empty(position, dtype=torch.int32)
    with torch.no_grad(), Progress("train (target argmax)", position, "positions", logs_dir) as progress:
        for sample_id, (low, high) in offsets.items():
            final = reader.read(sample_id).final_hidden_states
            for first in range(0, len(final), _ROWS):
                rows = final[first : first + _ROWS].to(head.lm_head.device, head.lm_head.dtype)
                flat[low + first : low + first + len(rows)] = _argmax(rows @ head.lm_head.T)
            progress.advance(high - low)
    partial = path.with_name(f"{fs.PARTIAL_PREFIX}{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"argmax": flat}, partial, metadata={"store": reader.digest})
    fs.commit_file(partial, path)
    return TargetArgmax(flat, offsets)


def _argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit of each row, on the CPU. numpy's is vectorised there, torch's is not (0.15 G/s)."""
    if logits.is_cuda:
        return logits.argmax(-1).cpu()
    return torch.from_numpy(logits.numpy().argmax(-1))
