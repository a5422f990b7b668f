"""SpecForge's offline features: `rows_{g}-{g+2000}/data_{i}.ckpt`, or .ckpt.gz, one a sample.

Each is a dict: input_ids [T], loss_mask [T], aux_hidden_state [1, T, 3H], hidden_state [1, T, H], the final state after
the target's last norm. Layer ids are SGLang's: the output of that layer, ours - 1. Rows of a batch are stored padded to
the longest.
"""

import re
from pathlib import Path
from typing import Any

import torch

from eyas import fs
from eyas.store.convert.peer import BadFile, Conventions, Head, Heads, Sink, Source, check_head, check_layers
from eyas.store.convert.torch_files import load, save

CONVENTIONS = Conventions("specforge", "SpecForge (rows_*/data_{i}.ckpt)", -1, "post_norm")
_FILE = re.compile(r"data_(\d+)\.ckpt(?:\.gz)?")
_KEYS = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
_GROUP = 2000


class SpecForgeSource(Source):
    def __init__(self, folder: Path) -> None:
        found = ((_FILE.fullmatch(path.name), path) for path in folder.rglob("data_*.ckpt*"))
        self._paths = [path for _, path in sorted((int(match.group(1)), path) for match, path in found if match)]

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, row: int) -> Path:
        return self._paths[row]

    def head(self, row: int) -> Head:
        content = self._load(row)
        return check_head(
            self._paths[row],
            content["input_ids"].flatten(),
            content["loss_mask"].flatten(),
            content["hidden_state"].shape[-1],
        )

    def states(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        content = self._load(row)
        final = content["hidden_state"]
        hidden = final.shape[-1]
        return content["aux_hidden_state"].reshape(-1, content["aux_hidden_state"].shape[-1] // hidden, hidden), (
            final.reshape(-1, hidden)
        )

    def _load(self, row: int) -> dict[str, Any]:
        path = self._paths[row]
        content = load(path, _KEYS)
        aux, final, tokens = content["aux_hidden_state"], content["hidden_state"], content["input_ids"].numel()
        hidden = final.shape[-1] if final.dim() else 0
        if not hidden or aux.shape[:-1] != final.shape[:-1] or final.numel() != tokens * hidden:
            shapes = f"aux_hidden_state {list(aux.shape)}, hidden_state {list(final.shape)}"
            raise BadFile(path, "states don't fit the tokens", f"{tokens} tokens, {shapes}")
        check_layers(path, aux.shape[-1] // hidden if aux.shape[-1] % hidden == 0 else 0)
        return content


class SpecForgeSink(Sink):
    def __init__(self, folder: Path, compress: bool) -> None:
        self._folder, self._compress = folder, compress

    def write(self, row: int, ids: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> None:
        first = row // _GROUP * _GROUP
        path = self._folder / f"rows_{first}-{first + _GROUP}" / f"data_{row}.ckpt{'.gz' if self._compress else ''}"
        if path.exists():
            return
        fs.make_folder(path.parent)
        content = {
            "input_ids": ids,
            "loss_mask": mask,
            "hidden_state": final.unsqueeze(0).contiguous(),
            "aux_hidden_state": aux.flatten(1).unsqueeze(0).clone(),
        }
        save(path, content, self._compress)

    def finish(self, heads: Heads) -> None:
        """Nothing: SpecForge lists the files."""
