"""Records to samples: the work that is done once per record, in this process or in many."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eyas import fs
from eyas.data.clean import clean
from eyas.data.encode import Encoder
from eyas.data.filters import Filters
from eyas.data.near import Signature, signature
from eyas.data.read import Chunk
from eyas.data.records import Conversation, Message, Pretokenised, Rejected
from eyas.data.render import Rendered, render_conversation
from eyas.data.shapes import read_record, record_kind
from eyas.data.template import ChatTemplate
from eyas.data.tokens import LossMask, TokenIds, sample_id
from eyas.errors import DataError
from eyas.settings import Data

# Turn marks of common families: where they stand in a text without being special tokens, template or data is of another
# family than the tokenizer.
_FAMILY_MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "<｜User｜>",
    "<|im_user|>",
    "<|start|>",
    "<|user|>",
    "<|assistant|>",
)


class Refusal(NamedTuple):
    """A record that gives no sample: its place in the chunk, line, reason and detail."""

    record: int
    line: int
    reason: str
    detail: str


class Draft(NamedTuple):
    """A sample whose split is not settled yet.

    Attributes:
        record: place of its record in the chunk, from 0.
        line: where its record stands in the file.
        id: sample id.
        split: "train", "heldout", or "" where nothing says.
        conversation: digest of the seed and the prompt before the first answer; decides the split.
    """

    record: int
    line: int
    id: str
    split: str
    conversation: int
    token_ids: TokenIds
    loss_mask: LossMask


@dataclass
class Made:
    """What a chunk gave.

    Attributes:
        kinds: per record, what refines the source's name.
        mended: how often records were mended, by what was done.
        odd: samples whose mask looks wrong, by what is odd about it.
        signatures: (record, sample id, MinHash) of each record with samples, where near-duplicates are looked for.
    """

    kinds: list[str] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    mended: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)
    signatures: list[tuple[int, str, Signature]] = field(default_factory=list)


@dataclass
class Maker:
    """Turns records into samples, or rejects them with a reason. It can be sent to other processes.

    Attributes:
        tools: how the template takes tool calls (template.tool_style).
        filters: what the recipe leaves out on purpose.
    """

    data: Data
    encoder: Encoder
    template: ChatTemplate | None
    vocab_size: int
    tools: str
    filters: Filters

    def __post_init__(self) -> None:
        foreign = [mark for mark in _FAMILY_MARKS if mark not in self.encoder.added]
        self._ends = tuple(self.encoder.special)
        self._foreign = re.compile("|".join(map(re.escape, foreign)) or r"(?!)")

    def make(self, chunk: Chunk, shape: str, split: str) -> Made:
        """All samples of a chunk.

        Args:
            shape: of its records (shapes.py).
            split: the source's own; "" leaves it to the record.
        Raises: DataError with file and line.
        """
        made = Made()
        open_records: list[tuple[int, int, str, list[Rendered]]] = []
        for index, (line, raw) in enumerate(chunk.records()):
            made.kinds.append(record_kind(raw))
            try:
                record = read_record(raw, shape, chunk.place(line))
                if isinstance(record.body, Pretokenised):
                    pairs = [self._as_they_are(body) for body in (record.body, *record.body.further)]
                    self.filters.check_tokens(record.body, split or record.split, self.encoder)
                    made.drafts += self._drafts(index, line, split or record.split, pairs, made)
                else:
                    self.filters.check_turns(record.body, split or record.split)
                    texts = self._render(record.body, chunk.place(line), made)
                    open_records.append((index, line, split or record.split, texts))
            except Rejected as error:
                made.refusals.append(Refusal(index, line, error.reason, error.detail))
        results = iter(self.encoder.encode_rendered([text for *_, texts in open_records for text in texts]))
        for index, line, where, texts in open_records:
            try:
                made.drafts += self._drafts(index, line, where, _taken(results, len(texts)), made)
            except Rejected as error:
                made.refusals.append(Refusal(index, line, error.reason, error.detail))
        return made

    def _as_they_are(self, body: Pretokenised) -> tuple[TokenIds, LossMask]:
        token_ids = np.array(body.token_ids, dtype=np.int64)
        if len(token_ids) and not (token_ids.min() >= 0 and token_ids.max() < self.vocab_size):
            raise Rejected("token_outside_vocabulary", f"ids {token_ids.min()} to {token_ids.max()}")
        loss_mask = np.array(body.loss_mask, dtype=np.bool_)
        self._check_ends(token_ids, loss_mask)
        return token_ids.astype(np.int32), loss_mask

    def _check_ends(self, token_ids: npt.NDArray[np.int64], loss_mask: LossMask) -> None:
        """Refuse a mask that stops before the end-of-turn token: one that is shifted, or counts labels."""
        for end in stretch_ends(loss_mask).tolist():
            if end + 1 < len(token_ids) and token_ids[end + 1] in self.encoder.ends:
                if token_ids[end] in self.encoder.ends:
                    continue
                raise Rejected(
                    "end_of_turn_not_supervised",
                    f"loss_mask ends at token {end}, the end-of-turn token {token_ids[end + 1]} follows: loss_mask[i] "
                    "must say that token i was written by the assistant, its end-of-turn token included",
                )

    def _render(self, body: Conversation, place: str, made: Made) -> list[Rendered]:
        if self.template is None:
            raise DataError(
                f"{place}: a conversation, but the target's tokenizer has no chat template",
                expected="a chat template that turns turns into text",
                cause="a base model, or chat_template.jinja was not copied with the tokenizer",
                next="set data.template to a Jinja file",
            )
        body, mended = clean(body, mend=self.data.mend)
        body = self.with_tools(body)
        for message in body.messages:
            found = self.encoder.pattern.search(message["content"])
            if found:
                raise Rejected("special_token_in_text", f"{found[0]} in a {message['role']} turn")
        try:
            texts = render_conversation(self.template, body, self.encoder.special)
        except DataError as error:
            raise DataError(f"{place}: {error.seen}", cause=error.cause, next=error.next) from None
        if not texts:
            raise Rejected("no_supervised_token", "every assistant turn is marked as context")
        made.mended.update(mended)
        for text in texts:
            foreign = self._foreign.search(text.text)
            if foreign:
                made.odd[f"{foreign[0]} in the text, which is no token of this tokenizer"] += 1
            if not text.text.endswith(self._ends):
                made.odd["an answer without an end-of-turn token"] += 1
        return texts

    def with_tools(self, body: Conversation) -> Conversation:
        """Tool calls in the form the template takes; a record is rejected where it takes none."""
        if not any(message["role"] == "tool" or message.get("tool_calls") for message in body.messages):
            return body
        if not self.tools:
            raise Rejected("template_without_tools", "tool turns, which the chat template would leave out")
        return Conversation([_styled(message, self.tools) for message in body.messages], body.supervised, body.tools)

    def _drafts(
        self, index: int, line: int, split: str, pairs: list[tuple[TokenIds, LossMask]], made: Made
    ) -> list[Draft]:
        """Samples of one record, all with the key of its first prompt."""
        drafts: list[Draft] = []
        fitted, refusals = [], []
        for token_ids, loss_mask in pairs:
            try:
                fitted.append(self._fitted(token_ids, loss_mask))
            except Rejected as error:
                refusals.append(error)
        if not fitted:
            raise refusals[0]
        first_ids, first_mask = fitted[0]
        prompt = first_ids[: int(np.argmax(first_mask))]
        key = int(fs.digest(str(self.data.seed), prompt.tobytes())[:16], 16)
        for token_ids, loss_mask in fitted:
            if loss_mask.all():
                made.odd["everything is supervised"] += 1
            drafts.append(Draft(index, line, sample_id(token_ids, loss_mask), split, key, token_ids, loss_mask))
        if self.data.near_duplicates:
            # The last sample of a record holds the most of its turns.
            made.signatures.append((index, drafts[-1].id, signature(drafts[-1].token_ids)))
        return drafts

    def _fitted(self, token_ids: TokenIds, loss_mask: LossMask) -> tuple[TokenIds, LossMask]:
        """Cut at the last end of a supervised stretch within data.max_tokens."""
        longest = self.data.max_tokens
        if len(token_ids) > longest:
            ends = stretch_ends(loss_mask)
            ends = ends[ends < longest]
            if self.data.too_long == "reject" or not len(ends):
                raise Rejected("too_long", f"{len(token_ids)} tokens, data.max_tokens is {longest}")
            token_ids, loss_mask = token_ids[: ends[-1] + 1], loss_mask[: ends[-1] + 1]
        supervised = int(loss_mask.sum())
        if supervised == 0:
            raise Rejected("no_supervised_token")
        if supervised < self.data.min_supervised_tokens:
            raise Rejected("few_supervised_tokens", f"{supervised} of {self.data.min_supervised_tokens}")
        return token_ids, loss_mask


def stretch_ends(loss_mask: LossMask) -> npt.NDArray[np.intp]:
    """Positions of the last token of each supervised stretch."""
    return np.flatnonzero(loss_mask & ~np.append(loss_mask[1:], False))


def _taken(results: Iterator[tuple[TokenIds, LossMask] | Rejected], count: int) -> list[tuple[TokenIds, LossMask]]:
    """The next `count` results; the first rejection among them stands for the record."""
    taken = [next(results) for _ in range(count)]
    for result in taken:
        if isinstance(result, Rejected):
            raise result
    return [result for result in taken if not isinstance(result, Rejected)]


def _styled(message: Message, style: str) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    styled = []
    for call in calls:
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if style == "text" and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif style == "object" and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise Rejected("bad_tool_json", f"arguments of a tool call: {error}") from None
        styled.append(call | {"function": function | {"arguments": arguments}})
    return message | {"tool_calls": styled}
