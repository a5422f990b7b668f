"""The export stage: the newest checkpoint as a folder for SGLang and vLLM, checked before it gets its name."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eyas import fs
from eyas.drafter.eagle3 import DrafterConfig
from eyas.errors import ExportError
from eyas.export.check import check_folder
from eyas.export.form import CONFIG_FILE, WEIGHTS_FILE, engine_config, tensor_shapes
from eyas.record import Inputs, load_record
from eyas.run import Run
from eyas.stages import Result, remove_tree
from eyas.store.reader import StoreReader
from eyas.target import load_target

_STEP = re.compile(r"step-(\d+)")


def inputs(run: Run) -> Inputs:
    """The trained weights (by the train stage's record), the target's config, and the recipe's [export]."""
    trained = load_record(run.dir, "train")
    return {
        "output of train": trained.output if trained else None,
        "target config": fs.digest_json(load_target(run.recipe.target).config),
        "export.dtype": run.recipe.export.dtype,
        "export.sglang_version": run.recipe.export.sglang_version,
    }


def discard(run: Run) -> None:
    remove_tree(run.export_dir)


def execute(run: Run) -> Result:
    """Write `export/`: under a temporary name, checked as an engine would read it, then renamed.

    Raises: ExportError where there is no whole checkpoint, or the folder would not serve what was trained.
    """
    target = load_target(run.recipe.target)
    checkpoint = newest_checkpoint(run)
    drafter, tensors = read_checkpoint(checkpoint)
    settings = run.recipe.export
    config = engine_config(drafter, target, dtype=settings.dtype, sglang_version=settings.sglang_version)
    partial = run.dir / f"{fs.PARTIAL_PREFIX}export"
    remove_tree(partial)
    _write(partial, config, tensors, getattr(torch, settings.dtype))
    faults = check_folder(partial, target, StoreReader(run.store_url).manifest.aux_layer_ids)
    if faults:
        raise ExportError(
            f"{checkpoint} can't be exported:\n  " + "\n  ".join(faults),
            expected="what SGLang and vLLM load, with the target's numbers and the store's layers",
            cause="the checkpoint belongs to another target or store, or training was stopped while its files changed",
            next=run.command("run", "--redo", "train"),
        )
    remove_tree(run.export_dir)
    fs.commit_folder(partial, run.export_dir)
    return Result(
        output=fs.digest_files([run.export_dir / CONFIG_FILE, run.export_dir / WEIGHTS_FILE]),
        counts={
            "checkpoint": checkpoint.name,
            "parameters": sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
            "bytes": sum(path.stat().st_size for path in run.export_dir.iterdir()),
            "draft_vocab_size": drafter.draft_vocab_size,
            "aux_layer_ids": drafter.aux_layer_ids,
            "sglang_layer_ids": config["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
            "sglang_version": settings.sglang_version,
        },
    )


def newest_checkpoint(run: Run) -> Path:
    """The folder train/step-N with the largest N. Raises ExportError where there is none."""
    steps = [(int(match[1]), path) for path in run.train_dir.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    if not steps:
        raise ExportError(f"{run.train_dir}: no checkpoint", expected="step-N folders", next=run.command("train"))
    return max(steps)[1]


def read_checkpoint(folder: Path) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """A checkpoint's shape and weights (fp32). Raises ExportError where a file is missing or cut."""
    path = folder
    try:
        path = folder / "drafter.json"
        drafter = DrafterConfig(**json.loads(path.read_text(encoding="utf-8")))
        path = folder / WEIGHTS_FILE
        return drafter, load_file(path)
    except FileNotFoundError:
        fault = "missing"
    except (ValueError, TypeError, SafetensorError) as error:
        fault = f"not readable: {error}"
    raise ExportError(
        f"{path}: {fault}",
        expected="a whole checkpoint of the train stage",
        cause="files were moved or edited by hand, or come from another version of Eyas",
        next=f"rm -r {folder}   # then export again: the checkpoint before it is used",
    )


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Both files. Integer and bool tensors keep their type, unknown ones stay for the check."""
    folder.mkdir(parents=True)
    order = [name for name in tensor_shapes(config) if name in tensors] + sorted(tensors.keys() - tensor_shapes(config))
    cast = {name: tensors[name].to(dtype) if tensors[name].is_floating_point() else tensors[name] for name in order}
    save_file(cast, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    fs.write_atomic(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
