"""Where drafts die: the tokens that drafts met in a walk, by kind, and how many of each kind they got right."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas.drafter.walk import BoolArray, answer_spans, verifications

OUTSIDE, ENDS, DIGITS, PUNCTUATION, SPACE = (
    "outside the draft vocabulary",
    "end of turn",
    "digits",
    "punctuation",
    "space",
)
RARE, WORD, PIECE = "rare", "word", "rest of a word"
# Fewer times in the training answers than this: the drafter has hardly met it.
RARE_BELOW = 10


@dataclass
class Kinds:
    """Counts by kind of the target's token.

    Attributes:
        of: target token id -> kind.
        met: tokens that a draft stood for, all drafts before it accepted.
        right: those of them that the draft equalled; the others ended their verification.
    """

    of: dict[int, str]
    met: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)

    def add(self, token_ids: npt.NDArray[np.int64], loss_mask: BoolArray, hits: BoolArray) -> None:
        """Walk over one sample's answers.

        Args:
            token_ids: int [T].
            loss_mask: bool [T].
            hits: bool [T, K], as `drafter.walk.verifications` takes them.
        """
        for at, offered, accepted in verifications(hits, answer_spans(loss_mask)):
            for place in range(min(accepted + 1, offered)):
                kind = self.of[int(token_ids[at + 1 + place])]
                self.met[kind] += 1
                self.right[kind] += place < accepted

    def as_json(self) -> dict[str, dict[str, int]]:
        """{kind: {"met", "right"}}, the kind that ended most verifications first."""
        order = sorted(self.met, key=lambda kind: (self.right[kind] - self.met[kind], kind))
        return {kind: {"met": self.met[kind], "right": self.right[kind]} for kind in order}


def kinds_of(
    token_ids: Iterable[int],
    tokenizer: Any,
    *,
    draft_vocabulary: BoolArray,
    ends: Iterable[int],
    training_counts: npt.NDArray[np.int64],
) -> dict[int, str]:
    """Kind of each token id.

    Args:
        token_ids: the ids that are asked for; others aren't decoded.
        tokenizer: the target's.
        draft_vocabulary: bool [V]: ids that the drafter can propose.
        ends: ids that end a turn.
        training_counts: int [V]: how often each id stands in the training answers.
    """
    asked, end_ids = sorted(set(token_ids)), set(ends)
    kinds = {}
    for token in asked:
        if not draft_vocabulary[token]:
            kinds[token] = OUTSIDE
        elif token in end_ids:
            kinds[token] = ENDS
        else:
            text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
            kinds[token] = _kind_of(text, rare=training_counts[token] < RARE_BELOW)
    return kinds


def _kind_of(text: str, *, rare: bool) -> str:
    bare = text.strip()
    if not bare:
        return SPACE
    if bare.isdigit():
        return DIGITS
    if not any(character.isalnum() for character in bare):
        return PUNCTUATION
    if rare:
        return RARE
    return WORD if text[:1].isspace() or text[:1].isupper() else PIECE
