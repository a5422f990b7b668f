"""One command for each stage: `eyas capture` ... `eyas evaluate`."""

from collections.abc import Callable

from eyas.cli.evaluate import evaluate
from eyas.cli.options import Limit, Overrides, RecipePath, Redo, read_run
from eyas.cli.verify import verify


def _stage(name: str, recipe: RecipePath, set_: Overrides, limit: Limit, redo: Redo) -> None:
    from eyas.stages import run_stage
    from eyas.train.ranks import refuse_ranks

    refuse_ranks(name)
    run_stage(read_run(recipe, set_, limit), name, redo=redo)


def capture(recipe: RecipePath, set_: Overrides = None, limit: Limit = 0, redo: Redo = False) -> None:
    """Run the target over the tokens and store its hidden states (store/)."""
    _stage("capture", recipe, set_, limit, redo)


def train(recipe: RecipePath, set_: Overrides = None, limit: Limit = 0, redo: Redo = False) -> None:
    """Train the drafter from the store (train/step-N/). On N GPUs: torchrun --nproc-per-node N -m eyas train RECIPE."""
    from eyas.stages import follow_stage, run_stage
    from eyas.train.ranks import following, rank

    run = read_run(recipe, set_, limit)
    if rank() == 0:
        run_stage(run, "train", redo=redo)
        return
    with following():
        follow_stage(run, "train", redo=redo)


COMMANDS: dict[str, Callable[..., None]] = {
    "capture": capture,
    "verify": verify,
    "train": train,
    "evaluate": evaluate,
}
