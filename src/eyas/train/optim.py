"""Optimizer and learning rate."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.cpu import number_type
from eyas.drafter.eagle3 import Drafter
from eyas.settings import Train


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices between the states, AdamW for lm_head and norms, driven and saved as one optimizer.

    Muon's update of a matrix is its momentum made orthogonal, scaled by 0.2 * sqrt(larger side), whose size is that of
    AdamW's updates: one learning rate and one weight decay serve both.
    Source: Muon is Scalable for LLM Training, arXiv:2502.16982; torch.optim.Muon of torch 2.9.
    """

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self._parts = (muon, adamw)
        self._muon_groups = len(muon.param_groups)
        super().__init__(muon.param_groups + adamw.param_groups, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both. Groups and state are this object's: load_state_dict replaces them here only."""
        split = self._muon_groups
        for part, groups in zip(self._parts, (self.param_groups[:split], self.param_groups[split:]), strict=True):
            part.param_groups, part.state = groups, self.state
            part.step()


class Float32Muon(torch.optim.Muon):
    """Muon whose products are float32: torch's (2.13, optim/_muon.py) are bfloat16 whatever the weights are."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                mean = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
                update = _orthogonal(weight.grad.lerp(mean, momentum), group)
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(update, alpha=-0.2 * math.sqrt(max(weight.shape)) * lr)


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Newton-Schulz: the same singular vectors, singular values near 1."""
    a, b, c = group["ns_coefficients"]
    tall = update.size(0) > update.size(1)
    found = update.T if tall else update
    found = found / found.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found


def step_unless(held: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step, or none at all where `held` (float32 scalar on the device) is 1: no weight, moment or count changes.

    Fused AdamW reads the flag on the device, as it reads a GradScaler's. Muon can't: there the host waits for it.
    """
    if isinstance(optimizer, MuonAndAdamW):
        if not bool(held):
            optimizer.step()
        return
    optimizer.found_inf = held  # type: ignore[attr-defined]
    optimizer.step()


def make_optimizer(drafter: Drafter, table: Train) -> torch.optim.Optimizer:
    """The recipe's optimizer over the fp32 masters that are trained; norms are not decayed."""
    trained = [(name, parameter) for name, parameter in drafter.named_parameters() if parameter.requires_grad]
    matrices = [parameter for _, parameter in trained if parameter.dim() > 1]
    norms = [parameter for _, parameter in trained if parameter.dim() <= 1]
    if table.optimizer == "adamw":
        return _adamw(matrices, norms, table)
    # An output head is no map between states: its rows are tokens of very different frequency (Muon's own advice).
    head = [parameter for name, parameter in trained if name.startswith("lm_head.")]
    hidden = [parameter for name, parameter in trained if parameter.dim() > 1 and not name.startswith("lm_head.")]
    fast = number_type(torch.bfloat16, hidden[0].device) == torch.bfloat16
    kind = torch.optim.Muon if fast else Float32Muon
    muon = kind(hidden, lr=table.lr, weight_decay=table.weight_decay, adjust_lr_fn="match_rms_adamw")
    return MuonAndAdamW(muon, _adamw(head, norms, table))


def _adamw(matrices: Sequence[Tensor], norms: Sequence[Tensor], table: Train) -> torch.optim.AdamW:
    groups = [{"params": matrices, "weight_decay": table.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=table.lr, betas=table.betas, fused=True)


def learning_rate(step: int, steps: int, table: Train) -> float:
    """Linear warmup to lr, then a cosine to min_lr_ratio * lr; `step` counts from 0."""
    warmup = max(1, round(steps * table.warmup))
    if step < warmup:
        return table.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return table.lr * (table.min_lr_ratio + (1 - table.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
