"""What is asked, how answers become samples, and a journal that no crash can spoil."""

import json
import random

import pytest
from helpers_data import exchange, make_encoder, make_run, make_template, write_lines

from eyas.data import prepare
from eyas.data.records import Conversation, Record, Rejected
from eyas.data.regenerate.journal import Journal, content_digest, entries
from eyas.data.regenerate.plan import make_plan
from eyas.data.regenerate.slots import conversation_id, open_conversation
from eyas.data.regenerate.transcript import Transcript, Written
from eyas.data.render import render_conversation
from eyas.data.shapes import guess_shape, read_record
from eyas.data.tokens import Tokens
from eyas.errors import DataError, RecipeError
from eyas.settings import Regenerate
from eyas.target import load_target


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


@pytest.fixture(scope="module")
def maker(tiny_target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("maker")
    run = make_run(folder, tiny_target, [write_lines(folder / "a.jsonl", [exchange("q", "a")])])
    return prepare.make_maker(run.recipe.data, load_target(run.recipe.target))


def opened(maker, raw):
    shape = guess_shape(raw, "here")
    return open_conversation(read_record(raw, shape, "here"), maker, "", prompts=shape == "prompts")


OPENED = [
    ({"prompt": "q"}, ["user", "ASSISTANT"]),
    ({"question": "q", "id": 7}, ["user", "ASSISTANT"]),
    ({"instruction": "do", "input": "this"}, ["user", "ASSISTANT"]),
    ({"turns": ["one", "two"]}, ["user", "ASSISTANT", "user", "ASSISTANT"]),
    ({"system": "be brief", "prompt": "q"}, ["system", "user", "ASSISTANT"]),
    ({"prompt": [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]}, ["user", "ASSISTANT"] * 2),
    ({"messages": [turn("user", "q"), turn("assistant", "old")]}, ["user", "ASSISTANT"]),
    ({"messages": [turn("user", "q"), turn("assistant", "")]}, ["user", "ASSISTANT"]),
    ({"messages": [turn("user", "q"), turn("assistant", "old"), turn("user", "more")]}, ["user", "ASSISTANT"] * 2),
    (
        {
            "messages": [
                turn("user", "q"),
                turn("assistant", "kept", weight=0),
                turn("user", "w"),
                turn("assistant", "x"),
            ]
        },
        ["user", "assistant", "user", "ASSISTANT"],
    ),
]


@pytest.mark.parametrize(("raw", "roles"), OPENED)
def test_which_turns_the_target_writes(maker, raw, roles):
    conversation = opened(maker, raw)
    seen = [
        message["role"].upper() if learned else message["role"]
        for message, learned in zip(conversation.messages, conversation.supervised, strict=True)
    ]
    assert seen == roles
    for message, learned in zip(conversation.messages, conversation.supervised, strict=True):
        assert bool(message["content"]) != learned


def test_the_instructions_input_is_part_of_the_question(maker):
    assert opened(maker, {"instruction": "do", "input": "this"}).messages[0]["content"] == "do\n\nthis"


def test_identity_is_what_is_asked(maker):
    old = opened(maker, exchange("q", "old"))
    assert conversation_id(old) == conversation_id(opened(maker, exchange("q", "new")))
    assert conversation_id(old) == conversation_id(opened(maker, {"prompt": "q"}))
    assert conversation_id(old) != conversation_id(opened(maker, {"prompt": "q2"}))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"messages": [turn("assistant", "a")]}, "no_user_turn"),
        ({"messages": [turn("user", "q"), turn("assistant", "a", train=False)]}, "no_answer_to_write"),
        ({"messages": [turn("user", "a<|im_end|>b"), turn("assistant", "a")]}, "special_token_in_text"),
        ({"input_ids": [3, 4], "loss_mask": [0, 1]}, "tokens_already"),
        ({"prompt": 7}, "not_text"),
    ],
)
def test_what_can_t_be_asked(maker, raw, reason):
    with pytest.raises(Rejected) as rejected:
        opened(maker, raw)
    assert rejected.value.reason == reason


# Family, and the answers' texts as its model writes them.
FAMILIES = [
    ("chatml", ["first answer", "second"]),
    ("chatml_marked", ["first answer", "second"]),
    ("llama3", ["first answer", "second"]),
    ("gemma", ["first answer", "second"]),
    ("mistral", [" first answer", " second"]),
    ("kimi", ["first answer", "second"]),
    ("deepseek", ["first answer", "second"]),
    ("qwen3", ["first answer", "second"]),
]


@pytest.mark.parametrize(("family", "answers"), FAMILIES)
def test_written_turns_are_masked_as_prepare_masks_them(family, answers):
    """The reference: the same conversation with the answers in it, rendered and masked by prepare."""
    template, encoder = make_template(family), make_encoder(family)
    messages = [turn("user", "one?"), turn("assistant", answers[0].strip())]
    messages += [turn("user", "two?"), turn("assistant", answers[1].strip())]
    supervised = [False, True] * 2
    rendered = render_conversation(template, Conversation(messages, supervised), encoder.special)
    expected = [(ids.tolist(), mask.astype(int).tolist()) for ids, mask in encoder.encode_rendered(rendered)]
    emitted = [ids for ids, mask in expected for ids in pieces(ids, mask)]
    empty = [message | {"content": ""} if message["role"] == "assistant" else message for message in messages]
    transcript = Transcript(Conversation(empty, supervised), template, encoder)
    for answer in emitted:
        assert not transcript.finished
        transcript.next_prompt()
        transcript.write(answer)
    assert transcript.finished and transcript.answers == 2
    assert [(sample.token_ids, sample.loss_mask) for sample in transcript.samples] == expected


def pieces(ids, mask):
    """The supervised stretches."""
    found, now = [], []
    for token, mine in zip(ids, mask, strict=True):
        if mine:
            now.append(token)
        elif now:
            found, now = [*found, now], []
    return [*found, now] if now else found


def test_ids_are_kept_that_text_would_not_give_back():
    """A server may emit a text's letters one by one; encoding that text again joins them."""
    encoder, template = make_encoder("chatml", merges=[("a", "b")]), make_template("chatml")
    (joined,) = encoder.encode(["ab"])[0]
    apart = [encoder.encode(["a"])[0][0], encoder.encode(["b"])[0][0], encoder.encode(["<|im_end|>"])[0][0]]
    turns = [turn("user", "q"), turn("assistant", ""), turn("user", "r"), turn("assistant", "")]
    transcript = Transcript(Conversation(turns, [False, True] * 2), template, encoder)
    first = transcript.next_prompt()
    transcript.write(apart)
    assert transcript.next_prompt()[: len(first) + 3] == first + apart
    transcript.write(apart)
    assert len(transcript.samples) == 1 and joined not in transcript.samples[0].token_ids


def test_dropped_reasoning_makes_samples_of_their_own():
    encoder, template = make_encoder("qwen3"), make_template("qwen3", enable_thinking=True)
    turns = [turn("user", "q"), turn("assistant", ""), turn("user", "r"), turn("assistant", "")]
    transcript = Transcript(Conversation(turns, [False, True] * 2), template, encoder)
    written = [encoder.encode([f"<think>\nsecret {k}\n</think>\n\nanswer {k}<|im_end|>"])[0] for k in (1, 2)]
    for answer in written:
        transcript.next_prompt()
        transcript.write(answer)
    first, second = transcript.samples
    assert first.token_ids[first.answers[0][0] :] == written[0]
    assert second.token_ids[second.answers[0][0] :] == written[1]
    context = encoder.decode(second.token_ids[: second.answers[0][0]])
    assert "answer 1" in context and "secret 1" not in context


def test_a_channel_s_marks_stay_out_of_the_next_prompt():
    encoder, template = make_encoder("gpt_oss"), make_template("gpt_oss")
    turns = [turn("user", "q"), turn("assistant", ""), turn("user", "r"), turn("assistant", "")]
    transcript = Transcript(Conversation(turns, [False, True] * 2), template, encoder)
    transcript.next_prompt()
    said = "<|channel|>analysis<|message|>secret<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>"
    transcript.write(encoder.encode([said])[0])
    text = encoder.decode(transcript.next_prompt())
    assert "<|channel|>final<|message|>four<|end|>" in text and "secret" not in text


# -- journal


def add(journal, number, source=0):
    sample = Written([5, 6, 7 + number, 2], [(2, 4)])
    return journal.add(source, f"{number:032x}", [sample], False, {"kind": "k"})


def test_a_journal_cut_anywhere_keeps_all_whole_lines(tmp_path):
    with Journal(tmp_path / "whole", 1, {"a": 1}) as journal:
        added = [add(journal, number) for number in range(3)]
        assert list(journal.written()) == added
    data = (tmp_path / "whole/000.jsonl").read_bytes()
    for size in range(0, len(data) + 1, 3):
        folder = tmp_path / f"cut{size}"
        folder.mkdir()
        (folder / "000.jsonl").write_bytes(data[:size])
        with Journal(folder, 1, {"a": 1}) as journal:
            kept = list(journal.written())
            assert kept == added[: data[:size].count(b"\n")]
            for number in range(len(kept), 3):
                add(journal, number)
        assert (folder / "000.jsonl").read_bytes() == data


def test_the_digest_does_not_depend_on_the_order(tmp_path):
    digests = set()
    for seed in range(4):
        numbers = list(range(20))
        random.Random(seed).shuffle(numbers)
        with Journal(tmp_path / f"{seed}", 2, {}) as journal:
            for number in numbers:
                add(journal, number, source=number % 2)
        digests.add(content_digest(tmp_path / f"{seed}"))
    with Journal(tmp_path / "other", 2, {}) as journal:
        for number in range(19):
            add(journal, number, source=number % 2)
    assert len(digests) == 1 and content_digest(tmp_path / "other") not in digests


def test_answers_of_other_settings_are_not_mixed(tmp_path):
    with Journal(tmp_path / "j", 1, {"regenerate.temperature": 0.0, "list": [1, 2]}):
        pass
    with pytest.raises(RecipeError, match=r"regenerate.temperature was 0.0 and is now 1.0"):
        Journal(tmp_path / "j", 1, {"regenerate.temperature": 1.0, "list": [1, 2]})


def test_one_process_at_a_time(tmp_path):
    with Journal(tmp_path / "j", 1, {}), pytest.raises(RecipeError, match="another process is writing"):
        Journal(tmp_path / "j", 1, {})
    with Journal(tmp_path / "j", 1, {}):
        pass


def test_an_edited_line_is_named(tmp_path):
    (tmp_path / "000.jsonl").write_text('{"id":"x"}\n')
    with pytest.raises(DataError, match="000.jsonl, line 1"):
        list(entries(tmp_path / "000.jsonl"))


# -- plan


def plan_of(tmp_path, target, sources, limit=0, **settings):
    run = make_run(tmp_path, target, sources, limit=limit)
    maker = prepare.make_maker(run.recipe.data, load_target(run.recipe.target))
    return make_plan(tmp_path / "spool.jsonl", run.recipe.data, Regenerate(**settings), maker)


def test_every_record_is_asked_or_accounted_for(tmp_path, tiny_target):
    first = [exchange(f"q{i}", "a") for i in range(6)] + [exchange("q0", "b"), {"messages": [turn("assistant", "a")]}]
    second = [exchange("q1", "c"), exchange("r", "c") | {"split": "heldout", "kind": "maths"}]
    paths = [write_lines(tmp_path / "a.jsonl", first), write_lines(tmp_path / "b.jsonl", second)]
    plan = plan_of(tmp_path, tiny_target, paths)
    assert plan.read == {0: 8, 1: 2} and len(plan.chosen) == 7
    assert plan.rejected == {0: {"duplicate": 1, "no_user_turn": 1}, 1: {"duplicate": 1}}
    listed = list(plan)
    assert [item.id for item in listed] == list(plan.chosen)
    assert listed[-1].about == {"split": "heldout", "kind": "maths"} and listed[-1].source == 1


def test_limits_choose_by_the_seed_not_by_place(tmp_path, tiny_target):
    rows = [exchange(f"q{i}", "a") | ({"split": "heldout"} if i >= 80 else {}) for i in range(100)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    reversed_path = write_lines(tmp_path / "b.jsonl", rows[::-1])
    plan = plan_of(tmp_path, tiny_target, [path], limit=30)
    assert len(plan.chosen) == 30 and plan.rejected[0]["over_limit"] == 70
    assert sum(item.about.get("split") == "heldout" for item in plan) == 6
    assert set(plan_of(tmp_path, tiny_target, [reversed_path], limit=30).chosen) == set(plan.chosen)
    assert len(plan_of(tmp_path, tiny_target, [path], max_conversations=7).chosen) == 7


def test_a_source_without_a_question_is_an_error(tmp_path, tiny_target):
    good = write_lines(tmp_path / "a.jsonl", [exchange(f"q{i}", "a") for i in range(9)])
    bad = write_lines(tmp_path / "b.jsonl", [{"input_ids": [3, 4], "loss_mask": [0, 1]}])
    with pytest.raises(DataError, match=r"b.jsonl: of 1 records none is left to ask: tokens_already 1"):
        plan_of(tmp_path, tiny_target, [good, bad])


# -- prepare reads what was written


def test_samples_of_one_conversation_share_a_split(tmp_path, tiny_target):
    """A template that rewrites earlier turns gives several samples: none may leak into the other split."""
    folder = tmp_path / "journal"
    with Journal(folder, 1, {}) as journal:
        for number in range(60):
            samples = [Written([9 + number, 5, 2], [(1, 3)]), Written([9 + number, 5, 77, 5, 2], [(3, 5)])]
            journal.add(0, f"{number:032x}", samples, False, {})
    run = make_run(tmp_path, tiny_target, [folder / "000.jsonl"], heldout_fraction=0.3)
    prepare.execute(run)
    splits = {}
    for sample in Tokens(run.tokens_dir):
        splits.setdefault(int(sample.token_ids[0]), []).append(sample.split)
    assert all(len(each) == 2 and each[0] == each[1] for each in splits.values())
    assert {each[0] for each in splits.values()} == {"train", "heldout"}
    line = json.loads((folder / "000.jsonl").read_text().splitlines()[0])
    assert line["answers"] == 2 and line["tokens"] == 4 and len(line["further"]) == 1


def test_records_of_prompts_have_no_answer_for_prepare(maker):
    record = read_record({"prompt": "only a prompt"}, "prompts", "here")
    assert isinstance(record, Record) and record.body.messages == [turn("user", "only a prompt")]
