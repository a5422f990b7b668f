"""Worker of benchmarks/train.py: speculators 0.9.0's model, losses and optimizer.

The body of the loop is its trainer's: bf16 autocast over fp32 weights, zero_grad, backward, clip at 1.0, step,
scheduler; without its logging. Its defaults: window of 2,048, norms before fc and residual and of the output, KL,
frozen lm_head. On a GPU its fused losses, FlexAttention and torch.compile, on a CPU its eager loss and SDPA.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from absent import stand_in
from common import SHAPES, Job, Timed, World, serve
from tiles import own_tiles
from transformers import LlamaConfig, get_linear_schedule_with_warmup

stand_in("datasets", "openai")  # only its data loader needs them
from speculators.losses import resolve_loss_config  # noqa: E402
from speculators.models.eagle3 import Eagle3SpeculatorConfig  # noqa: E402
from speculators.models.eagle3.core import Eagle3DraftModel  # noqa: E402
from speculators.models.eagle3.rotary_partial import install_partial_neox_rotary  # noqa: E402
from speculators.train.optimizers import build_optimizers  # noqa: E402
from speculators.train.trainer import TrainerConfig  # noqa: E402

WINDOW = 2048


class Speculators(Timed):
    def __init__(self, shape: str, device: str) -> None:
        self.world = World(SHAPES[shape], device)
        self.device, self.shape = self.world.device, self.world.shape
        self.cuda = self.device.type == "cuda"
        install_partial_neox_rotary()
        if self.cuda:
            own_tiles()
        self.model = self._model()
        tables = TrainerConfig(
            lr=1e-4, num_epochs=1, save_path="unused", optimizer="adamw", weight_decay=0.01, muon_lr=1e-4
        )
        self.optimizers = build_optimizers(self.model, tables)
        self.schedulers = [get_linear_schedule_with_warmup(each, 10, 10000) for each in self.optimizers]
        self.loss_config = resolve_loss_config("kl_div", "fused" if self.cuda else "eager")

    def _model(self) -> Eagle3DraftModel:
        s = self.shape
        layer = LlamaConfig(
            vocab_size=s.vocab,
            hidden_size=s.hidden,
            intermediate_size=s.inner,
            num_hidden_layers=1,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            head_dim=s.head_dim,
            hidden_act="silu",
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            sliding_window=WINDOW,
            use_sliding_window=True,
            layer_types=["sliding_attention"],
        )
        layer._attn_implementation = "simple_flex_attention" if self.cuda else "sdpa"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=s.draft_vocab,
            norm_before_residual=True,
            norm_before_fc=True,
            norm_output=True,
            fc_norm=False,
            eagle_aux_hidden_state_layer_ids=[2, 16, 29],
        )
        with torch.device(self.device):
            model = Eagle3DraftModel(config)
        model.to(self.device)
        model.load_vocab_mappings(self.world.t2d, self.world.d2t)
        self.world.load(model)
        with torch.no_grad():
            model.embed_tokens.weight.copy_(self.world.embedding())
            model.verifier_lm_head.weight.copy_(model.lm_head.weight)
        return model.train()

    def _batch(self, rows: int, tokens: int, prompt: int) -> dict[str, torch.Tensor]:
        """Rows packed and shifted as its collate does it; `tokens` are left of each."""
        samples = [self.world.sample(number, tokens + 1, prompt) for number in range(rows)]
        masks = [sample.mask.to(self.device).long() for sample in samples]
        return {
            "input_ids": torch.cat([sample.ids[1:] for sample in samples])[None],
            "hidden_states": torch.cat([sample.aux[:-1] for sample in samples])[None],
            "verifier_last_hidden_states": torch.cat([sample.final[1:] for sample in samples])[None],
            "loss_mask": torch.cat([mask[1:] for mask in masks])[None],
            "position_ids": torch.arange(1, tokens + 1, device=self.device).repeat(rows)[None],
            "document_ids": torch.arange(rows, device=self.device).repeat_interleave(tokens)[None],
        }

    def _forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.cuda):
            _, loss, metrics = self.model(
                **batch, ttt_steps=self.shape.ttt_steps, ttt_step_loss_decay=0.8, loss_config=self.loss_config
            )
        return loss, metrics

    @contextmanager
    def job(self, rows: int, share: float) -> Iterator[Job]:
        """All rows in one pack."""
        batch, tokens = self._batch(rows, self.shape.tokens, self.world.prompt(share)), rows * self.shape.tokens

        def step(mark: Callable[[], None]) -> None:
            loss, _ = self._forward(batch)
            mark()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            mark()
            for optimizer in self.optimizers:
                optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()
            mark()

        flops = self.world.flops_per_token(trained_head=False, teacher_columns=self.shape.draft_vocab, window=WINDOW)
        yield Job(step, tokens, flops * tokens)

    # Without no_grad, which would compile everything anew.
    def losses(self, rows: int, tokens: int, prompt: int) -> dict[str, Any]:
        """Mean divergence of each step's trained rows, with the weights that all begin with."""
        self.world.load(self.model)
        _, metrics = self._forward(self._batch(rows, tokens, prompt))
        return {"divergence": [float(metrics[f"loss_{k}_sum"]) / 0.8**k for k in range(self.shape.ttt_steps)]}


if __name__ == "__main__":
    serve(Speculators(**json.loads(sys.argv[1])))
