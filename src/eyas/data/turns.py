"""Turns in every naming found in the wild, to messages as chat templates take them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.data.records import Conversation, Message, Rejected
from eyas.errors import DataError

ROLE_NAMES = {
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
    "moss": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
# Keys of a message that templates know; others (ids, timestamps, scores) would only change digests.
_MESSAGE_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")

_THOUGHT = re.compile(
    r"\s*<\|begin_of_thought\|>\s*(.*?)\s*<\|end_of_thought\|>\s*"
    r"<\|begin_of_solution\|>\s*(.*?)\s*(?:<\|end_of_solution\|>)?\s*",
    re.DOTALL,
)


def read_turns(turns: Sequence[Any], record: Mapping[str, Any], where: str) -> Conversation:
    """A conversation from a list of turns; `system` and `tools` of the record are taken along.

    Raises: DataError for an unknown role or a turn of another kind; Rejected where there is nothing to read.
    """
    if not turns:
        raise Rejected("empty_conversation")
    messages, supervised = [], []
    system = record.get("system") or record.get("system_prompt")
    if isinstance(system, str) and system.strip() and _role(turns[0], where) != "system":
        messages, supervised = [{"role": "system", "content": system}], [False]
    for turn in turns:
        message = read_turn(turn, where)
        messages.append(message)
        supervised.append(message["role"] == "assistant" and not _switched_off(turn))
    return Conversation(messages, supervised, _tools(record.get("tools")))


def read_turn(turn: Any, where: str) -> Message:
    """One message; text parts of list content are joined, reasoning and tool calls among them put where templates look.

    Raises: DataError for an unknown role; Rejected for content that is no text (images).
    """
    role = _role(turn, where)
    message: Message = {"role": role, "content": ""}
    if len(turn) == 2 and isinstance(turn.get("content"), str):
        return message | _split_reasoning(turn["content"])
    message |= {key: turn[key] for key in _MESSAGE_KEYS if turn.get(key) is not None}
    content = turn.get("content", turn.get("value", turn.get("text")))
    if str(turn.get("role", turn.get("from"))).lower() in ("function_call", "tool_call"):
        message["tool_calls"] = [_tool_call(content)]
    elif isinstance(content, list):
        _read_parts(content, message)
    elif isinstance(content, str):
        message |= _split_reasoning(content)
    elif content is not None:
        raise Rejected("not_text", f"a {role} turn whose content is a {type(content).__name__}")
    return message


def _split_reasoning(content: str) -> Message:
    """Content of a turn; OpenThoughts' marks around reasoning and solution are no text of any model."""
    match = _THOUGHT.fullmatch(content) if "<|begin_of_thought|>" in content else None
    return {"content": match[2], "reasoning_content": match[1]} if match else {"content": content}


def _switched_off(turn: Mapping[str, Any]) -> bool:
    """Whether a turn's `loss`, `train` or `weight` says that it is context only."""
    return any(turn.get(key) is not None and not turn[key] for key in ("loss", "train", "weight"))


def _role(turn: Any, where: str) -> str:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: a turn that is a {type(turn).__name__}", expected="a turn with role and text")
    name = turn.get("role", turn.get("from"))
    role = ROLE_NAMES.get(str(name).lower())
    if role is None:
        raise DataError(
            f"{where}: unknown role {name!r}",
            expected=f"one of {', '.join(ROLE_NAMES)}",
            cause="another naming of roles, or a damaged record",
            next="rename the role in the file",
        )
    return role


def _read_parts(parts: Sequence[Any], message: Message) -> None:
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        value = (part.get("text", part.get("value")) if isinstance(part, dict) else part) or ""
        if kind == "text":
            texts.append(value)
        elif kind in ("reasoning", "thinking"):
            message["reasoning_content"] = message.get("reasoning_content", "") + (part.get("thinking") or value)
        elif kind == "tool_call":
            message.setdefault("tool_calls", []).append(_tool_call(value))
        else:
            raise Rejected("not_text", f"a {message['role']} turn with a part of type {kind}")
    message["content"] = "".join(texts)


def _tool_call(value: Any) -> dict[str, Any]:
    call = _from_json(value, "a tool call")
    if not isinstance(call, dict) or "name" not in call:
        raise Rejected("tool_call_without_name", str(value)[:80])
    return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}


def _tools(value: Any) -> list[Any] | None:
    """Tool descriptions, given as a list or as its JSON text."""
    if not value or (isinstance(value, str) and not value.strip()):
        return None
    tools = _from_json(value, "`tools`")
    if not isinstance(tools, list):
        raise Rejected("bad_tools", "`tools` is no list")
    return [
        tool if isinstance(tool, dict) and "function" in tool else {"type": "function", "function": tool}
        for tool in tools
    ] or None


def _from_json(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise Rejected("bad_tool_json", f"{what}: {error}") from None
