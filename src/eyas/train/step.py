"""One optimizer step, on any number of packed rows and processes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eyas.drafter.eagle3 import Drafter
from eyas.settings import Train
from eyas.train.feed import Row
from eyas.train.flops import step_flops
from eyas.train.loss import PackLoss
from eyas.train.optim import step_unless
from eyas.train.parallel import Parallel
from eyas.train.watch import StepSums

# The loss of one packed row, summed over its trained rows.
RowLoss = Callable[[Drafter, Row], PackLoss]
# Loss and gradient norm of a step -> 1 where it may not move the weights, else 0: scalars on the device.
Guard = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StepDone:
    """A finished step, on every process alike.

    Attributes:
        said: sums over all processes of what each of them said.
    """

    sums: StepSums
    said: list[int]


class Learner:
    """The drafter, its loss and its optimizer: all that a step needs besides rows."""

    def __init__(
        self, parallel: Parallel, drafter: Drafter, loss: RowLoss, optimizer: torch.optim.Optimizer, table: Train
    ) -> None:
        self.parallel, self.drafter, self.loss, self.optimizer = parallel, drafter, loss, optimizer
        self.table = table

    def step(
        self, rows: Iterable[Row | None], count: int, lr: float, tokens: int, guard: Guard, said: Sequence[int] = ()
    ) -> StepDone:
        """Learn from all rows of all processes: the mean over what they train. The host does not wait for the device.

        Args:
            rows: `count` of them, the same number on every process; None: no row for this one.
            tokens: of all rows of all processes.
            said: whole numbers that are added up over all processes on the way.
        """
        sums = torch.zeros(1 + 3 * self.table.ttt_steps, dtype=torch.float64, device=self.parallel.device)
        mine, flops, trained_head = 0, 0.0, not self.table.freeze_lm_head
        for number, row in enumerate(rows, start=1):
            # Samples without two supervised tokens in a row train nothing.
            trains = row is not None and row.pack.trained_at_0 > 0
            done = self.parallel.backward(
                partial(self.loss_and_sums, row) if row and trains else None, last=number == count
            )
            if row and done is not None:
                sums += done
                mine += row.pack.trained_at_0
                flops += step_flops(self.drafter.config, row.pack, trained_head=trained_head)
        trained, all_flops, *heard = self.parallel.add([mine, int(flops), *said])
        if not trained:  # moves nothing
            self.optimizer.zero_grad(set_to_none=True)
            return StepDone(StepSums.of_nothing(self.table.ttt_steps, lr, tokens), heard)
        loss, per_step, hits, rows_of = self.parallel.add_tensor(sums).split([1, *[self.table.ttt_steps] * 3])
        self.parallel.finish_gradients(trained)
        norm = self.parallel.clip(self.table.clip)
        mean = loss[0] / trained
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        step_unless(guard(mean, norm), self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        return StepDone(StepSums(mean, per_step / trained, hits, rows_of, norm, lr, tokens, float(all_flops)), heard)

    def loss_and_sums(self, row: Row, drafter: Drafter) -> tuple[Tensor, Tensor]:
        """The row's loss, a scalar with gradient; and of it loss, then loss, hits and rows of each k, float64."""
        loss = self.loss(drafter, row)
        parts = (loss.total.detach()[None], loss.per_step, loss.hits, loss.rows)
        return loss.total, torch.cat([part.double() for part in parts])
