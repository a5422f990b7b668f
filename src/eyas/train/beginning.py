"""What training starts from: a new drafter, or an existing one."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eyas.drafter.eagle3 import Drafter, DrafterConfig
from eyas.drafter.start import Started, read_start
from eyas.drafter.target import TargetHead
from eyas.drafter.vocab import IntArray, choose_draft_vocab, coverage, to_d2t, to_t2d
from eyas.progress import say
from eyas.recipe import Recipe
from eyas.settings import Train
from eyas.store.reader import StoreReader
from eyas.target import Target


@dataclass(frozen=True)
class Beginning:
    """The drafter to train, fp32 on the CPU.

    Attributes:
        coverage: share of the supervised training tokens that its draft vocabulary holds.
        started: what an existing drafter gave; None for a new one.
    """

    drafter: Drafter
    coverage: float
    started: Started | None


def begin(recipe: Recipe, target: Target, reader: StoreReader, head: TargetHead) -> Beginning:
    """The drafter that the recipe starts with.

    Raises: TrainError where `train.start` is another drafter than the recipe, the target and the store ask for.
    """
    table, counts = recipe.train, reader.token_counts("train")
    layers = list(reader.manifest.aux_layer_ids)
    draft_ids = choose_draft_vocab(counts, table.draft_vocab_size, target.eos_token_ids)
    config = DrafterConfig.for_target(target, recipe.drafter, len(draft_ids), layers)
    if not table.start:
        return Beginning(new_drafter(config, draft_ids, head, table), coverage(counts, draft_ids), None)
    started = read_start(Path(table.start), config, target, head)
    left = "".join(f"; {name} not taken: {why}" for name, why in started.left.items())
    say(f"train: starts from {table.start} ({started.form} form), {len(started.taken)} tensors taken{left}")
    for note in started.notes:
        say(f"train: {note}")
    return Beginning(started.drafter, coverage(counts, started.drafter.draft_ids.numpy()), started)


def new_drafter(config: DrafterConfig, draft_ids: IntArray, head: TargetHead, table: Train) -> Drafter:
    """A drafter to start from: random, but for lm_head, which starts as the target's rows of the draft vocabulary.

    For AdamW it is close to what the target itself would read off its deepest aux layer: norm starts as the target's
    final norm, and fc passes that layer through (plus a little noise). Acceptance lengths of the demo so and at random:
    1.561 and 1.532; with Muon, whose steps are as large in every direction, 2.294 and 2.317 of SmolLM2 on an H200
    (LOG.md, 2026-11-30).
    """
    drafter = Drafter(config)
    drafter.initialise(table.seed)
    hidden = config.hidden_size
    with torch.no_grad():
        drafter.lm_head.weight.copy_(head.lm_head[torch.from_numpy(draft_ids).to(head.lm_head.device)])
        if table.optimizer == "adamw":
            drafter.norm.weight.copy_(head.norm)
            drafter.fc.weight.mul_(0.1)
            drafter.fc.weight[:, -hidden:].add_(torch.eye(hidden))
    drafter.d2t.copy_(torch.from_numpy(to_d2t(draft_ids)))
    drafter.t2d.copy_(torch.from_numpy(to_t2d(draft_ids, config.vocab_size)))
    return drafter


def describe_head(drafter: Drafter, target_rows: Tensor, table: Train) -> str:
    """Words for the record: what a frozen lm_head is. `target_rows` [Vd, H]: the target's, in any float dtype."""
    same = torch.equal(drafter.lm_head.weight.detach().to(target_rows.dtype), target_rows)
    return "frozen, the target's rows" if same else f"frozen, as in {table.start}"
