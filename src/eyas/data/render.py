"""Conversations to text with the assistant's own characters marked.

What the assistant writes is what follows the generation prompt, up to and including its end-of-turn token. It is
found per turn k by rendering: P = messages before k with the generation prompt, Q = messages up to k; Q must start with
P, and the rest of Q is the turn. A template with {% generation %} marks says the same itself. Where P does not start
with the Q of an earlier turn, the template rewrites that turn (drops its reasoning, closes it otherwise): then the
later turn becomes a sample of its own, so that every turn is learned in the context it was written in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from eyas.data.records import Conversation, Message, Rejected
from eyas.data.template import ChatTemplate

Span = tuple[int, int]


@dataclass
class Rendered:
    """One text.

    Attributes:
        text: ends with its last span.
        spans: [start, end) characters written by the assistant, in order; end lies after the end-of-turn token.
    """

    text: str
    spans: list[Span] = field(default_factory=list)


def render_conversation(
    template: ChatTemplate, conversation: Conversation, special_tokens: Sequence[str]
) -> list[Rendered]:
    """All supervised turns, in as few texts as the template allows: one where it never rewrites earlier turns.

    Args:
        special_tokens: strings of the tokenizer's special tokens; the last of them in a turn ends it.
    Raises: Rejected where a turn can't be told from what surrounds it; see ChatTemplate.render for the rest.
    """
    ends = tuple(special_tokens)
    done: list[Rendered] = []
    current = Rendered("")
    for k, (message, supervised) in enumerate(zip(conversation.messages, conversation.supervised, strict=True)):
        if message["role"] != "assistant" or not supervised:
            continue
        prompt, whole, spans = _render_turn(template, conversation, k)
        if current.spans and not prompt.startswith(current.text):
            done.append(_trimmed(current))
            current = Rendered("")
        current.text = whole
        current.spans += [_with_end_of_turn(whole, span, ends) for span in spans]
    if current.spans:
        done.append(_trimmed(current))
    return done


def _render_turn(template: ChatTemplate, conversation: Conversation, k: int) -> tuple[str, str, list[Span]]:
    """What stands before turn k, the text up to its end, and the spans of turn k in it."""
    messages: list[Message] = conversation.messages
    whole, marked = template.render(messages[: k + 1], conversation.tools)
    if template.marks_generation:
        before, _ = template.render(messages[:k], conversation.tools)
        spans = [span for span in marked if span[0] >= len(before)]
        if not whole.startswith(before) or not spans:
            raise Rejected("turn_not_marked", f"no generation mark in turn {k + 1}, or it changes the turns before it")
        return before, whole, spans
    prompt, _ = template.render(messages[:k], conversation.tools, add_generation_prompt=True)
    if not whole.startswith(prompt):
        raise Rejected(
            "generation_prompt_differs", f"turn {k + 1}: {_difference(prompt, whole)} with and without its answer"
        )
    return prompt, whole, [(len(prompt), len(whole))]


def _with_end_of_turn(text: str, span: Span, ends: tuple[str, ...]) -> Span:
    """A span that closes with its end-of-turn token: text after that token is the template's, not the assistant's."""
    start, end = span
    written = text[start:end]
    closed = written.rstrip()
    if closed.endswith(ends):
        return start, start + len(closed)
    # Marks that enclose the text alone: the token behind them is still the assistant's to write.
    rest = text[end:]
    behind = next((token for token in ends if rest.startswith(token)), "")
    return (start, end + len(behind)) if behind else (start, start + len(closed))


def _trimmed(rendered: Rendered) -> Rendered:
    return Rendered(rendered.text[: rendered.spans[-1][1]], rendered.spans)


def _difference(prompt: str, whole: str) -> str:
    """The first characters that differ, quoted."""
    at = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
    return f"{prompt[at : at + 30]!r} and {whole[at : at + 30]!r} at character {at}"
