"""Whole files as they are found in the wild: the account of each, and its first kept sample."""

import json

import pytest
from helpers_data import TEMPLATES, make_run
from test_data_prepare import prepared
from test_data_shapes import CALL, FORMS, TALK, TOOL, named, turns

from eyas.data.encode import Encoder
from eyas.target import load_target

# Every form that has an answer, as JSONL and as a JSON array.
ANSWERED = [form for form in FORMS if any(role == "assistant" for role, _ in form[3])]


def texts(run, tokens):
    encoder = Encoder(load_target(run.recipe.target).tokenizer)
    return sorted(encoder.decode(sample.token_ids.tolist()) for sample in tokens)


def chatml(pairs):
    return "\n".join(f"<|im_start|>{role}\n{content}<|im_end|>" for role, content in pairs)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("form", ANSWERED, ids=[form[0] for form in ANSWERED])
def test_a_file_of_each_form(tmp_path, tiny_target, form, suffix):
    _, record, _, meaning = form
    path = tmp_path / f"a.{suffix}"
    lines = [json.dumps(record), json.dumps(record)]
    path.write_text("\n".join(lines) if suffix == "jsonl" else f"[{', '.join(lines)}]")
    run = make_run(tmp_path, tiny_target, [path])
    tokens = prepared(run)
    assert texts(run, tokens) == [chatml(meaning)]
    counts = list(tokens.manifest["by_source"].values())
    assert [(count["read"], count["kept"], count["rejected"]) for count in counts] == [(2, 1, {"duplicate": 1})]


# Name of the file, its records (or text), what is rejected, supervised text of the samples with the Qwen3 template.
ANSWER = "<think>\n\n</think>\n\n{}<|im_end|>"
CALLED = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
FILES = [
    (
        "edge_cases.jsonl",
        [
            {"messages": turns(("user", "a"), ("user", "b"), ("assistant", "one"))},
            {"messages": turns(("user", "a"), ("assistant", "x"), ("assistant", "y"))},
            {"messages": turns(("assistant", "x"), ("user", "a"), ("assistant", "y"))},
            {"messages": turns(("user", "a"), ("assistant", "two"), ("user", "left open"))},
            {"messages": turns(("user", "c"), ("assistant", ""), ("user", "d"), ("assistant", "three"))},
            {"messages": []},
        ],
        {"assistant_turns_in_a_row": 1, "starts_without_user": 1, "empty_conversation": 1},
        [ANSWER.format(text) for text in ("one", "three", "two")],
    ),
    (
        "labelled.json",
        [
            {"messages": turns(*TALK), "label": True},
            {"messages": turns(("user", "b"), ("assistant", "c")), "label": False},
        ],
        {"labelled_bad": 1},
        [ANSWER.format("hello")],
    ),
    (
        "tool_calls.json",
        [
            {
                "conversations": named(
                    ("human", "weather?"),
                    ("function_call", json.dumps(CALL)),
                    ("observation", "rain"),
                    ("gpt", "It rains."),
                ),
                "tools": json.dumps([TOOL]),
            }
        ],
        {},
        [ANSWER.format(CALLED), ANSWER.format("It rains.")],
    ),
    (
        "images_and_thoughts.jsonl",
        [
            {"conversations": turns(("user", "hi"), ("assistant", "<think>Greeting.</think>hello"))},
            {
                "conversations": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "?"}],
                    },
                    {"role": "assistant", "content": "A cat."},
                ]
            },
        ],
        {"not_text": 1},
        [ANSWER.format("<think>Greeting.</think>hello")],
    ),
    (
        "reasoning_parts.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "value": "hi"}]},
                    {
                        "role": "assistant",
                        "content": [{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "hello"}],
                    },
                ],
                "tools": "[]",
            }
        ],
        {},
        ["<think>\nhm\n</think>\n\nhello<|im_end|>"],
    ),
    (
        "reasoning_content.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": "one"},
                    {"role": "assistant", "content": "context", "loss": False},
                    {"role": "user", "content": "two"},
                    {"role": "assistant", "content": "hello", "reasoning_content": "hm"},
                ]
            }
        ],
        {},
        ["<think>\nhm\n</think>\n\nhello<|im_end|>"],
    ),
    ("bare_lists.jsonl", [turns(*TALK)], {}, [ANSWER.format("hello")]),
    (
        "u2028.jsonl",
        [{"messages": turns(("user", "hi"), ("assistant", "he\u2028llo"))}],
        {},
        [ANSWER.format("he\u2028llo")],
    ),
    (
        "one_record.json",
        {"conversations": named(("human", "a"), ("gpt", ""), ("human", "b"), ("gpt", "hello"))},
        {},
        [ANSWER.format("hello")],
    ),
]


@pytest.mark.parametrize(("name", "records", "rejected", "expected"), FILES, ids=[file[0] for file in FILES])
def test_files_in_the_wild(tmp_path, tiny_target, name, records, rejected, expected):
    path = tmp_path / name
    if name.endswith(".json"):
        path.write_text(json.dumps(records, indent=2))
    else:
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    run = make_run(tmp_path, tiny_target, [path], template=str(TEMPLATES / "qwen3.jinja"))
    tokens = prepared(run)
    (counts,) = tokens.manifest["by_source"].values()
    assert counts["read"] == (len(records) if isinstance(records, list) else 1)
    assert counts["rejected"] == rejected
    encoder = Encoder(load_target(run.recipe.target).tokenizer)
    assert sorted(encoder.decode(sample.token_ids[sample.loss_mask].tolist()) for sample in tokens) == sorted(expected)


def test_tool_turns_without_a_template_for_them_are_rejected(tmp_path, tiny_target):
    called = named(("human", "x"), ("function_call", json.dumps(CALL)), ("observation", "y"), ("gpt", "z"))
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps([{"conversations": called}, {"conversations": named(("human", "hi"), ("gpt", "hello"))}])
    )
    (counts,) = prepared(make_run(tmp_path, tiny_target, [path])).manifest["by_source"].values()
    assert counts["rejected"] == {"template_without_tools": 1}


def test_completions_without_prompts(tmp_path, tiny_target):
    """Plain text between rules: documents without turns are counted and rejected one by one."""
    path = tmp_path / "a.txt"
    path.write_text("\n====\n<think> hm </think>\n\nno question\n\n====\n### Human: hi\n### Assistant: hello\n")
    run = make_run(tmp_path, tiny_target, [path])
    tokens = prepared(run)
    assert texts(run, tokens) == [chatml(TALK)]
    (counts,) = tokens.manifest["by_source"].values()
    assert counts["rejected"] == {"no_turns_in_text": 1}
