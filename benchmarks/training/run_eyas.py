"""Worker of benchmarks/train.py: Eyas' own step (Learner), fed by its own thread (Feed) from rows in GPU memory."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from common import SHAPES, Job, Timed, World, serve, synchronize
from torch import Tensor

from eyas.drafter.align import IntArray, teaching_positions
from eyas.drafter.eagle3 import Drafter, DrafterConfig
from eyas.drafter.pack import pack_samples
from eyas.settings import Train
from eyas.train.batch import StepPlan
from eyas.train.feed import Feed, Row
from eyas.train.flops import step_flops
from eyas.train.fused import Teachers
from eyas.train.loss import PackLoss, pack_loss
from eyas.train.optim import make_optimizer
from eyas.train.parallel import Parallel
from eyas.train.step import Learner
from eyas.train.watch import Watch


@dataclass(frozen=True)
class Held:
    """A sample as the store gives it, but in GPU memory, with the target's argmax at its teaching positions."""

    id: str
    token_ids: Tensor
    loss_mask: Tensor
    aux_hidden_states: Tensor
    final_hidden_states: Tensor
    argmax: Tensor


class Again:
    """A schedule of the same samples at every step."""

    def __init__(self, samples: int, tokens: int) -> None:
        self.samples, self.tokens = samples, tokens

    def from_step(self, first: int) -> Iterator[StepPlan]:
        while True:
            yield StepPlan(first, first * self.samples, [np.arange(self.samples)], self.tokens)
            first += 1


class Ours(Timed):
    def __init__(self, shape: str, device: str) -> None:
        self.world = World(SHAPES[shape], device)
        self.device, self.dtype, self.shape = self.world.device, self.world.dtype, self.world.shape

    @cached_property
    def embedding(self) -> Tensor:
        return self.world.embedding()

    @cached_property
    def head(self) -> Tensor:
        return self.world.target_head()

    @cached_property
    def lm_head_draft(self) -> Tensor:
        return self.head[self.world.draft_ids.to(self.device)]

    @cached_property
    def drafter(self) -> Drafter:
        return self.new_drafter()

    def new_drafter(self, **switches: bool) -> Drafter:
        s = self.shape
        config = DrafterConfig(
            hidden_size=s.hidden,
            intermediate_size=s.inner,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            head_dim=s.head_dim,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=None,
            max_position_embeddings=131072,
            vocab_size=s.vocab,
            draft_vocab_size=s.draft_vocab,
            aux_layer_ids=[2, 16, 29],
            **switches,
        )
        with torch.device(self.device):
            drafter = Drafter(config)
        self.world.load(drafter)
        drafter.d2t.copy_(self.world.d2t)
        drafter.t2d.copy_(self.world.t2d)
        return drafter.to(self.device)

    def _samples(self, count: int, tokens: int, prompt: int, normed: bool = False) -> list[Held]:
        held = []
        for number in range(count):
            sample = self.world.sample(number, tokens, prompt)
            final = torch.nn.functional.rms_norm(sample.final, (self.shape.hidden,)) if normed else sample.final
            teaches = torch.from_numpy(teaching_positions(sample.mask.numpy())).to(self.device)
            argmax = torch.cat([(part @ self.head.T).argmax(-1) for part in final[teaches].split(4096)])
            states = sample.aux.unflatten(1, (3, -1)), final[sample.mask.to(self.device)]
            held.append(Held(str(number), sample.ids, sample.mask, *states, argmax))
        return held

    def _row(self, samples: list[Held]) -> Row:
        pack = pack_samples(samples, self.shape.ttt_steps, self.dtype, self.device)
        return Row(pack, torch.cat([sample.argmax for sample in samples]))

    def _loss(self, drafter: Drafter, row: Row) -> PackLoss:
        steps = self.shape.ttt_steps
        return pack_loss(
            drafter, self.embedding, self.lm_head_draft, row.pack, row.target_argmax, steps=steps, decay=0.8
        )

    @contextmanager
    def job(self, rows: int, share: float, frozen: bool = False) -> Iterator[Job]:
        """All rows in one packed row; `frozen`: lm_head is not trained."""
        precision = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        steps, device = self.shape.ttt_steps, str(self.device)
        table = Train(ttt_steps=steps, precision=precision, device=device, freeze_lm_head=frozen)
        parallel = Parallel(table, self.device, None)
        self.drafter.lm_head.weight.requires_grad_(not frozen)
        parallel.place(self.drafter)
        optimizer, watch = make_optimizer(self.drafter, table), Watch(self.device)
        samples = self._samples(rows, self.shape.tokens, self.world.prompt(share))
        tokens = rows * self.shape.tokens
        marks: list[Callable[[], None]] = [lambda: None]
        finish = parallel.finish_gradients

        def loss(drafter: Drafter, row: Row) -> PackLoss:
            result = self._loss(drafter, row)
            marks[0]()
            return result

        def finish_gradients(divisor: float) -> None:
            marks[0]()
            finish(divisor)

        def row_of(numbers: IntArray) -> Row:
            return self._row([samples[number] for number in numbers])

        parallel.finish_gradients = finish_gradients  # type: ignore[method-assign]
        learner = Learner(parallel, self.drafter, loss, optimizer, table)
        pack = row_of(np.arange(rows)).pack
        flops = step_flops(self.drafter.config, pack, trained_head=not frozen)
        del pack
        synchronize(self.device)  # the feed reads the samples on a stream of its own
        with Feed(Again(rows, tokens), 0, row_of, parallel) as feed:  # type: ignore[arg-type]
            plans = feed.steps()

            def step(mark: Callable[[], None]) -> None:
                marks[0] = mark
                plan, some = next(plans)
                learner.step(some, 1, 1e-4, tokens, lambda loss, norm: watch.guard(plan.number, loss, norm, []))
                mark()

            yield Job(step, tokens, flops)
        assert watch.check() is None, "a loss or gradient was not finite"

    @torch.no_grad()
    def losses(self, rows: int, tokens: int, prompt: int, normed: bool = False, **switches: bool) -> dict[str, Any]:
        """Mean cross-entropy and mean divergence of each step's trained rows, with the weights that all begin with."""
        row = self._row(self._samples(rows, tokens, prompt, normed))
        loss = self._loss(self.new_drafter(**switches), row)
        index = row.pack.index
        teachers = Teachers.of(row.pack.final[index.final_rows], self.lm_head_draft)
        entropy = torch.cat(
            [
                (part.exp() * -part).sum(-1)
                for part in (
                    teachers.logits[low : low + 4096].float() - teachers.log_sum[low : low + 4096, None]
                    for low in range(0, len(teachers.logits), 4096)
                )
            ]
        )
        mean = loss.per_step / loss.rows
        divergence = mean - torch.stack([entropy[step.teacher].mean() for step in index.steps])
        return {"cross_entropy": mean.tolist(), "divergence": divergence.tolist()}


if __name__ == "__main__":
    serve(Ours(**json.loads(sys.argv[1])))
