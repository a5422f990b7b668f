"""What a source's record is turned into before it is rendered: a conversation, or tokens as they are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


class Rejected(Exception):
    """A record gives no sample.

    Attributes:
        reason: one of few short words, counted per source.
        detail: what was seen in this record.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass
class Conversation:
    """Turns in the form that chat templates take.

    Attributes:
        messages: each with `role` (system, user, assistant or tool) and `content`; other keys are passed to the
            template.
        supervised: per message, whether an assistant turn is learned from (context otherwise).
        tools: tool descriptions for the template, or None.
    """

    messages: list[Message]
    supervised: list[bool]
    tools: list[Any] | None = None


@dataclass
class Pretokenised:
    """Token ids and loss mask (0 or 1 each) as a record gives them.

    Attributes:
        further: samples of the same conversation; all lie in the same split.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    further: list["Pretokenised"] = field(default_factory=list)


@dataclass
class Record:
    """One record of a source.

    Attributes:
        body: what becomes samples.
        split: "train", "heldout", or "" where the record doesn't say.
        kind: refines the source's name in counts; "" where the record doesn't say.
    """

    body: Conversation | Pretokenised
    split: str = ""
    kind: str = ""
