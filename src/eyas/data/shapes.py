"""Record shapes: which keys a source's records have, and how each shape becomes a conversation or tokens."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eyas.data.records import Conversation, Message, Pretokenised, Record, Rejected
from eyas.data.turns import ROLE_NAMES, read_turns
from eyas.errors import DataError

Raw = Mapping[str, Any]

_SPLITS = {"train": "train", "heldout": "heldout", "validation": "heldout", "test": "heldout", "": ""}
# Question and answer keys of single exchanges, in the order tried.
_PAIRS = (
    ("instruction", ("output", "response", "completion", "answer")),
    ("prompt", ("response", "completion", "answer", "chosen")),
    ("question", ("answer", "response", "solution", "output")),
    ("query", ("response", "answer", "output")),
    ("input", ("output", "response", "answer")),
)
_CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\s*|\Z)", re.DOTALL)
_HEADINGS = re.compile(
    r"(?:(?<!\S)### ?(?P<hash>Human|User|Assistant|System|Instruction|Input|Response) ?:"
    r"|(?:\A\s*|\n\n)(?P<plain>Human|Assistant|USER|ASSISTANT):)[ \n]?"
)
_HEADING_ROLES = {"instruction": "user", "input": "user", "response": "assistant"} | ROLE_NAMES


def guess_shape(record: Raw, where: str) -> str:
    """The shape of a record by its keys.

    Raises: DataError naming the keys found where none fits.
    """
    for shape, fits in _FITS.items():
        if fits(record):
            return shape
    raise DataError(
        f"{where}: a record with the keys {', '.join(sorted(record))}",
        expected="one of the shapes " + ", ".join(_FITS),
        cause="the source is of a form that Eyas can't guess",
        next="set `format` in that [[data.sources]] table, or rename the keys",
    )


def read_record(record: Raw, shape: str, where: str) -> Record:
    """A record of a known shape.

    Raises: DataError where the record isn't of that shape or names an unknown role; Rejected where it holds nothing
        to learn from.
    """
    return Record(_READERS[shape](record, where), record_split(record, where), record_kind(record))


def record_split(record: Raw, where: str) -> str:
    """ "train", "heldout" or "": the record's own `split`."""
    split = record.get("split") or ""
    if split not in _SPLITS:
        raise DataError(f"{where}: split {split!r}", expected="train or heldout", next="set `split` of the source")
    return _SPLITS[split]


def record_kind(record: Raw) -> str:
    """What refines the source's name in counts: the record's `kind` or `source`, where that is a short word."""
    kind = record.get("kind") or record.get("source") or ""
    return kind if isinstance(kind, str) and len(kind) <= 60 else ""


def _read_messages(record: Raw, where: str) -> Conversation:
    if record.get("label") is False:
        raise Rejected("labelled_bad", "`label` is false: an answer not to learn from")
    return read_turns(_list(record, ("messages",), where), record, where)


def _read_conversations(record: Raw, where: str) -> Conversation:
    turns = _list(record, ("conversations", "conversation"), where)
    if isinstance(record.get("chosen"), dict):
        turns = [*turns, record["chosen"]]
    return read_turns(turns, record, where)


def _read_tokens(record: Raw, where: str) -> Pretokenised:
    if "response_ids" in record:
        prompt, response = _ids(record, "prompt_ids", where), _ids(record, "response_ids", where)
        return Pretokenised([*prompt, *response], [0] * len(prompt) + [1] * len(response))
    token_ids, mask = _ids(record, "input_ids", where), _ids(record, "loss_mask", where)
    if len(token_ids) != len(mask):
        raise DataError(
            f"{where}: {len(token_ids)} input_ids and {len(mask)} values in loss_mask",
            expected="one mask value a token",
        )
    if not set(mask) <= {0, 1}:
        odd = next(value for value in mask if value not in (0, 1))
        raise DataError(f"{where}: loss_mask holds {odd}", expected="0 or 1 for each token")
    further = [_read_tokens(each, where) for each in record.get("further") or []]
    return Pretokenised(token_ids, mask, further)


def _read_pair(record: Raw, where: str) -> Conversation:
    pair = _pair(record)
    if pair is None:
        raise _wrong_form(where, record, "a question and an answer")
    question, answer = record[pair[0]], record[pair[1]]
    if isinstance(answer, list):
        return read_turns(answer, record, where)
    if not isinstance(question, str) or not isinstance(answer, str):
        raise Rejected("not_text", f"`{pair[0]}` or `{pair[1]}` is no text")
    history = record.get("history") or []
    turns: list[Message] = []
    for asked, answered in history:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    turns += _parse_prompt(question) or [{"role": "user", "content": question}]
    extra = record.get("input")
    if pair[0] == "instruction" and isinstance(extra, str) and extra.strip():
        turns[-1]["content"] += f"\n\n{extra}"
    return read_turns([*turns, {"role": "assistant", "content": answer}], record, where)


def _read_text(record: Raw, where: str) -> Conversation:
    text = record.get("text")
    if not isinstance(text, str):
        raise _wrong_form(where, record, "`text`")
    turns = parse_text(text)
    if not turns:
        raise Rejected("no_turns_in_text", text.strip()[:80])
    return read_turns(turns, record, where)


def _read_tree(record: Raw, where: str) -> Conversation:
    """The path of best-ranked replies from the root of a tree."""
    turns, node = [], record.get("prompt")
    while isinstance(node, dict):
        turns.append(node)
        replies = [reply for reply in node.get("replies") or [] if not reply.get("deleted")]
        node = min(replies, key=lambda reply: (reply.get("rank") is None, reply.get("rank") or 0), default=None)
    return read_turns(turns, {}, where)


def _read_moss(record: Raw, where: str) -> Conversation:
    turns: list[Message] = [{"role": "system", "content": record.get("meta_instruction") or ""}]
    chat = record.get("chat")
    if not isinstance(chat, dict):
        raise _wrong_form(where, record, "`chat` with turn_1, turn_2...")
    for key in sorted(chat, key=lambda name: int(name.rpartition("_")[2])):
        for name, role in (("Human", "user"), ("Tool Responses", "tool"), ("MOSS", "assistant")):
            # Each text stands between its own marks: "<|Human|>: ...<eoh>".
            text = re.sub(r"^<\|[\w ]+\|>:\s*|<eo[a-z]>\s*$", "", chat[key].get(name) or "")
            if text and text != "None\n" and not (role == "tool" and text.strip() == "None"):
                turns.append({"role": role, "content": text})
    return read_turns(turns, {}, where)


def _read_prompts(record: Raw, where: str) -> Conversation:
    """Questions only: `prepare` rejects them for want of an answer, `regenerate` has them answered."""
    questions = next((record[key] for key in ("turns", "prompt", "question", "instruction") if record.get(key)), None)
    if isinstance(questions, str):
        extra = record.get("input")
        if record.get("instruction") == questions and isinstance(extra, str) and extra.strip():
            questions = f"{questions}\n\n{extra}"
        questions = _parse_prompt(questions) or [questions]
    if not isinstance(questions, list):
        raise Rejected("not_text", "a prompt that is no text")
    turns = [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in questions]
    return read_turns(turns, record, where)


def parse_text(text: str) -> list[Message]:
    """Turns of a text that was rendered with a known layout (ChatML, "### Human:", "Human:", Alpaca); else none."""
    chatml = [{"role": role, "content": content} for role, content in _CHATML.findall(text)]
    if chatml:
        return [turn for turn in chatml if turn["content"]]
    found = list(_HEADINGS.finditer(text))
    ends = [heading.start() for heading in found[1:]] + [len(text)]
    turns: list[Message] = []
    for heading, end in zip(found, ends, strict=False):
        content = text[heading.end() : end].strip()
        role = _HEADING_ROLES[(heading["hash"] or heading["plain"]).lower()]
        if turns and turns[-1]["role"] == role == "user":
            turns[-1]["content"] += f"\n\n{content}"
        elif content:
            turns.append({"role": role, "content": content})
    return turns


def _parse_prompt(text: str) -> list[Message]:
    """Turns of a prompt that ends where an answer is to begin; else none: a question may well quote a dialogue."""
    layout = text.rstrip().endswith(("<|im_start|>assistant", "### Assistant:", "### Response:", "\n\nAssistant:"))
    return [turn for turn in parse_text(text) if turn["content"].strip()] if layout else []


def _pair(record: Raw) -> tuple[str, str] | None:
    for question, answers in _PAIRS:
        if question in record:
            answer = next((key for key in answers if key in record), None)
            if answer:
                return question, answer
    return None


def _list(record: Raw, keys: Sequence[str], where: str) -> list[Any]:
    turns = next((record[key] for key in keys if key in record), None)
    if not isinstance(turns, list):
        raise _wrong_form(where, record, f"`{keys[0]}` to be a list of turns")
    return turns


def _ids(record: Raw, key: str, where: str) -> list[int]:
    values = record.get(key)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise _wrong_form(where, record, f"`{key}` to be a list of whole numbers")
    return values


def _wrong_form(where: str, record: Raw, expected: str) -> DataError:
    return DataError(
        f"{where}: a record with the keys {', '.join(sorted(record))}",
        expected=f"{expected}, as in the source's first record",
        cause="records of several forms in one source",
        next="split the file into one source for each form, or set `format` in its [[data.sources]] table",
    )


_FITS: dict[str, Callable[[Raw], bool]] = {
    "tokens": lambda record: "input_ids" in record or "response_ids" in record,
    "messages": lambda record: "messages" in record,
    "conversations": lambda record: "conversations" in record or isinstance(record.get("conversation"), list),
    "moss": lambda record: "meta_instruction" in record and "chat" in record,
    "tree": lambda record: isinstance(record.get("prompt"), dict),
    "pair": lambda record: _pair(record) is not None,
    "text": lambda record: "text" in record,
    "prompts": lambda record: any(key in record for key in ("prompt", "turns", "question", "instruction")),
}
_READERS: dict[str, Callable[[Raw, str], Conversation | Pretokenised]] = {
    "tokens": _read_tokens,
    "messages": _read_messages,
    "conversations": _read_conversations,
    "moss": _read_moss,
    "tree": _read_tree,
    "pair": _read_pair,
    "text": _read_text,
    "prompts": _read_prompts,
}
