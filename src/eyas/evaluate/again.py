"""An engine's answers captured again and walked, by the drafter as it was trained."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eyas.data.tokens import Sample, TokensWriter, sample_id
from eyas.drafter.eagle3 import Drafter
from eyas.drafter.pack import group
from eyas.drafter.published import read_published
from eyas.drafter.saved import load_drafter
from eyas.drafter.start import read_start
from eyas.drafter.target import TargetHead, load_target_head
from eyas.drafter.walk import Acceptance, replay
from eyas.engine.drafting import SERVING
from eyas.engine.local import find_device
from eyas.engine.server import end_left
from eyas.errors import RecipeError
from eyas.record import Record, load_record, save_record
from eyas.run import Run
from eyas.settings import Regenerate, Source, Store
from eyas.stages import remove_tree, run_stage
from eyas.store.reader import StoredSample, StoreReader
from eyas.target import Target, load_target

REPLAY = "replay"  # and what begins with it: folders of capture_again
_PACK_TOKENS = 4096


@dataclass(frozen=True)
class Exchange:
    """A prompt and what the engine wrote, as token ids: with the drafter, and without."""

    prompt: list[int]
    answer: list[int]
    plain: list[int]

    @property
    def sample(self) -> Sample:
        token_ids = np.array(self.prompt + self.answer, np.int32)
        mask = np.arange(len(token_ids)) >= len(self.prompt)
        return Sample(sample_id(token_ids, mask), "serving", "heldout", token_ids, mask)


@dataclass
class Reference:
    """The drafter as trained, and the parts of the target that it needs, fp32 on one device."""

    drafter: Drafter
    head: TargetHead
    aux_layer_ids: list[int]
    device: torch.device


def load_reference(run: Run, target: Target) -> Reference:
    """The drafter that was exported, from its checkpoint, its weights rounded to the exported number type; or the one
    that serving.drafter names.

    Raises: TrainError where it can't be read; RecipeError where the run exported none.
    """
    device = find_device(run.recipe.train.device, "train.device")
    head = load_target_head(target, torch.float32, device)
    if run.recipe.serving.drafter:
        folder = Path(run.recipe.serving.drafter)
        shape = read_published(folder, target).config
        drafter = read_start(
            folder, shape, target, load_target_head(target, torch.float32, torch.device("cpu"))
        ).drafter
    else:
        exported = load_record(run.dir, "export")
        if exported is None:
            raise RecipeError(f"{run.dir}: export is not finished", next=run.command("run"))
        drafter = load_drafter(run.train_dir / exported.counts["checkpoint"])
        dtype = getattr(torch, run.recipe.export.dtype)
        for parameter in drafter.parameters():
            parameter.data = parameter.data.to(dtype).float()
    return Reference(drafter.to(device).eval(), head, list(drafter.config.aux_layer_ids), device)


def capture_again(
    run: Run, exchanges: Sequence[Exchange], aux_layer_ids: Sequence[int], dtype: str, name: str
) -> list[StoredSample]:
    """States of the engine's answers, by the capture stage of a run of its own: serving/NAME.

    Args:
        name: begins with REPLAY.
    """
    recipe = run.recipe
    again = dataclasses.replace(
        run,
        recipe=recipe.model_copy(
            update={
                "runs_dir": str(run.dir / SERVING),
                "name": name,
                # A recipe without sources, whose store was imported, would have nothing to capture.
                "data": recipe.data.model_copy(update={"limit": 0, "sources": [Source(path="answers")]}),
                "regenerate": Regenerate(),
                "engine": recipe.engine.model_copy(update={"dtype": dtype}),
                "store": Store(shard_bytes=recipe.store.shard_bytes, min_free_bytes=recipe.store.min_free_bytes),
                "drafter": recipe.drafter.model_copy(update={"aux_layer_ids": list(aux_layer_ids)}),
            }
        ),
    )
    end_left(run, f"{SERVING}/{name}")
    remove_tree(again.dir)
    target = load_target(recipe.target)
    # Token ids as the engine wrote them: no template made them.
    facts = {"tokenizer_digest": target.tokenizer_digest, "template_digest": "", "vocab_size": target.vocab_size}
    samples = [exchange.sample for exchange in exchanges]
    with TokensWriter(again.tokens_dir) as writer:
        for sample in samples:
            writer.add(sample)
        manifest = writer.finish(facts)
    save_record(again.dir, Record("prepare", {}, manifest["digest"], {}, 0.0))
    run_stage(again, "capture")
    reader = StoreReader(again.store_url)
    return [reader.read(sample.id) for sample in samples]


def walk_all(drafter: Drafter, embedding: Tensor, samples: Sequence[StoredSample], drafts: int) -> list[Acceptance]:
    """Acceptance of each sample."""
    packs = group(samples, [len(sample.token_ids) for sample in samples], _PACK_TOKENS)
    return [walked.acceptance for walked in replay(drafter, embedding, packs, drafts)]


def added(parts: Sequence[Acceptance], drafts: int) -> Acceptance:
    """All verifications of several samples."""
    total = Acceptance.none(drafts)
    for part in parts:
        total.merge(part)
    return total
