"""One optimizer step: the mean over its trained rows, however they lie in rows, against a naive loss in fp64."""

from collections.abc import Sequence

import pytest
import torch
from helpers_drafter import Sample, make_drafter, make_samples, naive_loss
from torch import Tensor

from eyas.drafter.eagle3 import Drafter
from eyas.drafter.pack import pack_samples
from eyas.settings import Train
from eyas.train.feed import Row
from eyas.train.loss import PackLoss, pack_loss
from eyas.train.parallel import Parallel
from eyas.train.step import Learner, StepDone

CPU = torch.device("cpu")
STEPS, DECAY = 3, 0.8
# The third trains nothing: it has no two supervised tokens in a row.
MASKS = [[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1, 1, 0], [0, 1, 0, 1, 0], [1] * 5, [0] * 3 + [1] * 4]
PACKINGS = [
    [[0, 1, 2, 3, 4]],
    [[0], [1], [2], [3], [4]],
    [[0, 1], [2], [3, 4]],
    [[4, 2], None, [1, 0, 3]],
]


def row_of(samples: Sequence[Sample], head: Tensor) -> Row:
    pack = pack_samples(samples, STEPS, torch.float64, CPU)
    return Row(pack, (pack.final[pack.index.final_rows] @ head.T).argmax(-1))


class Descent(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["lr"])


def learn(rows: Sequence[Row | None], embedding: Tensor, head: Tensor, clip: float) -> tuple[Drafter, StepDone]:
    """A step of plain gradient descent at rate 1: the weights move by the gradient."""
    drafter = make_drafter()
    table = Train(ttt_steps=STEPS, ttt_decay=DECAY, clip=clip, device="cpu")
    parallel = Parallel(table, CPU, None)
    parallel.place(drafter)

    def loss(drafter: Drafter, row: Row) -> PackLoss:
        draft_head = head[drafter.draft_ids]
        return pack_loss(drafter, embedding, draft_head, row.pack, row.target_argmax, steps=STEPS, decay=DECAY)

    learner = Learner(parallel, drafter, loss, Descent(drafter.parameters(), {}), table)
    return drafter, learner.step(rows, len(rows), 1.0, 30, lambda loss, norm: torch.zeros(()), [3, 4])


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_step_learns_the_mean_over_its_trained_rows(packing: list[list[int] | None]) -> None:
    samples = make_samples(MASKS)
    embedding, head = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    rows = [None if numbers is None else row_of([samples[number] for number in numbers], head) for numbers in packing]
    drafter, done = learn(rows, embedding, head, clip=1e9)

    naive = make_drafter()
    rows_at_0 = sum(mask[j + 1] and mask[j + 2] for mask in MASKS for j in range(len(mask) - 2))
    mean = naive_loss(naive, embedding, head, samples, steps=STEPS, decay=DECAY) / rows_at_0
    mean.backward()
    assert float(done.sums.loss) == pytest.approx(float(mean.detach()), abs=1e-9)
    assert done.said == [3, 4]
    for (name, learned), start in zip(drafter.named_parameters(), naive.parameters(), strict=True):
        moved = start.detach() - learned.detach()
        expected = torch.zeros_like(start) if start.grad is None else start.grad
        assert float((moved - expected).abs().max()) < 1e-9, name


def test_gradients_are_clipped_as_a_whole() -> None:
    samples = make_samples(MASKS)
    embedding, head = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    drafter, done = learn([row_of(samples[:2], head), row_of(samples[2:], head)], embedding, head, clip=0.25)
    moved = [start - learned for start, learned in zip(make_drafter().parameters(), drafter.parameters(), strict=True)]
    assert float(done.sums.grad_norm) > 0.25
    assert float(sum(part.detach().square().sum() for part in moved)) ** 0.5 == pytest.approx(0.25, rel=1e-4)


def test_a_step_of_samples_that_train_nothing_moves_nothing() -> None:
    samples = make_samples(MASKS)
    embedding, head = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    drafter, done = learn([row_of([samples[2]], head), None], embedding, head, clip=1.0)
    assert float(done.sums.loss) == 0 and done.sums.tokens == 30
    assert all(torch.equal(*pair) for pair in zip(make_drafter().parameters(), drafter.parameters(), strict=True))
