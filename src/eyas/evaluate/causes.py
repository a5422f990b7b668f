"""Why an engine accepts more or less than a replay says: the replay done again with one thing changed at a time.

What comes nearest to the engine's figure, without the drafts that it counts behind answers' ends, is the likeliest
cause.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.eagle3 import Drafter
from eyas.engine.drafting import Drafting
from eyas.evaluate.again import REPLAY, Exchange, Reference, added, capture_again, walk_all
from eyas.run import Run
from eyas.store.reader import StoredSample
from eyas.target import Target


def causes(
    run: Run,
    target: Target,
    drafting: Drafting,
    exchanges: Sequence[Exchange],
    reference: Reference,
    dtype: str,
    gap: Callable[[float], float],
    samples: Sequence[StoredSample],
) -> list[dict[str, Any]]:
    """What an engine may have wrong, each with the acceptance length that it gives; the nearest to the engine's first.

    Args:
        gap: by what share of the engine's acceptance length another lies outside its bounds.
    Raises: what capture raises.
    """
    embedding, drafts = reference.head.embedding, drafting.drafts

    def walked(drafter: Drafter, table: Tensor = embedding, chosen: Sequence[StoredSample] = samples) -> float:
        return added(walk_all(drafter, table, chosen, drafts), drafts).length

    def shifted(by: int) -> float | None:
        ids = [layer + by for layer in reference.aux_layer_ids]
        if ids[0] < 0 or ids[-1] >= target.num_layers:
            return None
        return walked(reference.drafter, chosen=capture_again(run, exchanges, ids, dtype, f"{REPLAY}{by:+d}"))

    found = [
        ("layer ids: the engine captures each aux layer one too low", shifted(-1)),
        ("layer ids: the engine captures each aux layer one too high", shifted(1)),
        ("norm switches: the engine feeds back the other state (norm_output)", walked(_switched(reference.drafter))),
        ("draft vocabulary: d2t is taken for ids, not offsets", walked(_absolute(reference.drafter))),
        (
            "embedding: the engine drafts with another than the target's",
            walked(reference.drafter, _shuffled(embedding)),
        ),
    ]
    tried: list[dict[str, Any]] = [
        {"cause": name, "acceptance_length": round(length, 4), "from_engine": round(abs(gap(length)), 4)}
        for name, length in found
        if length is not None
    ]
    tried.sort(key=lambda entry: entry["from_engine"])
    return [{"cause": name} for name in _context(drafting, exchanges)] + tried


def _context(drafting: Drafting, exchanges: Sequence[Exchange]) -> list[str]:
    """Whether an answer goes beyond the context that the drafter's folder states."""
    longest = max(len(each.prompt) + len(each.answer) for each in exchanges)
    config = json.loads((drafting.folder / "config.json").read_text(encoding="utf-8"))
    context = int(config.get("max_position_embeddings") or longest)
    if context >= longest:
        return []
    return [f"context: max_position_embeddings is {context}, and an answer reaches position {longest}"]


def _switched(drafter: Drafter) -> Drafter:
    return _changed(drafter, lambda copy: None, norm_output=not drafter.config.norm_output)


def _absolute(drafter: Drafter) -> Drafter:
    """As drafted by an engine that adds a row's number to what is an id already."""

    def change(copy: Drafter) -> None:
        ids = drafter.draft_ids + torch.arange(len(drafter.draft_ids), device=drafter.draft_ids.device)
        copy.d2t.copy_((ids % drafter.config.vocab_size) - torch.arange(len(ids), device=ids.device))

    return _changed(drafter, change)


def _changed(drafter: Drafter, change: Callable[[Drafter], None], **switches: Any) -> Drafter:
    copy = Drafter(dataclasses.replace(drafter.config, **switches)).to(drafter.d2t.device)
    copy.load_state_dict(drafter.state_dict())
    change(copy)
    return copy.eval()


def _shuffled(embedding: Tensor) -> Tensor:
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(0))
    return embedding[order.to(embedding.device)]
