"""Speculation must change no token, and replay must walk what decoding lived: all held-out prompts of a run, in fp32.

    python tests/lossless.py RUN_FOLDER [--prompts N] [--tokens N] [--dtype float32]

Decodes every held-out prompt plainly and speculatively (temperature 0), compares the token ids, then captures the very
answers again with the local engine, rounds the states as the store does, and replays them. Prints one line a group of
prompts and one JSON object; exits with 1 where an answer differs or the acceptance lengths are more than 0.01 apart.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from eyas.drafter.saved import load_drafter, newest
from eyas.drafter.target import load_target_head
from eyas.drafter.walk import Acceptance, replay
from eyas.engine.local import LocalEngine
from eyas.evaluate.decode import DrafterSession, TargetSession, decode_plain, decode_speculative
from eyas.evaluate.prompts import prompt_ids
from eyas.run import open_run
from eyas.store.reader import StoreReader
from eyas.target import load_target

CPU = torch.device("cpu")
LARGEST_GAP = 0.01


def stored(engine: LocalEngine, prompt: list[int], answer: list[int]) -> SimpleNamespace:
    """The answer captured again, rounded to bf16 as in a store."""
    tokens = np.array(prompt + answer, dtype=np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    states = next(iter(engine.states([tokens], [mask])))
    return SimpleNamespace(
        id="",
        token_ids=torch.from_numpy(tokens),
        loss_mask=torch.from_numpy(mask),
        aux_hidden_states=states.aux_hidden_states.bfloat16(),
        final_hidden_states=states.final_hidden_states.bfloat16(),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    run = open_run(arguments.run)
    folder = newest(run.train_dir)
    assert folder is not None, f"{run.train_dir}: no checkpoint; run `make demo` first"
    target, drafter = load_target(run.recipe.target), load_drafter(folder)
    drafts, aux_layer_ids = run.recipe.evaluate.drafts, drafter.config.aux_layer_ids
    session = TargetSession(target, torch.float32, CPU, aux_layer_ids)
    embedding = load_target_head(target, torch.float32, CPU).embedding
    drafting = DrafterSession(drafter, embedding, drafts)
    engine = LocalEngine(
        target, run.recipe.engine.model_copy(update={"dtype": "float32", "device": "cpu"}), aux_layer_ids
    )
    reader = StoreReader(run.store_url)
    decoded, replayed = Acceptance.none(drafts), Acceptance.none(drafts)
    generator, different, tokens = torch.Generator(), [], 0
    refs = reader.samples("heldout")[: arguments.prompts]
    for number, ref in enumerate(refs):
        prompt = list(prompt_ids(reader.read(ref.sample_id)))
        plain = decode_plain(session, prompt, arguments.tokens, 0.0, generator)
        fast = decode_speculative(session, drafting, prompt, arguments.tokens, 0.0, generator)
        if plain.token_ids != fast.token_ids:
            different.append(ref.sample_id)
        tokens += len(plain.token_ids)
        decoded.merge(fast.acceptance)
        (walked,) = replay(drafter, embedding, [[stored(engine, prompt, fast.token_ids)]], drafts)
        replayed.merge(walked.acceptance)
        if (number + 1) % 8 == 0:
            lengths = f"{decoded.length:.4f} decoded, {replayed.length:.4f} replayed"
            print(f"{number + 1} prompts, {len(different)} different, {lengths}", flush=True)
    gap = abs(decoded.length - replayed.length)
    result = {"prompts": len(refs), "tokens": tokens, "different": different, "dtype": "float32", "drafts": drafts}
    result |= {"decode": decoded.as_json(), "replay": replayed.as_json(), "gap": round(gap, 5)}
    print(json.dumps(result))
    return int(bool(different) or gap > LARGEST_GAP or not refs)


if __name__ == "__main__":
    sys.exit(main())
