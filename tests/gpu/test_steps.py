"""A pack's loss and gradients with the kernels and FlashAttention, against plain torch: `make test-gpu`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from helpers_drafter import make_drafter, make_samples

from eyas.drafter import attention, flash, ops, pack
from eyas.drafter.attention import EagerAttention
from eyas.drafter.eagle3 import NORM_SWITCHES
from eyas.drafter.flash import FlashAttention
from eyas.train import fused, lk
from eyas.train.loss import pack_loss

DEVICE = torch.device("cuda")
SHAPE = {"hidden": 256, "vocab": 512}
ONE_ANSWER = [[0] * 40 + [1] * 60, [0] * 5 + [1] * 300, [1] * 33]
MANY_ANSWERS = [[0] * 9 + [1] * 21 + [0] * 30 + [1] * 40 + [0] * 11, [1] * 3, [0, 1] * 20 + [1] * 9, [0] * 50]


@contextmanager
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernel and no FlashAttention, whatever the dtype."""
    with monkeypatch.context() as patch:
        for module in (ops, attention, fused):
            patch.setattr(module, "has_kernels", lambda x: False)
        patch.setattr(pack, "FlashAttention", EagerAttention)
        yield


def loss_and_gradients(
    masks: list[list[int]], dtype: torch.dtype, losses: fused.RowLosses = fused.cross_entropy, **switches: int
) -> tuple[float, dict[str, Tensor]]:
    drafter = make_drafter(draft=400, heads=8, kv=2, **SHAPE, **switches).float()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.3)
    drafter = drafter.to(DEVICE)
    samples = make_samples(masks, **SHAPE)
    embedding, lm_head = torch.randn(2, 512, 256, generator=torch.Generator().manual_seed(9)).to(DEVICE, dtype)
    packed = pack.pack_samples(samples, 4, dtype, DEVICE)
    argmax = (packed.final[packed.index.final_rows].float() @ lm_head.float().T).argmax(-1)
    head = lm_head[drafter.draft_ids]
    result = pack_loss(drafter, embedding, head, packed, argmax, steps=4, decay=0.8, losses=losses)
    result.total.backward()
    return result.total.item(), {name: parameter.grad.double() for name, parameter in drafter.named_parameters()}


CASES = [{}, *({name: True} for name in NORM_SWITCHES), dict.fromkeys(NORM_SWITCHES, True), {"sliding_window": 32}]


@pytest.mark.parametrize("masks", [ONE_ANSWER, MANY_ANSWERS, ONE_ANSWER + MANY_ANSWERS])
@pytest.mark.parametrize("switches", CASES, ids=lambda case: "+".join(case) or "plain")
@pytest.mark.parametrize("cudnn", [False, True])
def test_kernels_are_as_close_to_fp32_as_plain_bf16_is(
    masks: list[list[int]], switches: dict[str, bool], cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cudnn and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("cuDNN's attention is used on Hopper and Blackwell")
    monkeypatch.setattr(flash, "_pays_for_cudnn", lambda *lengths: cudnn)
    exact, exact_gradients = loss_and_gradients(masks, torch.float32, **switches)
    with plain_torch(monkeypatch):
        _, plain_gradients = loss_and_gradients(masks, torch.bfloat16, **switches)
    used = []
    with monkeypatch.context() as patch:
        original = FlashAttention.__call__
        patch.setattr(FlashAttention, "__call__", lambda self, *a: used.append(1) or original(self, *a))
        found, gradients = loss_and_gradients(masks, torch.bfloat16, **switches)
    assert len(used) == 4, "FlashAttention must have run"
    assert abs(found - exact) < 1e-2 * abs(exact)
    for name, gradient in exact_gradients.items():
        norm = gradient.norm()
        error, allowed = (gradients[name] - gradient).norm(), (plain_gradients[name] - gradient).norm()
        assert error < 1.5 * allowed + 5e-3 * norm, f"{name}: {error / norm:.4f}, plain {allowed / norm:.4f}"


@pytest.mark.parametrize("losses", [lk.hybrid(3.0), lk.log_acceptance])
def test_other_losses_go_through_the_plain_form(losses: fused.RowLosses) -> None:
    exact, _ = loss_and_gradients(ONE_ANSWER, torch.float32, losses)
    found, _ = loss_and_gradients(ONE_ANSWER, torch.bfloat16, losses)
    assert abs(found - exact) < 2e-2 * abs(exact)
