"""Sampled verification of logits on a GPU: `make test-gpu`."""

import torch

from eyas.evaluate.accept import accept_sampled, sample


def test_draws_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    weights, drafts = torch.rand(3, 500).softmax(-1), [7, 300, 41]
    logits = torch.randn(4, 500) * 3
    found = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(5)
        drawn = [sample(weights[0].to(device), generator) for _ in range(20)]
        accepted = [accept_sampled(drafts, weights.to(device), logits.to(device), 0.8, generator) for _ in range(50)]
        found.append((drawn, accepted))
    assert found[0] == found[1]
