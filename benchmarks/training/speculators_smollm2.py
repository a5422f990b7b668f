"""speculators' part of benchmarks/smollm2.py: the same store through its own trainer, evaluated as ours is."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas import fs
from eyas.drafter.vocab import choose_draft_vocab, to_d2t, to_t2d
from eyas.run import Run, open_run
from eyas.stages import run_stage
from eyas.store.convert.exporter import export_store
from eyas.store.reader import StoreReader
from eyas.target import load_target

HERE = Path(__file__).resolve().parent
# What it is given, and why; all else is its default.
SETTINGS = {
    "--data-path": "the same samples, exported from the store",
    "--train-data-ratio": "our held-out samples are not trained from",
    "--epochs": "as ours",
    "--total-seq-len": "as our train.batch_tokens: tokens of a step",
    "--draft-vocab-size, --d2t-path, --t2d-path": "the same draft vocabulary",
    "--ttt-steps, --ttt-step-loss-decay": "as ours",
    "--lr": "as ours, which is its default",
    "--optimizer": "left at its default, Muon by the same lr with a weight decay of 0.1 (ours: without)",
    "--target-layer-ids": "the store's",
    "--mask-token-id": "not used by EAGLE-3; without it a processor is looked up",
    "--on-missing": "raise: no sample is left out",
    "--log-freq": "a step that is logged waits for the GPU",
    "norms": "left at its defaults: before fc, before the residual, of the output (ours: EAGLE-3.1's)",
    "loss": "left at its default: KL, in rows outside the draft vocabulary too (ours: the same loss without those)",
    "schedule": "left at its default: linear, 1% of it warm-up (ours: cosine, 3%)",
    "lm_head": "frozen: it has no switch (ours: trained)",
}
# On a CPU it has no fused losses and no FlexAttention, and its loaders' processes would take longer than the steps.
_ON_CPU = ["--loss-implementation", "eager", "--draft-attn-impl", "sdpa", "--num-workers", "0"]
_TRAINED, _CONVERTED = "trained.json", "converted.json"


def folder_of(run: Run) -> Path:
    """Where its data and checkpoints lie."""
    return run.dir.parent / f"{run.dir.name}-speculators-trainer"


def peer_run(recipe: Path, settings: Sequence[str], run: Run) -> Run:
    """The run that evaluates its drafter: our store, its checkpoint as it is."""
    start = folder_of(run) / "checkpoints" / str(round(run.recipe.train.epochs) - 1)
    switches = [f"drafter.{name}=true" for name in ("norm_before_fc", "norm_before_residual", "norm_output")]
    switches += ["drafter.fc_norm=false"]
    own = ["name=smollm2-speculators", "data.sources=[]", "data.evaluation_prompts=[]", "regenerate.servers=[]"]
    own += [f"store.url={run.store_url}", f"train.start={start}", "train.epochs=0"]
    return open_run(recipe, [*settings, *own, *switches])


def train_and_evaluate(run: Run, peer: Run, peers: Path) -> None:
    """All of it; what an earlier call finished is not done again."""
    folder = folder_of(run)
    if not (folder / _CONVERTED).is_file():
        began = time.monotonic()
        convert(run, folder)
        fs.write_json(folder / _CONVERTED, {"seconds": round(time.monotonic() - began, 1)})
    if not (folder / _TRAINED).is_file():
        fs.write_json(folder / _TRAINED, train(run, folder, peers))
    for stage in ("verify", "train", "evaluate"):
        run_stage(peer, stage)


def facts_of(run: Run) -> dict[str, Any]:
    """Seconds, steps and command of what is finished."""
    paths = {name: folder_of(run) / f"{name}.json" for name in ("converted", "trained")}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def convert(run: Run, folder: Path) -> None:
    """The store in its form, and our draft vocabulary in its two files."""
    target, reader = load_target(run.recipe.target), StoreReader(run.store_url)
    export_store("speculators", run.store_url, folder / "data", target=target)
    counts = reader.token_counts("train")
    draft_ids = choose_draft_vocab(counts, run.recipe.train.draft_vocab_size, target.eos_token_ids)
    np.save(folder / "d2t.npy", to_d2t(draft_ids))
    np.save(folder / "t2d.npy", to_t2d(draft_ids, target.vocab_size))


def train(run: Run, folder: Path, peers: Path) -> dict[str, Any]:
    """Run its trainer to its last epoch; it resumes from whole epochs."""
    checkpoints, began = folder / "checkpoints", time.monotonic()
    for left in checkpoints.glob("[0-9]*"):
        if not (left / "training_state.json").is_file():  # what it writes last
            shutil.rmtree(left)
    resumed_from = len(list(checkpoints.glob("[0-9]*")))
    words = command(run, folder, checkpoints)
    paths = [str(peers / "speculators"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    log = folder / "train.log"
    with log.open("a") as output:
        done = subprocess.run(words, env=env, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
        sys.exit(f"speculators' trainer ended with {done.returncode}; {log} ends:\n{tail}")
    last = checkpoints / str(round(run.recipe.train.epochs) - 1)
    state = json.loads((last / "training_state.json").read_text(encoding="utf-8"))
    return {
        "steps": state["global_step"],
        "seconds": round(time.monotonic() - began, 1),
        "resumed_from_epoch": resumed_from,  # each time its weights and moments are rounded to bf16
        "command": words[2:],
    }


def command(run: Run, folder: Path, checkpoints: Path) -> list[str]:
    """Its command line."""
    table, reader = run.recipe.train, StoreReader(run.store_url)
    rows, heldout = len(reader.samples()), len(reader.samples("heldout"))
    given: dict[str, Any] = {
        "--speculator-type": "eagle3",
        "--verifier-name-or-path": load_target(run.recipe.target).path,
        "--data-path": folder / "data",
        "--save-path": checkpoints,
        "--log-dir": folder / "logs",
        # It takes the first int(rows * ratio) rows.
        "--train-data-ratio": (rows - heldout + 0.5) / rows,
        "--epochs": round(table.epochs),
        "--total-seq-len": table.batch_tokens,
        "--draft-vocab-size": len(np.load(folder / "d2t.npy")),
        "--d2t-path": folder / "d2t.npy",
        "--t2d-path": folder / "t2d.npy",
        "--ttt-steps": table.ttt_steps,
        "--ttt-step-loss-decay": table.ttt_decay,
        "--lr": table.lr,
        "--mask-token-id": 0,
        "--on-missing": "raise",
        "--log-freq": 100,
    }
    words = [sys.executable, HERE / "speculators_train.py"]
    words += [word for pair in given.items() for word in pair]
    words += ["--target-layer-ids", *reader.manifest.aux_layer_ids]
    words += [] if torch.cuda.is_available() else _ON_CPU
    return [str(word) for word in words]
