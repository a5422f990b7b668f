"""speculators' first format: one `data_{i}.pt` a sample, written by its 0.3 and 0.4 and read up to 0.7 (--legacy-data).

Each is a dict: input_ids [T], loss_mask [T], hidden_states: a list of four [T, H], three aux layers and the final state
before the target's last norm. Layer ids count from 0 and mean the output of that layer: ours - 1.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch

from eyas import fs
from eyas.errors import StoreError
from eyas.store.convert.peer import BadFile, Conventions, Head, Heads, Sink, Source, check_head, check_layers
from eyas.store.convert.torch_files import load, save

CONVENTIONS = Conventions("speculators-v1", "speculators 0.3 to 0.7 (data_{i}.pt)", -1, "pre_norm")
_CONFIG, _LENGTHS = "data_config.json", "sample_lengths.json"
_FILE = re.compile(r"data_(\d+)\.pt")
_KEYS = ("input_ids", "loss_mask", "hidden_states")


class V1Source(Source):
    def __init__(self, folder: Path) -> None:
        numbered = sorted((int(found.group(1)), path) for path in folder.rglob("*.pt") if (found := _match(path)))
        self._folder, self._paths = folder, [path for _, path in numbered]

    def __len__(self) -> int:
        return len(self._paths)

    def path(self, row: int) -> Path:
        return self._paths[row]

    def head(self, row: int) -> Head:
        content = self._load(row)
        return check_head(
            self._paths[row], content["input_ids"], content["loss_mask"], content["hidden_states"][-1].shape[-1]
        )

    def states(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        *aux, final = self._load(row)["hidden_states"]
        return torch.stack(aux, 1), final

    def recorded_layer_ids(self) -> list[int] | None:
        """Those in data_config.json, which the tool's own writer leaves beside the samples."""
        path = self._folder / _CONFIG
        if not path.is_file():
            return None
        try:
            ids = json.loads(path.read_text(encoding="utf-8"))["hidden_states"]["layer_ids"]
            return [int(layer) for layer in ids[:-1]]
        except (ValueError, KeyError, TypeError):
            raise StoreError(
                f"{path}: no hidden_states.layer_ids", expected="as speculators 0.3 writes it", next="remove the file"
            ) from None

    def _load(self, row: int) -> dict[str, Any]:
        path = self._paths[row]
        content = load(path, _KEYS)
        states = content["hidden_states"]
        check_layers(path, len(states) - 1)
        shapes = {tuple(state.shape) for state in states}
        if len(shapes) != 1 or len(states[0].shape) != 2 or len(states[0]) != len(content["input_ids"]):
            raise BadFile(path, "states don't fit the tokens", f"{len(content['input_ids'])} tokens, {sorted(shapes)}")
        return content


class V1Sink(Sink):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, row: int, ids: torch.Tensor, mask: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> None:
        path = self._folder / f"data_{row}.pt"
        if not path.exists():
            states = [*(aux[:, layer].contiguous() for layer in range(aux.shape[1])), final.contiguous()]
            save(path, {"input_ids": ids, "hidden_states": states, "loss_mask": mask})

    def finish(self, heads: Heads) -> None:
        """data_config.json and sample_lengths.json. No token_freq.pt: the reader would take it for a sample."""
        config = {
            "version": "2.0",
            "model": {"target_model_path": heads.target, "hidden_size": heads.hidden_size},
            "data": {"num_samples": len(heads.lengths)},
            "hidden_states": {"layer_ids": [*heads.layer_ids, heads.num_layers - 1]},
            "format": {"file_pattern": "data_{idx}.pt", "data_format_version": 1},
        }
        fs.write_json(self._folder / _CONFIG, config)
        fs.write_json(self._folder / _LENGTHS, {str(row): tokens for row, tokens in enumerate(heads.lengths)})


def _match(path: Path) -> re.Match[str] | None:
    return _FILE.fullmatch(path.name)
