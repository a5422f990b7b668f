"""Worker of benchmarks/train.py: SpecForge 0.2.0's draft model, loss, strategy, optimizer and TrainerCore.train_step.

Offline path (target_repr "hidden_state"): the target's whole head is applied to stored final states. FlexAttention and
its Triton loss need a GPU. It trains lm_head, and keeps bf16 weights beside fp32 ones in its optimizer.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import SHAPES, Job, Timed, World, serve
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.controller import TrainerCore
from specforge.training.strategies.base import Eagle3TrainStrategy


class SpecForge(Timed):
    def __init__(self, shape: str, device: str, compact: bool) -> None:
        self.world = World(SHAPES[shape], device)
        self.device, self.dtype, self.shape, self.compact = (
            self.world.device,
            self.world.dtype,
            self.world.shape,
            compact,
        )
        with tempfile.TemporaryDirectory() as folder:
            self.draft, head = self._modules(Path(folder))
        model = OnlineEagle3Model(
            draft_model=self.draft, length=self.shape.ttt_steps, attention_backend="flex_attention"
        )
        model = model.to(device=self.device, dtype=self.dtype).train()
        self.backend = FSDPTrainingBackend(
            ParallelConfig(), optimizer_factory=lambda module: BF16Optimizer(module, lr=1e-4, total_steps=10000)
        )
        wrapped = self.backend.prepare_model(model, wrap=False, optimizer_target=self.draft)
        self.strategy = Eagle3TrainStrategy(wrapped, target_head=head, compact_teacher=compact)
        self.core = TrainerCore(self.strategy, self.backend)

    def _modules(self, folder: Path) -> tuple[Any, TargetHead]:
        s = self.shape
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": s.hidden,
            "intermediate_size": s.inner,
            "max_position_embeddings": s.tokens,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "num_hidden_layers": 1,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "vocab_size": s.vocab,
        }
        (folder / "config.json").write_text(json.dumps(config))
        own = config | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": s.draft_vocab}
        (folder / "draft.json").write_text(json.dumps(own))
        with torch.device(self.device):
            draft = AutoDraftModel.from_config(
                AutoDraftModelConfig.from_file(str(folder / "draft.json")),
                attention_backend="flex_attention",
                torch_dtype=self.dtype,
            )
            head = TargetHead(str(folder))
        self.world.load(draft)
        with torch.no_grad():
            draft.t2d.copy_(self.world.t2d)
            draft.d2t.copy_(self.world.d2t)
            draft.vocab_mapping_loaded = True
            draft.embed_tokens.weight.copy_(self.world.embedding())
            head.fc.weight.copy_(self.world.target_head())
        draft.freeze_embedding()
        head.freeze_weights()
        return draft.to(self.device, self.dtype), head.eval().to(self.device, self.dtype)

    def _batch(self, rows: int, prompt: int) -> TrainBatch:
        """`loss_mask[j]` is moved to where row j's step 0 is trained by Eyas' rule: SpecForge leaves it unshifted."""
        tokens = self.shape.tokens
        samples = [self.world.sample(number, tokens + 1, prompt) for number in range(rows)]
        mask = torch.stack([sample.mask for sample in samples]).long()
        trained = torch.zeros(rows, tokens, dtype=torch.long)
        trained[:, :-1] = mask[:, 1:-1] * mask[:, 2:]
        return TrainBatch(
            sample_ids=[str(number) for number in range(rows)],
            strategy="eagle3",
            tensors={
                "input_ids": torch.stack([sample.ids[:tokens] for sample in samples]),
                "attention_mask": torch.ones(rows, tokens, dtype=torch.long, device=self.device),
                "loss_mask": trained.to(self.device),
                "hidden_state": torch.stack([sample.aux[:tokens] for sample in samples]),
                "target": torch.stack([sample.final[:tokens] for sample in samples]),
            },
            metadata={"target_repr": "hidden_state"},
        )

    @contextmanager
    def job(self, rows: int, share: float) -> Iterator[Job]:
        """A batch of rows; marks are set around the backend's own backward."""
        batch, tokens = self._batch(rows, self.world.prompt(share)), rows * self.shape.tokens
        backward = type(self.backend).backward

        def step(mark: Callable[[], None]) -> None:
            def marked(loss: torch.Tensor, *, is_boundary: bool = True) -> None:
                mark()
                backward(self.backend, loss, is_boundary=is_boundary)
                mark()

            self.backend.backward = marked
            self.core.train_step(batch)
            mark()

        columns = self.shape.draft_vocab if self.compact else self.shape.vocab
        yield Job(step, tokens, tokens * self.world.flops_per_token(trained_head=True, teacher_columns=columns))

    # Without no_grad, which would compile everything anew.
    def losses(self, rows: int, prompt: int) -> dict[str, Any]:
        """Mean cross-entropy of each step's trained rows, with the weights that all begin with."""
        self.world.load(self.draft)
        batch = self._batch(rows, prompt)
        mask = batch.tensors["loss_mask"]
        means = [float(loss) * mask.numel() for loss in self.strategy.forward_loss(batch).metrics["plosses"]]
        return {"cross_entropy": [total / int(mask[:, k:].sum()) for k, total in enumerate(means)]}


if __name__ == "__main__":
    serve(SpecForge(**json.loads(sys.argv[1])))
