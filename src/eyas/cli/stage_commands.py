"""One command for each stage: `eyas capture` ... `eyas evaluate`."""

from collections.abc import Callable

from eyas.cli.evaluate import evaluate
from eyas.cli.options import Limit, Overrides, RecipePath, Redo, read_run
from eyas.cli.verify import verify


def _stage(name: str, recipe: RecipePath, set_: Overrides, limit: Limit, redo: Redo) -> None:
    from eyas.stages import run_stage

    run_stage(read_run(recipe, set_, limit), name, redo=redo)


def capture(recipe: RecipePath, set_: Overrides = None, limit: Limit = 0, redo: Redo = False) -> None:
    """Run the target over the tokens and store its hidden states (store/)."""
    _stage("capture", recipe, set_, limit, redo)


def train(recipe: RecipePath, set_: Overrides = None, limit: Limit = 0, redo: Redo = False) -> None:
    """Train the drafter from the store (train/step-N/)."""
    _stage("train", recipe, set_, limit, redo)


COMMANDS: dict[str, Callable[..., None]] = {
    "capture": capture,
    "verify": verify,
    "train": train,
    "evaluate": evaluate,
}
