"""What a recipe can switch in the drafter and its training: each variant against its naive form, in fp64."""

import numpy as np
import pytest
import torch
from helpers_drafter import make_drafter, make_samples, naive_feature, naive_loss

from eyas.drafter.eagle3 import NORM_SWITCHES
from eyas.drafter.pack import pack_samples
from eyas.drafter.ttt import unroll
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
    for k, features in enumerate(unroll(drafter, embedding, packed, 3)):
        for row, sample in zip(packed.alignment.steps[k].row, packed.alignment.steps[k].sample, strict=True):
            position = int(packed.alignment.rows[row] - starts[sample])
            expected = naive_feature(drafter, embedding, samples[sample], position, k)
            torch.testing.assert_close(features[row], expected, rtol=1e-9, atol=1e-9)
            differs = differs or not torch.allclose(
                expected, naive_feature(plain, embedding, samples[sample], position, k)
            )
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
