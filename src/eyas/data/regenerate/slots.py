"""Records to conversations whose answers are still to be written."""

from eyas import fs
from eyas.data.clean import clean
from eyas.data.make import Maker
from eyas.data.records import Conversation, Message, Pretokenised, Record, Rejected

# Stands for an answer until it is written; `clean` drops empty turns.
_OPEN = "\ufdd4"


def open_conversation(record: Record, maker: Maker, split: str, *, prompts: bool) -> Conversation:
    """A conversation in which each supervised turn is one that the target writes; its content is empty.

    Turns that are context only (system, tools, answers switched off, calls of tools) stay as they are. A question that
    comes last is answered too.

    Args:
        split: of the record, for the recipe's filters.
        prompts: the record holds questions only: each gets an answer.
    Raises: Rejected.
    """
    body = record.body
    if isinstance(body, Pretokenised):
        raise Rejected("tokens_already", "token ids can't be asked again: name the source they were made from")
    maker.filters.check_turns(body, split)
    messages: list[Message] = []
    supervised: list[bool] = []
    for place, (message, learned) in enumerate(zip(body.messages, body.supervised, strict=True)):
        written = learned and not message.get("tool_calls")
        messages.append({"role": "assistant", "content": _OPEN} if written else message)
        supervised.append(written)
        next_role = body.messages[place + 1]["role"] if place + 1 < len(body.messages) else ""
        if message["role"] in ("user", "tool") and (not next_role or (prompts and next_role == "user")):
            messages.append({"role": "assistant", "content": _OPEN})
            supervised.append(True)
    tidy, _ = clean(Conversation(messages, supervised, body.tools), mend=maker.data.mend)
    for message in tidy.messages:
        found = maker.encoder.pattern.search(message["content"])
        if found:
            raise Rejected("special_token_in_text", f"{found[0]} in a {message['role']} turn")
    tidy = maker.with_tools(tidy)
    if not any(tidy.supervised):
        raise Rejected("no_answer_to_write", "every assistant turn is marked as context")
    emptied = [
        message | {"content": ""} if learned else message
        for message, learned in zip(tidy.messages, tidy.supervised, strict=True)
    ]
    return Conversation(emptied, tidy.supervised, tidy.tools)


def conversation_id(conversation: Conversation) -> str:
    """Identity of what is asked, 32 hex digits: turns, tools, and which turns are the target's to write."""
    return fs.digest_json([conversation.messages, conversation.supervised, conversation.tools])
