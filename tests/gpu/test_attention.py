"""The flash form of the training-time test against the eager one, on a GPU: `make test-gpu`. CI has no GPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from helpers_drafter import make_drafter, make_samples

from eyas.drafter import ttt
from eyas.drafter.attention import EagerAttention, FlashAttention
from eyas.drafter.pack import pack_samples
from eyas.train.loss import pack_loss

DEVICE = torch.device("cuda")
SHAPE = {"hidden": 256, "vocab": 512}
ONE_ANSWER = [[0] * 40 + [1] * 60, [0] * 5 + [1] * 300, [1] * 33]
MANY_ANSWERS = [[0] * 9 + [1] * 21 + [0] * 30 + [1] * 40 + [0] * 11, [1] * 3, [0, 1] * 20 + [1] * 9, [0] * 50]


def loss_and_gradients(masks: list[list[int]], dtype: torch.dtype, eager: bool, monkeypatch: pytest.MonkeyPatch):
    drafter = make_drafter(draft=400, heads=8, kv=2, **SHAPE).float()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.3)
    drafter = drafter.to(DEVICE)
    samples = make_samples(masks, **SHAPE)
    embedding, lm_head = torch.randn(2, 512, 256, generator=torch.Generator().manual_seed(9)).to(DEVICE, dtype)
    pack = pack_samples(samples, 4, dtype, DEVICE)
    finals = pack.final[torch.from_numpy(pack.alignment.final_rows).to(DEVICE)]
    argmax = (finals.float() @ lm_head.float().T).argmax(-1)
    used = []
    with monkeypatch.context() as patch:
        if eager:
            patch.setattr(EagerAttention, "context", lambda self, keys, values: (keys, values), raising=False)
            patch.setattr(ttt, "FlashAttention", EagerAttention)
        else:
            original = FlashAttention.__call__
            patch.setattr(FlashAttention, "__call__", lambda self, *a: used.append(1) or original(self, *a))
        result = pack_loss(drafter, embedding, lm_head[drafter.draft_ids], pack, argmax, steps=4, decay=0.8)
        result.total.backward()
    assert eager or len(used) == 4, "the flash form must have run"
    return result.total.item(), {name: parameter.grad.double() for name, parameter in drafter.named_parameters()}


@pytest.mark.parametrize("masks", [ONE_ANSWER, MANY_ANSWERS, ONE_ANSWER + MANY_ANSWERS])
def test_flash_is_as_close_to_fp32_as_eager_bf16_is(masks: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    exact, exact_gradients = loss_and_gradients(masks, torch.float32, True, monkeypatch)
    eager, eager_gradients = loss_and_gradients(masks, torch.bfloat16, True, monkeypatch)
    flash, flash_gradients = loss_and_gradients(masks, torch.bfloat16, False, monkeypatch)
    assert abs(flash - exact) < 2e-2 * abs(exact)
    for name, gradient in exact_gradients.items():
        norm = gradient.norm()
        error, allowed = (flash_gradients[name] - gradient).norm(), (eager_gradients[name] - gradient).norm()
        assert error < 1.5 * allowed + 5e-3 * norm, f"{name}: {error / norm:.4f}, eager {allowed / norm:.4f}"
