"""Record shapes: what keys a source's records have, and how each becomes a conversation or tokens."""

from collections.abc import Mapping
from typing import Any

from eyas.data.records import Conversation, Message, Pretokenised, Record, Rejected
from eyas.errors import DataError

_ROLE_NAMES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
_SPLITS = {"train": "train", "heldout": "heldout", "validation": "heldout", "test": "heldout", "": ""}
# Keys of a message that templates know; others (ids, timestamps, scores) would only change digests.
_MESSAGE_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")


def guess_shape(record: Mapping[str, Any], where: str) -> str:
    """The shape of a record by its keys: `messages`, `conversations` or `tokens`.

    Raises: DataError naming the keys found where none fits.
    """
    if "input_ids" in record or "response_ids" in record:
        return "tokens"
    for shape in ("messages", "conversations"):
        if shape in record:
            return shape
    raise DataError(
        f"{where}: a record with the keys {', '.join(sorted(record))}",
        expected="`messages`, `conversations`, `input_ids` + `loss_mask`, or `prompt_ids` + `response_ids`",
        cause="the source is of a form that Eyas can't guess",
        next="set `format` in that [[data.sources]] table, or rename the keys",
    )


def read_record(record: Mapping[str, Any], shape: str, where: str) -> Record:
    """A record of a known shape.

    Raises: DataError where the record isn't of that shape or names an unknown role; Rejected where it holds nothing
        to learn from.
    """
    body = _read_tokens(record, where) if shape == "tokens" else _read_turns(record, shape, where)
    split = record.get("split") or ""
    if split not in _SPLITS:
        raise DataError(
            f"{where}: split {split!r}", expected="train or heldout", next="set `split` of the source in the recipe"
        )
    kind = record.get("kind") or record.get("source") or ""
    return Record(body, _SPLITS[split], kind if isinstance(kind, str) else "")


def _read_turns(record: Mapping[str, Any], key: str, where: str) -> Conversation:
    turns = record.get(key)
    if not isinstance(turns, list):
        raise _wrong_form(where, record, f"`{key}` to be a list of turns")
    messages, supervised = [], []
    for turn in turns:
        message = _read_turn(turn, where)
        messages.append(message)
        supervised.append(message["role"] == "assistant" and turn.get("loss") not in (False, 0))
    if not messages:
        raise Rejected("empty_conversation")
    return Conversation(messages, supervised, record.get("tools") or None)


def _read_turn(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: a turn that is a {type(turn).__name__}", expected="a turn with role and text")
    name = turn.get("role", turn.get("from"))
    role = _ROLE_NAMES.get(str(name).lower())
    if role is None:
        raise DataError(
            f"{where}: unknown role {name!r}",
            expected=f"one of {', '.join(_ROLE_NAMES)}",
            cause="another naming of roles, or a damaged record",
            next="rename the role in the file",
        )
    content = turn.get("content", turn.get("value"))
    if not isinstance(content, str):
        if content is not None or not turn.get("tool_calls"):
            raise Rejected("no_text", f"a {role} turn whose content is a {type(content).__name__}")
        content = ""
    extra = {key: turn[key] for key in _MESSAGE_KEYS if turn.get(key) is not None}
    return {"role": role, "content": content, **extra}


def _read_tokens(record: Mapping[str, Any], where: str) -> Pretokenised:
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
        raise DataError(f"{where}: loss_mask holds {max(mask)}", expected="0 or 1 for each token")
    return Pretokenised(token_ids, mask)


def _ids(record: Mapping[str, Any], key: str, where: str) -> list[int]:
    values = record.get(key)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise _wrong_form(where, record, f"`{key}` to be a list of whole numbers")
    return values


def _wrong_form(where: str, record: Mapping[str, Any], expected: str) -> DataError:
    return DataError(
        f"{where}: a record with the keys {', '.join(sorted(record))}",
        expected=f"{expected}, as in the source's first record",
        cause="records of several forms in one source",
        next="split the file into one source for each form, or set `format` in its [[data.sources]] table",
    )
