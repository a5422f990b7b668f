"""Token sets and recipes for tests of the capture stage."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from eyas.data.tokens import Sample, TokensWriter, sample_id
from eyas.record import Record, save_record
from eyas.run import Run, open_run
from eyas.target import load_target

RECIPE = """
name = "t"
runs_dir = "{runs}"
target.path = "{target}"
data.sources = [{{ path = "unused.jsonl" }}]
engine = {{ dtype = "float32", device = "cpu" }}
capture.batch_tokens = 128
store = {{ shard_bytes = {shard_bytes}, min_free_bytes = 0 }}
"""


def random_samples(lengths: Sequence[int], *, first_tokens: Sequence[int] = (), seed: int = 0) -> list[Sample]:
    """Samples of these lengths out of tokens 10 to 258, the second half of each supervised, every fifth held out.

    `first_tokens`: the tokens that the first samples begin with.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        ids = rng.integers(10, 259, length).astype(np.int32)
        if number < len(first_tokens):
            ids[0] = first_tokens[number]
        mask = np.arange(length) >= length // 2
        split = "train" if number % 5 else "heldout"
        samples.append(Sample(sample_id(ids, mask), f"source{number % 2}", split, ids, mask))
    return samples


def make_run(
    folder: Path, target: Path, samples: Sequence[Sample], *, shard_bytes: int = 1 << 16, overrides: Sequence[str] = ()
) -> Run:
    """A run whose prepare stage is finished with these samples."""
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(runs=folder / "runs", target=target, shard_bytes=shard_bytes))
    run = open_run(recipe, overrides)
    found = load_target(run.recipe.target)
    facts = {"tokenizer_digest": found.tokenizer_digest, "template_digest": "", "vocab_size": found.vocab_size}
    with TokensWriter(run.tokens_dir) as writer:
        for sample in samples:
            writer.add(sample)
        manifest = writer.finish(facts)
    save_record(run.dir, Record("prepare", {}, manifest["digest"], {}, 0.0))
    return run
