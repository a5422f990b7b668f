"""The evaluate stage: acceptance by replay over all held-out samples, and by reference decoding on some of them."""

from collections import Counter
from typing import Any

import numpy as np
import torch

from eyas import fs
from eyas.drafter.eagle3 import Drafter
from eyas.drafter.pack import group
from eyas.drafter.saved import load_drafter
from eyas.drafter.target import load_target_head
from eyas.drafter.walk import Acceptance, replay
from eyas.engine.local import find_device
from eyas.errors import TargetError, TrainError
from eyas.evaluate.decode import DrafterSession, TargetSession, decode_plain, decode_speculative, why_not
from eyas.evaluate.kinds import Kinds, kinds_of
from eyas.evaluate.prompts import prompt_ids
from eyas.progress import Progress, say
from eyas.record import Inputs, load_record
from eyas.run import Run
from eyas.stages import Result
from eyas.store.reader import SampleRef, StoreReader
from eyas.target import Target, load_target

_PACK_TOKENS = 4096
_WARM_UP = 8  # tokens decoded before the clock is read
_ID_DIGITS = 12  # two of 100,000 ids are alike with a chance of 2 in 100,000


def inputs(run: Run) -> Inputs:
    """What the figures depend on: the drafter (output of the stage before) and [evaluate]."""
    return {f"evaluate.{key}": value for key, value in run.recipe.evaluate.model_dump(mode="json").items()}


def discard(run: Run) -> None:
    fs.remove(run.dir / "eval.json")


def execute(run: Run) -> Result:
    """Measure, write eval.json: after the replay already, and again after decoding, which is left out, with the reason
    in words, where the target can't run in this process."""
    train = load_record(run.dir, "train")
    assert train is not None, "run_stage has looked"
    folder = run.train_dir / train.counts["checkpoint"]
    device = find_device(run.recipe.train.device, "train.device")
    drafter = load_drafter(folder).to(device)
    reader = StoreReader(run.store_url)
    refs = reader.samples("heldout")
    if not refs:
        raise TrainError(
            f"{run.store_url}: no held-out samples to evaluate on",
            expected='a source with split = "heldout", or data.heldout_fraction > 0',
            next=f"{run.command('run', '--redo', 'prepare')}   # after setting one of them",
        )
    target = load_target(run.recipe.target)
    embedding = load_target_head(target, torch.float32, device).embedding
    drafts = run.recipe.evaluate.drafts
    kinds = _kinds(reader, target, drafter)
    replayed, by_source, by_sample = _replay(run, reader, refs, drafter, embedding, kinds)
    result: dict[str, Any] = replayed.as_json() | {"drafts": drafts, "topology": "chain", "temperature": 0.0}
    result["replay"] = replayed.as_json() | {"samples": len(refs)}
    result["by_source"] = {source: acceptance.as_json() for source, acceptance in sorted(by_source.items())}
    result["by_sample"] = by_sample
    if kinds is not None:
        result["kinds"] = kinds.as_json()
    fs.write_json(run.dir / "eval.json", result)  # so that an end of decoding by force leaves it
    if run.recipe.evaluate.decode_prompts:
        why = why_not(target, torch.float32, device)
        if why:
            say(f"evaluate: no reference decoding of {target.path}: {why}")
        result |= {"decode": {"skipped": why}} if why else _decode(run, reader, refs, drafter, embedding)
    fs.write_json(run.dir / "eval.json", result)
    shown = ("acceptance_length", "acceptance_per_position", "wall_s", "lossless")
    counts: dict[str, Any] = {key: result[key] for key in shown if key in result}
    return Result(fs.digest_json({key: result[key] for key in ("replay", "drafts")}), counts)


def _kinds(reader: StoreReader, target: Target, drafter: Drafter) -> Kinds | None:
    """Kinds of all tokens of the held-out answers; None, which is said, where the target's tokenizer isn't there."""
    try:
        tokenizer = target.tokenizer
    except TargetError as error:
        say(f"evaluate: where drafts die is not told: {error.seen}")
        return None
    in_drafts = np.zeros(target.vocab_size, dtype=bool)
    in_drafts[drafter.draft_ids.cpu().numpy()] = True
    return Kinds(
        kinds_of(
            np.flatnonzero(reader.token_counts("heldout")).tolist(),
            tokenizer,
            draft_vocabulary=in_drafts,
            ends=target.eos_token_ids,
            training_counts=reader.token_counts("train"),
        )
    )


def _replay(
    run: Run,
    reader: StoreReader,
    refs: list[SampleRef],
    drafter: Drafter,
    embedding: torch.Tensor,
    kinds: Kinds | None,
) -> tuple[Acceptance, dict[str, Acceptance], dict[str, str]]:
    """The walk over every held-out answer, in fp32: over all samples, over those of each source, and each sample's
    "accepted drafts/verifications" by the first digits of its id, so that two runs can be compared sample by sample."""
    drafts, by_sample = run.recipe.evaluate.drafts, dict[str, str]()
    total, by_source = Acceptance.none(drafts), {ref.source: Acceptance.none(drafts) for ref in refs}
    groups = group(refs, [ref.tokens for ref in refs], _PACK_TOKENS)
    packs = ([reader.read(ref.sample_id) for ref in chosen] for chosen in groups)
    with Progress("evaluate (replay)", len(refs), "samples", run.logs_dir) as progress:
        for sample, hits, acceptance in replay(drafter, embedding, packs, drafts):
            total.merge(acceptance)
            by_source[sample.source].merge(acceptance)
            by_sample[sample.id[:_ID_DIGITS]] = f"{acceptance.accepted_at.sum()}/{acceptance.verifications}"
            if kinds is not None:
                kinds.add(sample.token_ids.numpy(), sample.loss_mask.numpy().astype(bool), hits)
            progress.advance(1, f"acceptance length {total.length:.3f}")
    return total, by_source, by_sample


def _decode(
    run: Run, reader: StoreReader, refs: list[SampleRef], drafter: Drafter, embedding: torch.Tensor
) -> dict[str, Any]:
    """Plain and speculative decoding of the same prompts in this process, in fp32."""
    table = run.recipe.evaluate
    target = TargetSession(
        load_target(run.recipe.target), torch.float32, embedding.device, drafter.config.aux_layer_ids
    )
    session = DrafterSession(drafter, embedding, table.drafts)
    total, same, tokens = Acceptance.none(table.drafts), 0, 0
    wall_s = {"plain": 0.0, "speculative": 0.0}
    chosen = spread(refs, table.decode_prompts)
    prompts = [prompt_ids(reader.read(ref.sample_id)) for ref in chosen]
    # The first forward of each width loads kernels, and plain decoding, which goes first, would pay for both.
    decode_plain(target, prompts[0], _WARM_UP, 0.0, torch.Generator())
    decode_speculative(target, session, prompts[0], _WARM_UP, 0.0, torch.Generator())
    with Progress("evaluate (decoding)", len(chosen), "prompts", run.logs_dir) as progress:
        for prompt in prompts:
            generators = [torch.Generator().manual_seed(table.seed) for _ in range(2)]
            plain = decode_plain(target, prompt, table.decode_tokens, table.temperature, generators[0])
            drafted = decode_speculative(target, session, prompt, table.decode_tokens, table.temperature, generators[1])
            total.merge(drafted.acceptance)
            same += plain.token_ids == drafted.token_ids
            tokens += len(drafted.token_ids)
            wall_s["plain"] += plain.wall_s
            wall_s["speculative"] += drafted.wall_s
            progress.advance(1, f"acceptance length {total.length:.3f}")
    lossless = same == len(chosen) if table.temperature == 0 else None  # sampled answers differ by chance
    figures: dict[str, Any] = {
        "prompts": len(chosen),
        "tokens": tokens,
        "temperature": table.temperature,
        "identical": same,
    }
    figures |= {"speedup": round(wall_s["plain"] / wall_s["speculative"], 3), "dtype": "float32"}
    rounded = {name: round(seconds, 2) for name, seconds in wall_s.items()}
    return {"decode": total.as_json() | figures, "wall_s": rounded, "lossless": lossless}


def spread(samples: list[SampleRef], count: int) -> list[SampleRef]:
    """The first `count` samples, taken from the sources in turn."""
    seen: Counter[str] = Counter()
    turns: list[int] = []
    for sample in samples:
        turns.append(seen[sample.source])
        seen[sample.source] += 1
    order = sorted(range(len(samples)), key=lambda at: (turns[at], at))
    return [samples[at] for at in order[:count]]
