"""Conversations made fit for a chat template: mended where nothing is lost, rejected with a reason elsewhere."""

from collections.abc import Sequence

from eyas.data.records import Conversation, Message, Rejected


def clean(conversation: Conversation, *, mend: bool) -> tuple[Conversation, Sequence[str]]:
    """A conversation that begins with the user and ends with an answer, without empty or doubled turns.

    Args:
        mend: drop empty turns, join user turns that follow one another, drop turns after the last answer. False:
            reject the record instead.
    Returns: the conversation and what was mended, as short words for counting.
    Raises: Rejected.
    """
    mended: list[str] = []
    messages: list[Message] = []
    supervised: list[bool] = []
    for message, learned in zip(conversation.messages, conversation.supervised, strict=True):
        if _is_empty(message):
            if message["role"] != "system":
                mended.append("empty_turn")
        elif messages and messages[-1]["role"] == message["role"] == "user":
            mended.append("user_turns_in_a_row")
            messages[-1] = messages[-1] | {"content": f"{messages[-1]['content']}\n\n{message['content']}"}
        else:
            messages.append(message)
            supervised.append(learned)
    last = max((k for k, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last + 1 < len(messages) and last >= 0:
        mended.append("turns_after_last_answer")
        messages, supervised = messages[: last + 1], supervised[: last + 1]
    if mended and not mend:
        raise Rejected(mended[0])
    _check(messages)
    return Conversation(messages, supervised, conversation.tools), mended


def _is_empty(message: Message) -> bool:
    return not message["content"].strip() and not message.get("tool_calls")


def _check(messages: Sequence[Message]) -> None:
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if not roles:
        raise Rejected("empty_conversation")
    if "user" not in roles:
        raise Rejected("no_user_turn")
    if roles[0] != "user":
        raise Rejected("starts_without_user", f"the first turn is {roles[0]}")
    if "assistant" not in roles:
        raise Rejected("no_answer")
    for before, after in zip(roles, roles[1:], strict=False):
        if before == after == "assistant":
            raise Rejected("assistant_turns_in_a_row")
