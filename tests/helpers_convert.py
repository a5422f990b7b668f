"""A tiny target whose last norm isn't all ones, its own text, and the states that it really makes of it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from helpers_store import Sample
from helpers_tiny import make_tiny_target
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from eyas.settings import Target as TargetTable
from eyas.store.format import EngineInfo, Manifest, TargetInfo, sample_id
from eyas.store.writer import StoreWriter
from eyas.target import Target, load_target

AUX_LAYER_IDS = [2, 4, 5]


@dataclass(frozen=True)
class Captured:
    """A sample and its states, bfloat16.

    Attributes:
        layers: [T, layers + 1, H], entry i = the residual stream after i decoder layers, the last one before the norm.
        final: [T, H], after the norm.
    """

    sample: Sample
    layers: torch.Tensor
    final: torch.Tensor

    @property
    def aux(self) -> torch.Tensor:
        return self.layers[:, AUX_LAYER_IDS]

    @property
    def pre_norm(self) -> torch.Tensor:
        return self.layers[:, -1]


def make_target(folder: Path) -> Target:
    make_tiny_target(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    shape = weights["model.norm.weight"].shape
    weights["model.norm.weight"] = torch.rand(shape, generator=generator) * 2.5 + 0.05
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return load_target(TargetTable(path=str(folder)))


@torch.no_grad()
def capture(target: Target, count: int = 12, tokens: int = 30, seed: int = 0) -> list[Captured]:
    """Samples that the target wrote, of 5 to `tokens` tokens; two turns of the assistant in each that is long enough.

    Decoder layers are tapped by hooks, so that a layer id means what the model does and not what a library calls it.
    """
    model = LlamaForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    ids = torch.randint(3, target.vocab_size, (count, 4), generator=generator)
    while ids.shape[1] < tokens:
        chances = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
    taps: list[torch.Tensor] = []
    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(lambda _, args: taps.append(args[0]))
    out = []
    for number, row in enumerate(ids):
        row = row[: int(rng.integers(5, tokens + 1))]
        mask = np.zeros(len(row), bool)
        mask[3 : max(5, len(row) // 2)] = True
        mask[len(row) // 2 + 2 : len(row) - 1] = True
        taps.clear()
        final = model.model(row.unsqueeze(0)).last_hidden_state[0]
        token_ids = row.numpy().astype(np.int32)
        split = "heldout" if number % 6 == 5 else "train"
        sample = Sample(sample_id(token_ids, mask), "chat", split, token_ids, mask)
        out.append(Captured(sample, torch.stack([tap[0] for tap in taps], 1).bfloat16(), final.bfloat16()))
    return out


def manifest_of(target: Target, shard_bytes: int = 1 << 16) -> Manifest:
    info = TargetInfo(
        path=str(target.path),
        architecture=target.architecture,
        model_digest=target.model_digest,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
    )
    return Manifest(
        target=info,
        tokenizer_digest=target.tokenizer_digest,
        template_digest="p" * 32,
        tokens_digest="k" * 32,
        aux_layer_ids=AUX_LAYER_IDS,
        engine=EngineInfo(kind="local", dtype="float32", version="1"),
        shard_bytes=shard_bytes,
    )


def write_captured(url: str, target: Target, captured: list[Captured]) -> None:
    with StoreWriter.open(url, manifest_of(target), [one.sample.entry for one in captured]) as writer:
        for one in captured:
            writer.write(one.sample, 0, one.aux, one.final[torch.from_numpy(one.sample.loss_mask)])
