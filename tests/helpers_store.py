"""Small stores for tests: samples, their states by rule, and writing them."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from eyas.store.format import EngineInfo, Manifest, TargetInfo, sample_id
from eyas.store.plan import PlanEntry
from eyas.store.writer import StoreWriter

HIDDEN, VOCAB = 8, 64


@dataclass(frozen=True)
class Sample:
    id: str
    source: str
    split: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]

    @property
    def entry(self) -> PlanEntry:
        return PlanEntry(self.id, self.source, self.split, len(self.token_ids), int(self.loss_mask.sum()))


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder in memory where that is possible: hundreds of small stores, fsyncs and all, in seconds."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


def make_manifest(
    encoding: str = "bf16",
    final_encoding: str = "bf16",
    shard_bytes: int = 2048,
    hidden: int = HIDDEN,
    **changes: object,
) -> Manifest:
    target = TargetInfo(
        path="/models/tiny",
        architecture="LlamaForCausalLM",
        model_digest="m" * 32,
        hidden_size=hidden,
        vocab_size=VOCAB,
        num_layers=8,
    )
    values = {
        "target": target,
        "tokenizer_digest": "t" * 32,
        "template_digest": "p" * 32,
        "tokens_digest": "k" * 32,
        "aux_layer_ids": [2, 4, 5],
        "encoding": encoding,
        "final_encoding": final_encoding,
        "engine": EngineInfo(kind="local", dtype="float32", version="1"),
        "shard_bytes": shard_bytes,
    }
    return Manifest(**(values | changes))


def make_samples(count: int, seed: int = 0, longest: int = 12) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = {}
    while len(samples) < count:
        tokens = int(rng.integers(1, longest + 1))
        ids = rng.integers(0, VOCAB, tokens).astype(np.int32)
        mask = rng.random(tokens) < 0.5
        name = sample_id(ids, mask)
        source, split = ("chat", "code")[len(samples) % 2], "heldout" if len(samples) % 7 == 6 else "train"
        samples[name] = Sample(name, source, split, ids, mask)
    return list(samples.values())


def states(sample: Sample, hidden: int = HIDDEN) -> tuple[torch.Tensor, torch.Tensor]:
    """The aux [T, 3, H] and final [F, H] states of a sample, the same at every call; exact in bfloat16."""
    generator = torch.Generator().manual_seed(int(sample.id[:12], 16))
    aux = torch.randn(len(sample.token_ids), 3, hidden, generator=generator).bfloat16()
    final = torch.randn(int(sample.loss_mask.sum()), hidden, generator=generator).bfloat16()
    return aux, final


def write_rows(writer: StoreWriter, sample: Sample, start: int, end: int, hidden: int = HIDDEN) -> None:
    """Write rows start..end of a sample."""
    aux, final = states(sample, hidden)
    first, last = (int(sample.loss_mask[:place].sum()) for place in (start, end))
    writer.write(sample, start, aux[start:end], final[first:last])


def write_store(
    url: str,
    samples: Sequence[Sample],
    manifest: Manifest | None = None,
    rejected: Iterable[str] = (),
    hidden: int = HIDDEN,
) -> None:
    """A whole store of some samples, in the order given."""
    with StoreWriter.open(
        url, manifest or make_manifest(hidden=hidden), [sample.entry for sample in samples]
    ) as writer:
        for sample in samples:
            if sample.id in set(rejected):
                writer.reject(sample.id, "NaN")
            else:
                write_rows(writer, sample, 0, len(sample.token_ids), hidden)
