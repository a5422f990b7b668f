"""Record shapes found in the wild: each becomes the conversation it means."""

import json

import pytest

from eyas.data.clean import clean
from eyas.data.records import Conversation, Pretokenised, Rejected
from eyas.data.shapes import guess_shape, read_record
from eyas.errors import DataError


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def named(*pairs):
    return [{"from": role, "value": content} for role, content in pairs]


CALL = {"name": "weather", "arguments": {"city": "Bern"}}
TOOL = {"name": "weather", "parameters": {}}
TALK = [("user", "hi"), ("assistant", "hello")]

# Name, record, shape, turns it means; the forms of ../shared/data/raw in records of our own.
FORMS = [
    ("messages", {"messages": turns(*TALK), "id": 7}, "messages", TALK),
    ("sharegpt", {"conversations": named(("human", "hi"), ("gpt", "hello"))}, "conversations", TALK),
    ("upper case roles", {"conversations": named(("USER", "hi"), ("ASSISTANT", "hello"))}, "conversations", TALK),
    ("human and bing", {"conversations": named(("Human", "hi"), ("bing", "hello"))}, "conversations", TALK),
    ("prompter and bard", {"conversations": named(("prompter", "hi"), ("bard", "hello"))}, "conversations", TALK),
    ("role and content", {"conversations": turns(*TALK)}, "conversations", TALK),
    ("lmsys", {"conversation": turns(*TALK), "model": "m"}, "conversations", TALK),
    (
        "system key",
        {"system": "be kind", "conversations": named(("user", "hi"), ("assistant", "hello"))},
        "conversations",
        [("system", "be kind"), *TALK],
    ),
    (
        "preference",
        {"conversations": named(("human", "hi")), "chosen": named(("gpt", "hello"))[0], "rejected": {}},
        "conversations",
        TALK,
    ),
    ("preference lists", {"prompt": "hi", "chosen": turns(*TALK), "rejected": turns(*TALK)}, "pair", TALK),
    ("alpaca", {"instruction": "hi", "input": "", "output": "hello"}, "pair", TALK),
    (
        "alpaca with input",
        {"instruction": "add", "input": "1 2", "output": "3"},
        "pair",
        [("user", "add\n\n1 2"), ("assistant", "3")],
    ),
    (
        "alpaca with history",
        {"instruction": "b", "output": "B", "history": [["a", "A"]]},
        "pair",
        [("user", "a"), ("assistant", "A"), ("user", "b"), ("assistant", "B")],
    ),
    ("gsm8k", {"question": "hi", "answer": "hello"}, "pair", TALK),
    ("prompt and completion", {"prompt": "hi", "completion": "hello"}, "pair", TALK),
    ("code instruct", {"input": "hi", "output": "hello", "domain": "generic"}, "pair", TALK),
    (
        "preformatted prompt",
        {"prompt": "Below is a task.\n\n### Instruction:\nhi\n\n### Response:\n", "response": "hello"},
        "pair",
        TALK,
    ),
    (
        "preformatted turns",
        {"input": "### Human: a ### Assistant: A ### Human: b ### Assistant:", "output": "B", "lang": "en"},
        "pair",
        [("user", "a"), ("assistant", "A"), ("user", "b"), ("assistant", "B")],
    ),
    (
        "a question that quotes a dialogue",
        {"question": "Who lies?\n\nHuman: I do.\n\nAssistant: I don't.", "answer": "hello"},
        "pair",
        [("user", "Who lies?\n\nHuman: I do.\n\nAssistant: I don't."), ("assistant", "hello")],
    ),
    (
        "chatml text",
        {"text": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"},
        "text",
        TALK,
    ),
    ("headed text", {"text": "\n\nHuman: hi\n\nAssistant: hello"}, "text", TALK),
    (
        "tree",
        {
            "prompt": {
                "text": "hi",
                "role": "prompter",
                "replies": [
                    {"text": "worse", "role": "assistant", "rank": 1, "replies": []},
                    {"text": "hello", "role": "assistant", "rank": 0, "replies": []},
                ],
            }
        },
        "tree",
        TALK,
    ),
    (
        "moss",
        {
            "meta_instruction": "be moss",
            "chat": {
                "turn_1": {
                    "Human": "<|Human|>: hi<eoh>\n",
                    "Inner Thoughts": "<|Inner Thoughts|>: None<eot>\n",
                    "Tool Responses": "<|Results|>:\nNone\n<eor>\n",
                    "MOSS": "<|MOSS|>: hello<eom>\n",
                }
            },
        },
        "moss",
        [("system", "be moss"), *TALK],
    ),
    (
        "parts",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "value": "i"}]}]},
        "messages",
        [("user", "hi")],
    ),
]


@pytest.mark.parametrize(("record", "shape", "meaning"), [form[1:] for form in FORMS], ids=[form[0] for form in FORMS])
def test_forms(record, shape, meaning):
    assert guess_shape(record, "f, line 1") == shape
    body = read_record(record, shape, "f, line 1").body
    assert isinstance(body, Conversation)
    assert [(message["role"], message["content"]) for message in body.messages] == meaning
    assert body.supervised == [role == "assistant" for role, _ in meaning]


def test_tools_reasoning_and_switched_off_turns():
    record = {
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}], "loss": False},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "It rains.", "reasoning_content": "so", "id": "x"},
        ],
        "tools": json.dumps([TOOL]),
    }
    body = read_record(record, "messages", "f").body
    assert body.supervised == [False, False, False, True]
    assert body.tools == [{"type": "function", "function": TOOL}]
    assert body.messages[3] == {"role": "assistant", "content": "It rains.", "reasoning_content": "so"}
    glaive = named(
        ("human", "weather?"), ("function_call", json.dumps(CALL)), ("observation", "rain"), ("gpt", "Rain.")
    )
    body = read_record({"conversations": glaive, "tools": json.dumps([TOOL])}, "conversations", "f").body
    assert [message["role"] for message in body.messages] == ["user", "assistant", "tool", "assistant"]
    assert body.messages[1]["tool_calls"] == [{"type": "function", "function": CALL}]
    parts = [{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "ok"}]
    parts.append({"type": "tool_call", "value": json.dumps(CALL)})
    (message,) = read_record({"messages": [{"role": "assistant", "content": parts}]}, "messages", "f").body.messages
    assert message["reasoning_content"] == "hm"
    assert message["content"] == "ok"
    assert message["tool_calls"] == [{"type": "function", "function": CALL}]


def test_tokens():
    body = read_record({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, "tokens", "f").body
    assert body == Pretokenised([5, 6, 7], [0, 1, 1])
    record = {"prompt_ids": [5], "response_ids": [6, 7], "messages": [], "kind": "story", "split": "heldout"}
    assert guess_shape(record, "f") == "tokens"
    read = read_record(record, "tokens", "f")
    assert (read.body, read.split, read.kind) == (Pretokenised([5, 6, 7], [0, 1, 1]), "heldout", "story")


FAULTS = [
    ({"conversations": named(("narrator", "x"))}, "conversations", "line 9: unknown role 'narrator'"),
    ({"messages": ["x"]}, "messages", "line 9: a turn that is a str"),
    ({"messages": "x"}, "messages", "line 9: a record with the keys messages"),
    ({"prompt": "x", "answer_text": "y"}, "messages", "line 9: a record with the keys answer_text, prompt"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "tokens", "line 9: 2 input_ids and 1 values in loss_mask"),
    ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "tokens", "line 9: loss_mask holds 2"),
    ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, "tokens", "line 9: a record with the keys"),
    ({"messages": turns(*TALK), "split": "dev"}, "messages", "line 9: split 'dev'"),
]


@pytest.mark.parametrize(("record", "shape", "message"), FAULTS)
def test_faults_name_file_and_line(record, shape, message):
    with pytest.raises(DataError, match=message):
        read_record(record, shape, "f.jsonl, line 9")


def test_unknown_keys_are_named():
    with pytest.raises(DataError, match="line 9: a record with the keys bar, foo"):
        guess_shape({"foo": 1, "bar": 2}, "f.jsonl, line 9")


REJECTED = [
    ({"messages": []}, "empty_conversation"),
    ({"messages": turns(*TALK), "label": False}, "labelled_bad"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}, "not_text"),
    ({"text": "no turns here"}, "no_turns_in_text"),
    ({"conversations": named(("human", "x"), ("function_call", "{"))}, "bad_tool_json"),
]


@pytest.mark.parametrize(("record", "reason"), REJECTED, ids=[reason for _, reason in REJECTED])
def test_rejected_with_a_reason(record, reason):
    with pytest.raises(Rejected) as rejected:
        read_record(record, guess_shape(record, "f"), "f")
    assert rejected.value.reason == reason


def cleaned(*pairs, mend=True):
    messages = turns(*pairs)
    body, mended = clean(Conversation(messages, [role == "assistant" for role, _ in pairs]), mend=mend)
    return [(message["role"], message["content"]) for message in body.messages], list(mended)


ASKED_AGAIN = [("user", "hi"), ("assistant", " \n"), ("user", "?"), ("assistant", "y")]
MENDED = [
    ([("user", "a"), ("user", "b"), TALK[1]], [("user", "a\n\nb"), TALK[1]], "user_turns_in_a_row"),
    ([*TALK, ("user", "left open")], TALK, "turns_after_last_answer"),
    (ASKED_AGAIN, [("user", "hi\n\n?"), ("assistant", "y")], "empty_turn"),
]


@pytest.mark.parametrize(("before", "after", "word"), MENDED, ids=[word for *_, word in MENDED])
def test_mended_or_rejected(before, after, word):
    messages, mended = cleaned(*before)
    assert messages == after
    assert word in mended
    with pytest.raises(Rejected) as rejected:
        cleaned(*before, mend=False)
    assert rejected.value.reason == word


BROKEN = [
    ([("assistant", "a"), ("user", "b"), ("assistant", "c")], "starts_without_user"),
    ([("assistant", "a")], "no_user_turn"),
    ([("system", "a")], "empty_conversation"),
    ([("user", "a"), ("assistant", "")], "no_answer"),
    ([*TALK, ("assistant", "more")], "assistant_turns_in_a_row"),
]


@pytest.mark.parametrize(("pairs", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_what_can_not_be_mended_is_rejected(pairs, reason):
    with pytest.raises(Rejected) as rejected:
        cleaned(*pairs)
    assert rejected.value.reason == reason


def test_an_empty_system_turn_is_left_out_quietly():
    assert cleaned(("system", ""), *TALK) == (TALK, [])
