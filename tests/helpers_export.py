"""A finished run's files with tiny tensors, for tests of export and report: no stage is executed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from eyas.run import Run, open_run

AUX_LAYER_IDS = [2, 4, 5]


def make_recipe(folder: Path, target: Path, extra: str = "") -> Path:
    path = folder / "tiny.toml"
    path.write_text(
        f'runs_dir = "{folder / "runs"}"\n[target]\npath = "{target}"\n[[data.sources]]\npath = "chats.jsonl"\n{extra}'
    )
    return path


def make_run(folder: Path, target: Path, extra: str = "") -> Run:
    return open_run(make_recipe(folder, target, extra))


def drafter_config(draft_vocab_size: int = 96, **changes: Any) -> dict[str, Any]:
    """drafter.json for the tiny target of helpers_tiny (H 48, 4 and 2 heads of 12, vocabulary 259)."""
    config = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "vocab_size": 259,
        "draft_vocab_size": draft_vocab_size,
        "aux_layer_ids": AUX_LAYER_IDS,
    }
    return config | changes


def drafter_tensors(draft_vocab_size: int = 96, vocab_size: int = 259, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random fp32 weights and a random draft vocabulary, written out by hand (not by the code under test)."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads, kv_heads, head_dim, inner = 48, 4, 2, 12, 96
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab_size, hidden),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    targets = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    tensors["d2t"] = targets - torch.arange(draft_vocab_size)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, targets, True)
    return tensors


def write_checkpoint(run: Run, step: int, draft_vocab_size: int = 96, **changes: Any) -> dict[str, torch.Tensor]:
    folder = run.train_dir / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "drafter.json").write_text(json.dumps(drafter_config(draft_vocab_size, **changes)))
    tensors = drafter_tensors(draft_vocab_size, seed=step)
    save_file(tensors, folder / "model.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": step}))
    return tensors


def write_store(run: Run, target_folder: Path, aux_layer_ids: list[int] = AUX_LAYER_IDS) -> None:
    """A small real store: 6 training and 2 held-out samples of 9 tokens, the last 5 supervised, random states."""
    from eyas.data.tokens import Sample, sample_id
    from eyas.settings import Target as TargetTable
    from eyas.store.format import EngineInfo, Manifest, TargetInfo
    from eyas.store.plan import PlanEntry
    from eyas.store.writer import StoreWriter
    from eyas.target import load_target

    target = load_target(TargetTable(path=str(target_folder)))
    info = TargetInfo(
        path=str(target.path),
        architecture=target.architecture,
        model_digest=target.model_digest,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
    )
    manifest = Manifest(
        target=info,
        tokenizer_digest=target.tokenizer_digest,
        template_digest="0" * 32,
        tokens_digest="1" * 32,
        aux_layer_ids=aux_layer_ids,
        engine=EngineInfo(kind="local", dtype="float32", version="transformers 5"),
        shard_bytes=1 << 20,
    )
    generator = torch.Generator().manual_seed(3)
    mask = np.arange(9) >= 4
    samples = []
    for number in range(8):
        token_ids = torch.randint(3, 259, (9,), generator=generator).numpy().astype(np.int32)
        split: Any = "heldout" if number >= 6 else "train"
        samples.append(Sample(sample_id(token_ids, mask), "chats", split, token_ids, mask))
    entries = [PlanEntry(s.id, s.source, s.split, len(s.token_ids), int(s.loss_mask.sum())) for s in samples]
    with StoreWriter.open(run.store_url, manifest, entries) as writer:
        for sample in samples:
            aux = torch.randn(9, 3, target.hidden_size, generator=generator)
            writer.write(sample, 0, aux, torch.randn(5, target.hidden_size, generator=generator))


def write_record(
    run: Run, stage: str, output: str, counts: dict[str, Any] | None = None, duration_s: float = 1.5
) -> None:
    from eyas.record import Record, save_record

    save_record(run.dir, Record(stage, {"key": "value"}, output, counts or {}, duration_s))
