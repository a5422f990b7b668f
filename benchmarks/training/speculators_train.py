"""speculators 0.9.0's own `speculators train`, on a machine with one GPU or none. Arguments: that command's.

Nothing of its training is changed. Its validation, of which nothing comes into the weights, is left out: on a GPU it
compiles the model once more, for over a minute; and its fused losses get tiles of their own there (tiles.py). Without a
GPU, where it does not start by itself, its device becomes the CPU; `--loss-implementation eager --draft-attn-impl sdpa
--num-workers 0` are needed too. `openai`, which only its requests to a vLLM need, may be missing.
"""

import sys

import torch
from absent import stand_in
from tiles import own_tiles

stand_in("openai")
from speculators.train import checkpointer, cli, trainer  # noqa: E402
from speculators.train.config import TrainConfig  # noqa: E402


def leave_validation_out() -> None:
    """Its trainer goes on without a loader of validation rows."""
    make = cli.create_train_val_loaders
    cli.create_train_val_loaders = lambda **given: (make(**given)[0], None)


def use_cpu() -> None:
    """Put the CPU where its trainer takes the first accelerator, or `cuda` where there is none."""
    setup = trainer.Trainer.setup_trainer

    def setup_trainer(self: trainer.Trainer) -> None:
        self.device_type = "cpu"
        setup(self)

    trainer.Trainer.setup_trainer = setup_trainer
    trainer.get_local_rank = lambda: "cpu"
    checkpointer.get_current_device = lambda: "cpu"
    torch.accelerator.synchronize = lambda: None


if __name__ == "__main__":
    leave_validation_out()
    if torch.cuda.is_available():
        own_tiles()
    else:
        use_cpu()
    cli.main(TrainConfig.resolve(sys.argv[1:]))
