"""Three ways to one acceptance length: what the engine counted, a replay of its own answers, reference decoding.

All at temperature 0, of a chain. The engine's answers are captured again by the run's own capture stage (a run of its
own, below `serving/`), and walked. Replay and reference decoding use the drafter as it was trained, rounded as it was
exported: a folder that makes the engine serve another drafter shows up as a difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eyas.drafter.walk import Acceptance
from eyas.engine.drafting import Drafting
from eyas.evaluate.again import REPLAY, Exchange, Reference, added, capture_again, load_reference, walk_all
from eyas.evaluate.causes import causes
from eyas.evaluate.decode import DrafterSession, TargetSession, decode_along, decode_speculative, why_not
from eyas.evaluate.prompts import Prompt, PromptSets
from eyas.progress import Progress, say
from eyas.run import Run
from eyas.store.reader import StoredSample
from eyas.target import Target

SET = "(parity)"


@dataclass(frozen=True)
class Counted:
    """What an engine counted over some answers.

    Attributes:
        acceptance: as it counts: drafts that the target agrees with behind an answer's end are among them.
        low, high: bounds of the acceptance length without those, which is what a walk over the answers sees.
    """

    acceptance: Acceptance
    low: float
    high: float

    def gap(self, length: float) -> float:
        """By what share of it another acceptance length lies outside the bounds; 0 within them."""
        nearest = min(max(length, self.low), self.high)
        return (length - nearest) / nearest


def counted(acceptance: Acceptance, answers: Sequence[Sequence[int]], accepted: Sequence[Sequence[int]]) -> Counted:
    """Take out what was accepted behind the ends.

    All tokens of an answer but the first are of verifications, each of its accepted drafts and one more. What these sum
    up to beyond the answers is behind their ends; where there is something behind an end, the last token was a draft
    and the one after the drafts is among it.

    Args:
        accepted: for each answer, its verifications by number of accepted drafts (SGLang); empty: counted for all
            together (vLLM), so that it isn't known how many answers end so.
    """
    drafts = int(acceptance.accepted_at.sum())
    if accepted:
        over = [
            sum((taken + 1) * count for taken, count in enumerate(histogram)) - (len(answer) - 1)
            for answer, histogram in zip(answers, accepted, strict=True)
        ]
        within = drafts - sum(max(beyond - 1, 0) for beyond in over)
        bounds = (within, within)
    else:
        behind = max(drafts + acceptance.verifications - sum(len(answer) - 1 for answer in answers), 0)
        bounds = (drafts - behind, drafts - behind + min(behind, len(answers)))
    low, high = (1 + count / acceptance.verifications for count in bounds)
    return Counted(acceptance, low, high)


def choose_prompts(sets: PromptSets, count: int) -> PromptSets:
    """First turns of conversations, from all sets in turn, no two of them alike, as one set."""
    chosen: dict[tuple[int, ...], None] = {}
    longest = max(len(prompts) for prompts in sets.sets.values())
    for place in range(longest):
        for prompts in sets.sets.values():
            if place < len(prompts) and len(chosen) < count:
                prompt = prompts[place]
                ids = prompt.token_ids or tuple(sets.transcript(prompt).next_prompt())
                chosen[ids] = None
    return PromptSets({SET: [Prompt(str(place), None, ids) for place, ids in enumerate(chosen)]}, sets.maker)


def compare(
    run: Run, target: Target, drafting: Drafting, exchanges: Sequence[Exchange], engine: Counted, dtype: str
) -> dict[str, Any]:
    """Replay and decode what the engine answered; the figures side by side, the causes where they differ.

    Args:
        exchanges: no two with the same prompt.
        engine: what it counted over all of them.
        dtype: number type it served in.
    """
    reference = load_reference(run, target)
    drafts = drafting.drafts
    samples = capture_again(run, exchanges, reference.aux_layer_ids, dtype, REPLAY)
    replayed = walk_all(reference.drafter, reference.head.embedding, samples, drafts)
    total = added(replayed, drafts)
    count = min(run.recipe.evaluate.decode_prompts, len(exchanges))
    why = why_not(target, getattr(torch, dtype), reference.device) if count else ""
    if why:
        say(f"evaluate: no reference decoding of {target.path}: {why}")
        count = 0
    decoded = _decode(run, target, reference, drafting, exchanges[:count], dtype)
    gaps = {"replay": engine.gap(total.length)}
    if count == len(exchanges):
        gaps["decode"] = engine.gap(decoded.length)
    elif count:
        same = added(replayed[:count], drafts).length
        gaps["decode"] = (decoded.length - same) / same
    worst = max(abs(value) for value in gaps.values())
    figures: dict[str, Any] = {
        **{"prompts": len(exchanges), "drafts": drafts, "topology": drafting.topology, "temperature": 0.0},
        "tokens": sum(len(each.answer) for each in exchanges),
        "engine": engine.acceptance.as_json() | {"within": [round(engine.low, 4), round(engine.high, 4)]},
        "replay": total.as_json(),
        "decode": decoded.as_json() | {"prompts": count, "along": dtype != "float32"} if count else None,
        "gaps": {name: round(value, 5) for name, value in gaps.items()},
        "gap": round(worst, 5),
        "passed": worst <= run.recipe.serving.max_gap,
        "differences": _differences(exchanges, samples, reference),
    }
    if not figures["passed"]:
        figures["causes"] = causes(run, target, drafting, exchanges, reference, dtype, engine.gap, samples)
    return figures


def _decode(
    run: Run, target: Target, reference: Reference, drafting: Drafting, exchanges: Sequence[Exchange], dtype: str
) -> Acceptance:
    """Reference decoding of the same prompts, in the number type that the engine served in: in fp32 on its own, else
    along the engine's answers, for rounding makes others of them."""
    total = Acceptance.none(drafting.drafts)
    if not exchanges:
        return total
    embedding, most = reference.head.embedding, run.recipe.serving.max_new_tokens
    session = TargetSession(target, getattr(torch, dtype), reference.device, reference.aux_layer_ids)
    drafts = DrafterSession(reference.drafter, embedding, drafting.drafts)
    with Progress("serving (reference decoding)", len(exchanges), "prompts", run.logs_dir) as progress:
        for exchange in exchanges:
            if dtype == "float32":
                decoded = decode_speculative(session, drafts, exchange.prompt, most, 0.0, torch.Generator())
                total.merge(decoded.acceptance)
            else:
                total.merge(decode_along(session, drafts, exchange.prompt, exchange.answer))
            progress.advance(1, f"acceptance length {total.length:.3f}")
    return total


def _differences(
    exchanges: Sequence[Exchange], samples: Sequence[StoredSample], reference: Reference
) -> dict[str, Any]:
    """Answers that differ from those without the drafter, and how near a tie the first differing token was.

    `largest_tie`: the difference of the target's logits of the two tokens; rounding alone decides near ties.
    """
    ties: list[float] = []
    differing = 0
    for exchange, sample in zip(exchanges, samples, strict=True):
        if exchange.answer == exchange.plain:
            continue
        differing += 1
        pairs = zip(exchange.answer, exchange.plain, strict=False)
        first = next((place for place, (a, b) in enumerate(pairs) if a != b), 0)
        if first:  # the state before the first token of an answer isn't stored
            state = sample.final_hidden_states[first - 1].to(reference.device, torch.float32)
            logits = reference.head.lm_head[[exchange.answer[first], exchange.plain[first]]] @ state
            ties.append(float((logits[0] - logits[1]).abs()))
    return {"answers": differing, "of": len(exchanges), "largest_tie": round(max(ties), 4) if ties else None}
