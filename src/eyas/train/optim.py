"""Optimizer and learning rate."""

import math

import torch

from eyas.drafter.eagle3 import Drafter
from eyas.settings import Train


def make_optimizer(drafter: Drafter, table: Train) -> torch.optim.AdamW:
    """AdamW over the fp32 masters; norms are not decayed."""
    matrices = [parameter for parameter in drafter.parameters() if parameter.dim() > 1]
    norms = [parameter for parameter in drafter.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": table.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=table.lr, betas=table.betas, fused=True)


def learning_rate(step: int, steps: int, table: Train) -> float:
    """Linear warmup to lr, then a cosine to min_lr_ratio * lr; `step` counts from 0."""
    warmup = max(1, round(steps * table.warmup))
    if step < warmup:
        return table.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return table.lr * (table.min_lr_ratio + (1 - table.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
