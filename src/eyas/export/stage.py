"""The export stage: the trained checkpoint as a folder for SGLang and vLLM, checked before it gets its name."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eyas import fs
from eyas.drafter.eagle3 import DrafterConfig
from eyas.drafter.published import read_published
from eyas.drafter.saved import newest, read_shape, read_weights
from eyas.drafter.target import load_target_head
from eyas.engine.drafting import Kind, serving_kind, serving_run
from eyas.engine.find import find_engine
from eyas.engine.kinds import KINDS
from eyas.errors import CorruptStore, ExportError, StoreError, TrainError, VerificationFailed
from eyas.export.check import check_folder
from eyas.export.form import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    file_name,
    flat_config,
    folder_tensors,
    speculators_config,
)
from eyas.progress import say
from eyas.record import Inputs, load_record
from eyas.run import Run
from eyas.stages import Result, remove_tree
from eyas.store.reader import StoreReader
from eyas.target import Target, load_target


def inputs(run: Run) -> Inputs:
    """The trained weights (by the train stage's record), the target's config, and the recipe's [export]."""
    trained = load_record(run.dir, "train")
    return {
        "output of train": trained.output if trained else None,
        "target config": fs.digest_json(load_target(run.recipe.target).config),
    } | {f"export.{key}": value for key, value in run.recipe.export.model_dump(mode="json").items()}


def discard(run: Run) -> None:
    remove_tree(run.export_dir)


def execute(run: Run) -> Result:
    """Write `export/`: under a temporary name, checked as an engine would read it, then renamed.

    Raises: ExportError where there is no checkpoint, or the folder would not serve what was trained; TrainError where
        the checkpoint isn't whole.
    """
    target, settings = load_target(run.recipe.target), run.recipe.export
    checkpoint = trained_checkpoint(run)
    drafter, tensors = read_shape(checkpoint), read_weights(checkpoint)
    if settings.form == "speculators":
        config = speculators_config(drafter, target, dtype=settings.dtype, drafts=run.recipe.evaluate.drafts)
    else:
        config = flat_config(drafter, target, dtype=settings.dtype, sglang_version=settings.sglang_version)
    embedding = _embedding(run, target)
    partial = run.dir / f"{fs.PARTIAL_PREFIX}export"
    remove_tree(partial)
    _write(partial, config, folder_tensors(tensors, drafter, getattr(torch, settings.dtype), embedding), settings.form)
    faults = _check(run, partial, target, drafter, embedding)
    if faults:
        remove_tree(partial)
        raise ExportError(
            f"{checkpoint} can't be exported:\n  " + "\n  ".join(faults),
            expected="what the engines load, with the target's numbers and the store's layers",
            cause="an engine that doesn't know this kind of drafter, a checkpoint of another target or store, or files "
            "that changed while training was stopped",
            next=f"{run.command('run', '--redo', 'train')}   # unless a line above says what to set",
        )
    remove_tree(run.export_dir)
    fs.commit_folder(partial, run.export_dir)
    counts = {
        "checkpoint": checkpoint.name,
        "form": settings.form,
        "parameters": sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        "bytes": sum(path.stat().st_size for path in run.export_dir.iterdir()),
        "draft_vocab_size": drafter.draft_vocab_size,
        "aux_layer_ids": drafter.aux_layer_ids,
    }
    if settings.form == "flat" and settings.sglang_version:
        counts["sglang_layer_ids"] = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        counts["sglang_version"] = settings.sglang_version
    digest = fs.digest_files([run.export_dir / CONFIG_FILE, run.export_dir / WEIGHTS_FILE])
    return Result(output=digest, counts=counts)


def check(run: Run) -> None:
    """Check the finished `export/` again, as an engine would read it (`eyas export --check`).

    Raises: VerificationFailed, naming each mismatch.
    """
    target, drafter = load_target(run.recipe.target), read_shape(trained_checkpoint(run))
    faults = _check(run, run.export_dir, target, drafter, _embedding(run, target))
    if faults:
        raise VerificationFailed(
            f"{run.export_dir}:\n  " + "\n  ".join(faults),
            expected="what `eyas export` wrote",
            cause="files were edited by hand, or the target's config or the store changed since",
            next=run.command("export", "--redo"),
        )


def check_served(run: Run, kind: Kind | None = None, release: str = "") -> None:
    """Check the finished `export/` as an engine reads it.

    A folder that `serving.drafter` names is somebody else's: there is nothing to compare it with.

    Args:
        kind, release: the engine; without them that of [serving], in the release that its interpreter holds.
    Raises: VerificationFailed, naming each mismatch; EngineError where the interpreter doesn't hold the engine.
    """
    if run.recipe.serving.drafter:
        return
    if kind is None:
        kind = serving_kind(run)
        release = find_engine(serving_run(run, None)).engines[kind]
    target = load_target(run.recipe.target)
    drafter = _trained_shape(run, target)
    faults = check_folder(
        run.export_dir,
        target,
        drafter,
        captured_layers(run, drafter),
        embedding=_embedding(run, target),
        for_sglang=kind == "sglang",
        sglang_version=release if kind == "sglang" else "",
    )
    if faults:
        wanted = f', with export.form = "flat" and export.sglang_version = "{release}" in the recipe'
        raise VerificationFailed(
            f"{run.export_dir}, as {KINDS[kind].title} {release} would serve it:\n  " + "\n  ".join(faults),
            expected="the drafter that was trained",
            cause="it was exported for another engine or release, or files were edited by hand",
            next=run.command("export", "--redo") + (wanted if kind == "sglang" else ""),
        )


def _trained_shape(run: Run, target: Target) -> DrafterConfig:
    """Of the checkpoint; where checkpoints were removed since, with a line that says so, of the folder itself."""
    try:
        return read_shape(trained_checkpoint(run))
    except (ExportError, TrainError) as error:
        say(f"export: the folder is not compared with what was trained ({error.seen}), only with what is to serve it")
        return read_published(run.export_dir, target).config


def _check(run: Run, folder: Path, target: Target, drafter: DrafterConfig, embedding: torch.Tensor | None) -> list[str]:
    layers = captured_layers(run, drafter)
    for_sglang = bool(run.recipe.export.sglang_version)
    return check_folder(folder, target, drafter, layers, embedding=embedding, for_sglang=for_sglang)


def _embedding(run: Run, target: Target) -> torch.Tensor | None:
    """The target's, where the folder is to hold it: speculators 0.9.0 drafts from unset memory where it is missing."""
    if not run.recipe.export.embedding and run.recipe.export.form != "speculators":
        return None
    return load_target_head(target, getattr(torch, run.recipe.export.dtype), torch.device("cpu")).embedding


def captured_layers(run: Run, drafter: DrafterConfig) -> list[int]:
    """The layers that the store holds; the checkpoint's own, with a line that says so, where the store is gone."""
    try:
        return list(StoreReader(run.store_url).manifest.aux_layer_ids)
    except CorruptStore:
        raise
    except StoreError as error:
        say(f"export: layer ids are not compared with the store's ({error.seen}); the checkpoint's stand")
        return drafter.aux_layer_ids


def trained_checkpoint(run: Run) -> Path:
    """The checkpoint that the finished training chose (the best one, with train.patience), else the newest.

    Raises: ExportError where there is none.
    """
    record = load_record(run.dir, "train")
    chosen = run.train_dir / str(record.counts.get("checkpoint")) if record else None
    if chosen is not None and chosen.is_dir():
        return chosen
    found = newest(run.train_dir)
    if found is None:
        raise ExportError(f"{run.train_dir}: no checkpoint", expected="step-N folders", next=run.command("train"))
    return found


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], form: str) -> None:
    folder.mkdir(parents=True)
    named = {file_name(name, form): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    fs.write_atomic(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
