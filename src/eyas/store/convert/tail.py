"""The end of the target: its last norm and lm_head, as far as converting final states needs them.

All supported targets end with RMSNorm: post = pre / rms(pre) * w. The scale of `pre` is gone in `post`, so post / w is
another pre-norm state than the captured one, but one that the norm takes to the same post-norm state.
"""

from collections.abc import Iterable

import torch

from eyas import checkpoint
from eyas.errors import TargetError
from eyas.target import Target


class FinalNorm:
    """The target's last norm.

    Attributes:
        weight: float32 [H].
        eps: added to the mean square.
    Raises: TargetError where the folder hasn't exactly one, or it can't be divided by.
    """

    def __init__(self, target: Target) -> None:
        self.weight, self.eps = checkpoint.read_float(target, "norm").float(), target.rms_norm_eps
        zeros = int((self.weight == 0).sum())
        if zeros:
            raise TargetError(
                f"{target.path}: {checkpoint.name_of(target, 'norm')} has {zeros} zeros",
                expected="none: final states are divided by them",
            )

    def to_post(self, pre: torch.Tensor) -> torch.Tensor:
        """[n, H] before the norm -> after it, in bfloat16 (rounded once)."""
        wide = pre.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(torch.bfloat16)

    def to_pre(self, post: torch.Tensor) -> torch.Tensor:
        """[n, H] after the norm -> a state of mean square 1 that the norm takes there, in bfloat16."""
        return (post.float() / self.weight).to(torch.bfloat16)


class Fit:
    """How well final states predict the text: the mean log-probability of the next supervised token.

    A wrong convention shows here, where nothing in a folder says it.
    """

    def __init__(self, target: Target, norm: FinalNorm) -> None:
        self._head = checkpoint.read_float(target, "lm_head").float()
        self._norm = norm

    def measure(
        self, samples: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> tuple[float, float, int] | None:
        """Over samples of (ids [T], mask [T], final states [T, H] as the folder has them).

        Returns: mean log-probability with the states taken as post-norm, as pre-norm, and positions; None without any.
        """
        sums, count = torch.zeros(2, dtype=torch.float64), 0
        for ids, mask, final in samples:
            at = (mask[:-1].bool() & mask[1:].bool()).nonzero().flatten()[:256]  # enough, and 128k logits each
            labels = ids[1:][at].long().unsqueeze(-1)
            for place, states in enumerate((final[at].float(), self._norm.to_post(final[at]).float())):
                sums[place] += (states @ self._head.T).log_softmax(-1).gather(-1, labels).sum().double()
            count += len(at)
        return (float(sums[0] / count), float(sums[1] / count), count) if count else None
