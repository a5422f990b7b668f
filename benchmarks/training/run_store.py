"""Worker of benchmarks/train.py: the whole train stage, from a store on disk, with random states of a known shape."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, Shape, serve
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from shapes import LLAMA_8B, write_tokens

from eyas.data.tokens import Tokens
from eyas.run import Run, open_run
from eyas.store.format import EngineInfo, Manifest, TargetInfo
from eyas.store.plan import PlanEntry
from eyas.store.writer import StoreWriter
from eyas.target import load_target
from eyas.train import loop
from eyas.train.flops import peak_flops


def write_ends(folder: Path, shape: Shape, device: str) -> None:
    """A target folder with all that training reads of it: config, embedding, norm and lm_head."""
    folder.mkdir(parents=True)
    config = LLAMA_8B | {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "eos_token_id": shape.vocab - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    size = (shape.vocab, shape.hidden)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name: torch.randn(size, device=device).mul_(0.02).bfloat16().cpu() for name in names}
    save_file(
        tensors | {"model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16)}, folder / "model.safetensors"
    )


def fill_store(run: Run, device: str) -> None:
    """Capture in name only: random states for every planned sample."""
    recipe, target, tokens = run.recipe, load_target(run.recipe.target), Tokens(run.tokens_dir)
    manifest = Manifest(
        target=TargetInfo.of(target),
        tokenizer_digest=tokens.manifest["tokenizer_digest"],
        template_digest=tokens.manifest["template_digest"],
        tokens_digest=tokens.manifest["digest"],
        aux_layer_ids=target.aux_layer_ids(recipe.drafter.aux_layer_ids),
        encoding=recipe.store.encoding,
        final_encoding=recipe.store.final_encoding,
        engine=EngineInfo(kind="local", dtype="bfloat16", version="random states"),
        shard_bytes=recipe.store.shard_bytes,
    )

    def entries() -> Iterator[PlanEntry]:
        columns = tokens.table(["sample_id", "source", "split", "tokens", "supervised"]).to_pydict()
        yield from (PlanEntry(*values) for values in zip(*columns.values(), strict=True))

    with StoreWriter.open(run.store_url, manifest, entries()) as writer:
        for ids in writer.pending():
            for sample in tokens.fetch(ids):
                size, hidden = len(sample.token_ids), target.hidden_size
                aux = torch.randn(size, 3, hidden, device=device).bfloat16()
                final = torch.randn(int(sample.loss_mask.sum()), hidden, device=device).bfloat16()
                writer.write(sample, 0, aux, final)


class Stored:
    def __init__(self, shape: str, device: str, work: str) -> None:
        self.shape, self.device, self.work = SHAPES[shape], device, Path(work)

    def fill(self, rows: int, share: float, steps: int, encoding: str) -> dict[str, Any]:
        """A store of three steps' samples, for so many steps of `rows` rows each."""
        write_ends(self.work / "target", self.shape, self.device)
        recipe = self.work / "recipe.toml"
        recipe.write_text(f'target.path = "{self.work / "target"}"\ndata.sources = [{{ path = "unused.jsonl" }}]\n')
        settings = [f"name={encoding}", f"runs_dir={self.work / 'runs'}", f"store.encoding={encoding}"]
        settings += [f"train.batch_tokens={rows * self.shape.tokens}", f"train.epochs={steps / 3}"]
        settings += [f"train.draft_vocab_size={self.shape.draft_vocab}", f"train.ttt_steps={self.shape.ttt_steps}"]
        settings += ["store.min_free_bytes=0", f"train.device={self.device}"]
        self.run = open_run(recipe, settings)
        write_tokens(self.run, 3 * rows, self.shape.tokens, share)
        fill_store(self.run, self.device)
        return {"samples": 3 * rows}

    def train(self) -> dict[str, Any]:
        """The whole stage; rates as it records them."""
        counts = loop.execute(self.run).counts
        told = {name: counts[name] for name in ("steps", "tokens_per_s", "data_wait", "mfu") if name in counts}
        return told | {"mfu_peak_flops": peak_flops(torch.device(self.device), torch.bfloat16)}


if __name__ == "__main__":
    serve(Stored(**json.loads(sys.argv[1])))
