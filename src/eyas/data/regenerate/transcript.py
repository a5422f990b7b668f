"""A conversation while the target writes it: the prompt of each answer, and the samples that come of it."""

from dataclasses import dataclass, field

from eyas.data.encode import Encoder
from eyas.data.records import Conversation, Message
from eyas.data.template import ChatTemplate

# Ends the reasoning of Qwen, DeepSeek, Kimi and GLM, in text that is no special token.
_THOUGHT = "</think>"


@dataclass
class Written:
    """One sample: token ids and the [start, end) of each answer in them."""

    token_ids: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)

    @property
    def loss_mask(self) -> list[int]:
        """1 where the target wrote the token."""
        mask = [0] * len(self.token_ids)
        for start, end in self.answers:
            mask[start:end] = [1] * (end - start)
        return mask


class Transcript:
    """Asks for one answer after the other; each becomes context of the next.

    Where the template leaves earlier turns as they were written, a prompt goes on from the ids already emitted, and all
    answers stand in one sample. Where it rewrites them (drops reasoning), the answer starts a sample of its own, so
    that every answer stands in the context it was written in.

    Args:
        conversation: its supervised turns are open (slots.py).
    """

    def __init__(self, conversation: Conversation, template: ChatTemplate, encoder: Encoder) -> None:
        self._messages = list(conversation.messages)
        self._tools = conversation.tools
        self._open = [place for place, learned in enumerate(conversation.supervised) if learned]
        self._template, self._encoder = template, encoder
        self._text, self._now = "", Written()
        self._prompt_text, self._prompt_ids = "", [0][:0]
        self.samples: list[Written] = []

    @property
    def answers(self) -> int:
        """How many answers are written."""
        return sum(len(sample.answers) for sample in self.samples)

    @property
    def finished(self) -> bool:
        return not self._open

    def next_prompt(self) -> list[int]:
        """Token ids that the next answer follows.

        Raises: Rejected where the template refuses the conversation; DataError where it fails.
        """
        before = self._messages[: self._open[0]]
        text, _ = self._template.render(before, self._tools, add_generation_prompt=True)
        follows = self._follow(text)
        if follows is None:
            self._now = Written()
            follows = self._encoder.encode([text])[0]
        self._prompt_text, self._prompt_ids = text, follows
        return follows

    def _follow(self, text: str) -> list[int] | None:
        """The ids of `text` where it goes on from the present sample, else None."""
        written = self._now.token_ids
        if not written or not text.startswith(self._text):
            return None
        if self._encoder.cuts:
            return written + self._encoder.encode([text[len(self._text) :]])[0]
        whole = self._encoder.encode([text])[0]
        return whole if whole[: len(written)] == written else None

    def write(self, answer: list[int]) -> None:
        """Take the answer to the last prompt, end-of-turn token included."""
        if not self._now.answers:
            self.samples.append(self._now)
        start = len(self._prompt_ids)
        self._now.token_ids = self._prompt_ids + answer
        self._now.answers.append((start, start + len(answer)))
        self._text = self._prompt_text + self._encoder.decode(answer)
        place = self._open.pop(0)
        self._messages[place] = self._messages[place] | self._spoken(answer)

    def _spoken(self, answer: list[int]) -> Message:
        """The answer as templates take it and clients send it back: reasoning apart, and only what follows the last
        special token (a channel's mark, say)."""
        text = self._encoder.decode(answer[:-1] if answer[-1] in self._encoder.ends else answer)
        marks = list(self._encoder.pattern.finditer(text))
        text = text[marks[-1].end() :] if marks else text
        reasoning, thought, spoken = text.rpartition(_THOUGHT)
        if not thought:
            return {"content": text}
        return {"content": spoken.lstrip("\n"), "reasoning_content": reasoning.partition("<think>")[2] or reasoning}
