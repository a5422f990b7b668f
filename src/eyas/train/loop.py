"""The train stage: what it depends on, what it leaves, how it starts again."""

import shutil
from pathlib import Path

from eyas import fs
from eyas.drafter.published import folder_digest
from eyas.progress import say
from eyas.record import Inputs
from eyas.run import Run
from eyas.settings import Train
from eyas.stages import Result, remove_tree
from eyas.target import load_target

# These do not change what is learned, so a finished run does not depend on them.
_NO_INPUT = {
    "checkpoint_every",
    "keep_checkpoints",
    "eval_every",
    "eval_samples",
    "device",
    "compile",
    "recompute",
    "deterministic",
    "parallel",
    "timeout_s",
    "tensorboard",
}


def inputs(run: Run) -> Inputs:
    """What the weights depend on: the store (output of the stage before), the target, [drafter] and [train]."""
    # With patience, measurements decide where training ends.
    measured = {"eval_every", "eval_samples"} if run.recipe.train.patience else set()
    drafts = {"evaluate.drafts": run.recipe.evaluate.drafts} if run.recipe.train.patience else {}
    table = run.recipe.train.model_dump(mode="json", exclude=_NO_INPUT - measured)
    train = {f"train.{key}": value for key, value in table.items()}
    drafter = {f"drafter.{key}": value for key, value in run.recipe.drafter.model_dump(mode="json").items()}
    start = {"start drafter": folder_digest(Path(run.recipe.train.start))} if run.recipe.train.start else {}
    return train | drafts | drafter | start | {"target weights": load_target(run.recipe.target).model_digest}


def discard(run: Run) -> None:
    """Remove all checkpoints and the logs of this stage; the argmax cache is keyed by the store and stays."""
    for folder in run.train_dir.glob("*step-*"):
        shutil.rmtree(folder)
    fs.remove(run.logs_dir / "train.jsonl")
    remove_tree(run.logs_dir / "tensorboard")


def without_effect(table: Train) -> list[str]:
    """A line for each setting that the chosen loss has no use for."""
    lines = []
    if table.compile and not table.loss.startswith("lk-"):
        lines.append(f'train.compile has no effect: it is for the LK losses, and train.loss is "{table.loss}"')
    if table.lk_eta != Train.model_fields["lk_eta"].default and table.loss != "lk-hybrid":
        lines.append(f'train.lk_eta has no effect: it is of lk-hybrid, and train.loss is "{table.loss}"')
    return lines


def execute(run: Run) -> Result:
    """Train to the end, from the newest checkpoint if there is one, with all processes that torchrun started."""
    from eyas.train.parallel import join
    from eyas.train.trainer import Trainer

    with join(run.recipe.train) as parallel:
        for line in without_effect(run.recipe.train) if parallel.rank == 0 else []:
            say(f"train: {line}")
        return Trainer(run, inputs(run), parallel).train()
