"""What a recipe can switch in the drafter and its training: each variant against its naive form, in fp64."""

import numpy as np
import pytest
import torch
from helpers_drafter import make_drafter, make_samples, naive_feature, naive_loss

from eyas.drafter.eagle3 import NORM_SWITCHES
from eyas.drafter.pack import pack_samples
from eyas.drafter.ttt import unroll
from eyas.train import fused, lk
from eyas.train.fused import cross_entropy
from eyas.train.loss import pack_loss

CPU = torch.device("cpu")
MASKS = [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 0, 1], [0, 0, 1, 1, 0, 1, 0]]
VARIANTS = [{name: True} for name in NORM_SWITCHES] + [
    {"fc_norm": True, "norm_output": True},
    dict.fromkeys(NORM_SWITCHES, True),
]


def matrices(seed: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    embedding, lm_head = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return embedding, lm_head


@pytest.mark.parametrize("switches", VARIANTS, ids="+".join)
def test_norm_switches_equal_one_row_at_a_time(switches: dict[str, bool]) -> None:
    drafter, samples, (embedding, _) = make_drafter(**switches), make_samples(MASKS), matrices()
    plain = make_drafter()
    packed = pack_samples(samples, 3, torch.float64, CPU)
    starts = np.cumsum([0] + [len(mask) for mask in MASKS])
    differs = False
    for k, hidden in enumerate(unroll(drafter, embedding, packed, 3)):
        step = packed.alignment.steps[k]
        for found, row in zip(hidden, step.row, strict=True):
            sample = np.searchsorted(starts, packed.alignment.rows[row], "right") - 1
            position = int(packed.alignment.rows[row] - starts[sample])
            expected = drafter.norm(naive_feature(drafter, embedding, samples[sample], position, k))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
            unswitched = plain.norm(naive_feature(plain, embedding, samples[sample], position, k))
            differs = differs or not torch.allclose(expected, unswitched)
    assert differs


@pytest.mark.parametrize("switches", VARIANTS, ids="+".join)
def test_norm_switches_have_the_naive_gradients(switches: dict[str, bool]) -> None:
    drafter, samples, (embedding, lm_head) = make_drafter(**switches), make_samples(MASKS), matrices()
    packed = pack_samples(samples, 3, torch.float64, CPU)
    argmax = (packed.final[packed.alignment.final_rows] @ lm_head.T).argmax(-1)
    found = pack_loss(drafter, embedding, lm_head[drafter.draft_ids], packed, argmax, steps=3, decay=0.8).total
    found.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    drafter.zero_grad()
    expected = naive_loss(drafter, embedding, lm_head, samples, steps=3, decay=0.8)
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9, msg=name)


LOSSES = {"ce": cross_entropy, "lk-hybrid": lk.hybrid(3.0), "lk-alpha": lk.log_acceptance}


def naive_row(name: str, logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """A row's loss as the paper writes it, for autograd."""
    q = logits.softmax(-1)
    divergence = sum(p * (p.log() - value.log()) for p, value in zip(probs, q, strict=True))
    alpha = sum(torch.minimum(p, value) for p, value in zip(probs, q, strict=True))
    if name == "ce":
        return divergence - (probs * probs.log()).sum()
    if name == "lk-alpha":
        return -alpha.log()
    weight = torch.exp(-3.0 * alpha.detach())
    return weight * divergence + (1 - weight) * (1 - alpha)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients_equal_the_definition(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(50, 24, generator=generator, dtype=torch.float64)
    probs = (3 * torch.randn(50, 24, generator=generator, dtype=torch.float64)).softmax(-1)
    weights = torch.rand(50, generator=generator, dtype=torch.float64)
    losses, d_logits, drafts = LOSSES[name](logits, probs, weights)
    wanted = logits.clone().requires_grad_()
    rows = torch.stack([naive_row(name, *pair) for pair in zip(wanted, probs, strict=True)])
    (rows * weights).sum().backward()
    torch.testing.assert_close(losses, rows.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(d_logits, wanted.grad, rtol=1e-9, atol=1e-9)
    assert torch.equal(drafts, logits.argmax(-1))


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_towards_lower_loss_is_one_towards_acceptance(name: str) -> None:
    """Descending each loss on one row reaches the target's distribution, where alpha is 1."""
    generator = torch.Generator().manual_seed(3)
    probs = (2 * torch.randn(1, 24, generator=generator, dtype=torch.float64)).softmax(-1)
    logits = 2 * torch.randn(1, 24, generator=generator, dtype=torch.float64)
    for _ in range(3000):
        logits -= 0.3 * LOSSES[name](logits, probs, torch.ones(1, dtype=torch.float64))[1]
    assert torch.minimum(logits.softmax(-1), probs).sum() > 0.9


def test_lk_stays_finite_where_nothing_overlaps() -> None:
    """All of q on one token, all of p on another, in fp32: the log has no room, the gradient still points to p."""
    logits, probs = torch.full((1, 8), -200.0), torch.zeros(1, 8)
    logits[0, 0], probs[0, 1] = 200.0, 1.0
    for name in ("lk-hybrid", "lk-alpha"):
        losses, d_logits, _ = LOSSES[name](logits, probs, torch.ones(1))
        assert torch.isfinite(losses).all() and torch.isfinite(d_logits).all(), name


@pytest.mark.parametrize("name", LOSSES)
def test_packing_and_chunking_change_no_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, samples, (embedding, lm_head) = make_drafter(), make_samples(MASKS), matrices()

    def loss(chosen: list) -> torch.Tensor:
        packed = pack_samples(chosen, 3, torch.float64, CPU)
        argmax = (packed.final[packed.alignment.final_rows] @ lm_head.T).argmax(-1)
        rows = lm_head[drafter.draft_ids]
        options = {"steps": 3, "decay": 0.8, "losses": LOSSES[name]}
        return pack_loss(drafter, embedding, rows, packed, argmax, **options).total

    together = loss(samples)
    monkeypatch.setattr(fused, "CHUNK_ROWS", 3)
    trained = [sample for sample in samples if sample.loss_mask[1:].logical_and(sample.loss_mask[:-1]).any()]
    torch.testing.assert_close(sum(loss([sample]) for sample in trained), together, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_a_large_vocabulary_makes_smaller_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels an fp32 [rows, Vd] takes at most so much, and the loss and its gradient are the same."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    lm_head = torch.randn(40, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    teachers = fused.Teachers.of(torch.randn(50, 16, generator=generator, dtype=torch.float64), lm_head)
    lessons, seen = [fused.Lesson(torch.arange(50), torch.rand(50, generator=generator, dtype=torch.float64))], []
    losses = LOSSES[name]

    def counted(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        seen.append(len(parts[0]))
        return losses(*parts)

    found = []
    for room in (fused.PLAIN_BYTES, 7 * 40 * 4):
        monkeypatch.setattr(fused, "PLAIN_BYTES", room)
        sums, drafts = fused.head_loss([hidden], lm_head, teachers, lessons, counted)
        found.append([sums, drafts, *torch.autograd.grad(sums.sum(), [hidden, lm_head])])
    assert seen == [50, *[7] * 7, 1]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_frozen_head_has_no_gradient_and_changes_no_other() -> None:
    samples, (embedding, lm_head) = make_samples(MASKS), matrices()
    packed = pack_samples(samples, 3, torch.float64, CPU)
    argmax = (packed.final[packed.alignment.final_rows] @ lm_head.T).argmax(-1)
    gradients = []
    for frozen in (False, True):
        drafter = make_drafter()
        drafter.lm_head.weight.requires_grad_(not frozen)
        rows = lm_head[drafter.draft_ids]
        pack_loss(drafter, embedding, rows, packed, argmax, steps=3, decay=0.8).total.backward()
        gradients.append({name: parameter.grad for name, parameter in drafter.named_parameters()})
    assert gradients[1].pop("lm_head.weight") is None
    for name, gradient in gradients[1].items():
        assert torch.equal(gradient, gradients[0][name]), name
