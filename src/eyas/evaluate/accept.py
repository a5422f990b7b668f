"""Which drafts a verification accepts, and what the target says next.

Temperature 0: the longest prefix of drafts that equals the target's argmax, then the target's own argmax.
Temperature T > 0: draft d with draft probability q is accepted with probability min(1, p/q); the first one refused is
replaced by a sample from max(p - q, 0), renormalised. Every emitted token then has exactly the target's distribution.
Source: Leviathan et al., arXiv:2211.17192, algorithm 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def accept_greedy(drafts: Sequence[int], logits: Tensor) -> tuple[int, int]:
    """(accepted drafts, next token). `logits` [K + 1, V]: row i is what the target says after draft i - 1."""
    wanted = logits.argmax(-1).tolist()
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == wanted[accepted]:
        accepted += 1
    return accepted, wanted[accepted]


def accept_sampled(
    drafts: Sequence[int], draft_probs: Tensor, logits: Tensor, temperature: float, generator: torch.Generator
) -> tuple[int, int]:
    """(accepted drafts, next token) by the lossless rule.

    Args:
        drafts: K target token ids, draft i sampled from draft_probs[i].
        draft_probs: [K, V] over the target's vocabulary, 0 outside the draft vocabulary.
        logits: [K + 1, V] of the target.
        temperature: of the target's distribution, > 0.
    """
    probs, draft_probs = (logits.float() / temperature).softmax(-1).cpu(), draft_probs.cpu()
    for i, token in enumerate(drafts):
        odds = probs[i, token] / draft_probs[i, token]
        if torch.rand((), generator=generator) >= odds:
            return i, sample((probs[i] - draft_probs[i]).clamp(min=0), generator)
    return len(drafts), sample(probs[len(drafts)], generator)


def sample(weights: Tensor, generator: torch.Generator) -> int:
    """A token id drawn in proportion to non-negative weights [V], on the CPU, where generators are: the same draws on
    every device."""
    return int(torch.multinomial(weights.cpu(), 1, generator=generator))
