"""What is left out on purpose: near-duplicates, evaluation prompts, patterns, languages; and the named data sets."""

import json
import random
import re
import tomllib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import ROOT
from helpers_data import exchange, make_run, write_lines
from helpers_tiny import make_tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_prepare import many, prepared, rejected_lines

from eyas.data import prepare
from eyas.data.contamination import Contamination, words
from eyas.data.near import PERMUTATIONS, NearDuplicates, band_rows, signature
from eyas.data.presets import PRESETS
from eyas.data.turns import read_turn
from eyas.errors import DataError
from eyas.recipe import Recipe
from eyas.settings import Source


def shingles(ids):
    return {tuple(ids[i : i + 5]) for i in range(max(len(ids) - 4, 1))}


def jaccard(a, b):
    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


def variants(rng, count, length=120):
    """Families of token lists: a base and copies with ever more tokens changed."""
    lists = []
    for _ in range(count):
        base = [rng.randrange(1000) for _ in range(length)]
        lists.append(base)
        for changes in (1, 3, 12, 40):
            copy = list(base)
            for _ in range(changes):
                copy[rng.randrange(length)] = rng.randrange(1000)
            lists.append(copy)
    rng.shuffle(lists)
    return lists


def test_near_duplicates_against_all_pairs(tmp_path):
    lists = variants(random.Random(0), 25)
    threshold = 0.7
    with NearDuplicates(tmp_path / "signatures", threshold) as near:
        for record, ids in enumerate(lists):
            near.add(record, f"{record:032x}"[::-1], signature(np.array(ids, np.int32)))
        dropped = set(near.find().tolist())
    assert not (tmp_path / "signatures").exists()
    for record, ids in enumerate(lists):
        best = max((jaccard(ids, other) for other in lists[:record]), default=0.0)
        # The estimate from 64 hashes has a standard deviation of 0.06 here.
        if best > threshold + 0.15:
            assert record in dropped, best
        if best < threshold - 0.2:
            assert record not in dropped, best


def test_equal_samples_are_left_to_the_exact_check(tmp_path):
    signed = signature(np.arange(30, dtype=np.int32))
    with NearDuplicates(tmp_path / "signatures", 0.8) as near:
        for record, sample_id in ((3, "a" * 32), (5, "a" * 32), (9, "b" * 32)):
            near.add(record, sample_id, signed)
        assert near.find().tolist() == [9]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_what_they_should(threshold):
    rows = band_rows(threshold)
    assert 1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= 0.99


def test_short_texts_have_a_signature():
    assert signature(np.array([], np.int32)).shape == (PERMUTATIONS,)
    assert not np.array_equal(signature(np.array([1], np.int32)), signature(np.array([2], np.int32)))


def long_answer(i, word="word"):
    return " ".join(f"{word}{i * 100 + j}" for j in range(40))


def test_near_duplicates_across_sources(tmp_path, tiny_target):
    first = write_lines(tmp_path / "a.jsonl", [exchange(f"q{i}", long_answer(i)) for i in range(20)])
    alike = [exchange(f"q{i}", long_answer(i) + " !") for i in range(5)]
    second = write_lines(
        tmp_path / "b.jsonl", [*alike, exchange("q9", long_answer(9)), exchange("new", long_answer(77))]
    )
    run = make_run(tmp_path, tiny_target, [first, second], near_duplicates=0.8)
    counts = prepared(run).manifest["by_source"]
    assert counts["a.jsonl"]["kept"] == 20
    assert counts["b.jsonl"]["kept"] == 1
    assert counts["b.jsonl"]["rejected"] == {"duplicate": 1, "near_duplicate": 5}
    lines = [(line["line"], line["reason"]) for line in rejected_lines(run)]
    assert sorted(lines) == [*((i, "near_duplicate") for i in range(1, 6)), (6, "duplicate")]
    assert prepared(make_run(tmp_path, tiny_target, [first, second])).manifest["by_source"]["b.jsonl"]["kept"] == 6


word = st.sampled_from([f"w{i}" for i in range(6)])
phrase = st.lists(word, min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(prompts=st.lists(phrase, max_size=6), turn=phrase)
def test_contamination_against_a_naive_search(prompts, turn):
    def runs(found, length):
        return {tuple(found[i : i + length]) for i in range(len(found) - length + 1)}

    distinct = {tuple(prompt) for prompt in prompts}
    expected = tuple(turn) in distinct
    for prompt in distinct:
        length = min(len(prompt), 13)
        if length >= 8:
            for run in runs(prompt, length) & runs(turn, length):
                holders = sum(min(len(p), 13) == length and run in runs(p, length) for p in distinct)
                expected |= holders < 5
    found = Contamination(" ".join(prompt) for prompt in prompts).find([" ".join(turn)])
    assert bool(found) == expected


def test_words_are_normalised():
    assert words("Ｗhat's  7×8, Straße?") == ["what", "s", "7", "8", "strasse"]
    assert words("你好 world") == ["你", "好", "world"]


def test_evaluation_prompts_stay_out_of_training(tmp_path, tiny_target):
    question = "Janet has 16 eggs a day and eats three of them for breakfast with two friends"
    evaluation = write_lines(tmp_path / "eval.jsonl", [{"turns": ["Short one?", question]}, {"prompt": "another"}])
    records = [
        *many(20),
        exchange("short ONE", "a"),
        exchange(f"Solve: {question}!", "b"),
        exchange(question, "held", split="heldout"),
    ]
    run = make_run(
        tmp_path, tiny_target, [write_lines(tmp_path / "a.jsonl", records)], evaluation_prompts=[str(evaluation)]
    )
    counts = prepared(run).manifest["by_source"]["a.jsonl"]
    assert counts["rejected"] == {"evaluation_prompt": 2}
    assert {line["line"] for line in rejected_lines(run)} == {21, 22}
    # A choice, however often it strikes, does not fail the stage.
    only = write_lines(tmp_path / "only.jsonl", [exchange("another", str(i)) for i in range(5)])
    prepared(make_run(tmp_path, tiny_target, [only], evaluation_prompts=[str(evaluation)]))


def test_patterns_and_languages(tmp_path, tiny_target):
    pytest.importorskip("py3langid", reason="the extra `language` is not installed")
    german = "Wie komme ich am schnellsten zum Bahnhof, wenn die Straße gesperrt ist?"
    records = [
        exchange("How do I get to the station when the street is closed?", "Take the other street to the station."),
        exchange(german, "Nehmen Sie die andere Straße, dann sind Sie gleich am Bahnhof."),
        exchange("How do I get to the station when it rains?", "As an AI language model I have no umbrella for you."),
    ]
    path = write_lines(tmp_path / "a.jsonl", records)
    run = make_run(tmp_path, tiny_target, [path], languages=["en"], drop_pattern="(?i)as an ai language model")
    assert prepared(run).manifest["by_source"]["a.jsonl"]["rejected"] == {"drop_pattern": 1, "language": 1}
    with pytest.raises(ValueError, match="not a regular expression"):
        make_run(tmp_path, tiny_target, [path], drop_pattern="(")


# One record of each named data set as its files have it.
STAND_INS = {
    "ultrachat-200k": {"prompt": "hi", "messages": exchange("hi", "hello")["messages"], "prompt_id": "x"},
    "sharegpt": {"id": "a", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    "open-perfectblend": {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
        "source": "meta-math",
    },
    "magpie": {"uuid": "u", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    "openthoughts": {
        "system": "think",
        "conversations": [
            {"from": "user", "value": "hi"},
            {
                "from": "assistant",
                "value": "<|begin_of_thought|>\n\nhm\n\n<|end_of_thought|>\n\n"
                "<|begin_of_solution|>\n\nhello\n\n<|end_of_solution|>",
            },
        ],
    },
    "tulu-3": {"id": "t", "messages": exchange("hi", "hello")["messages"], "source": "ai2/x"},
    "opencodeinstruct": {"id": "c", "input": "hi", "output": "hello", "domain": "generic"},
    "codealpaca": {"instruction": "hi", "input": "", "output": "hello"},
    "gsm8k": {"question": "hi", "answer": "hello"},
    "lmsys-chat-1m": {"conversation_id": "l", "model": "m", "conversation": exchange("hi", "hello")["messages"]},
}


def stand_in(name, number):
    """The data set's record with other words in it."""
    return json.loads(json.dumps(STAND_INS[name]).replace('"hi"', f'"hi {number}"'))


def lay_out(folder, name, count):
    """A folder like the data set's repository."""
    file = folder / PRESETS[name].files.replace("*", "00000-of-00001")
    file.parent.mkdir(parents=True)
    records = [STAND_INS[name], *(stand_in(name, number) for number in range(1, count))]
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), file)
    else:
        file.write_text(json.dumps(records))
    (file.parent / "other.jsonl").write_text("not JSON, and not of the data set's files")
    return folder


@pytest.mark.parametrize("name", PRESETS)
def test_presets_on_local_stand_ins(tmp_path, tiny_target, name):
    local = lay_out(tmp_path / "local", name, 1)
    run = make_run(tmp_path, tiny_target, [{"preset": name, "path": str(local)}])
    (sample,) = prepared(run)
    maker = prepare.make_maker(run.recipe.data, prepare.load_target(run.recipe.target))
    assert maker.encoder.decode(sample.token_ids[sample.loss_mask].tolist()) == "hello<|im_end|>"
    assert sample.source.startswith(name)


def test_the_eight_source_recipe_on_local_stand_ins(tmp_path, tiny_target):
    recipe = tomllib.loads((ROOT / "examples/eight_sources.toml").read_text(encoding="utf-8"))
    data = {**recipe["data"], "min_supervised_tokens": 1}
    sources = data.pop("sources")
    assert len(sources) == 8
    for source in sources:
        source["path"] = str(lay_out(tmp_path / source["preset"], source["preset"], 5))
    # The stand-ins are alike by design: their prompts differ by one number.
    tokens = prepared(make_run(tmp_path, tiny_target, sources, **{**data, "near_duplicates": 0.0}))
    by_preset = {name.partition("/")[0] for name in tokens.manifest["by_source"]}
    assert by_preset == {source["preset"] for source in sources}
    counts = tokens.manifest["by_source"].values()
    assert sum(count["read"] for count in counts) == 40
    # Without a system text of their own all eight mean the same five chats; OpenThoughts has one.
    assert len(tokens) == 10
    assert sum(count["rejected"].get("duplicate", 0) for count in counts) == 30


def test_presets_are_the_recipe_s():
    assert {name for name in Source.model_fields["preset"].annotation.__args__ if name} == set(PRESETS)


def test_reasoning_marks_become_reasoning():
    turn = STAND_INS["openthoughts"]["conversations"][1]
    assert read_turn(turn, "f") == {"role": "assistant", "content": "hello", "reasoning_content": "hm"}


def test_hub_out_of_reach_says_how_to_go_local(tmp_path, tiny_target, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="preset gsm8k: openai/gsm8k can't be fetched") as failed:
        prepare.execute(make_run(tmp_path, tiny_target, [{"preset": "gsm8k"}]))
    assert "hf download --repo-type dataset openai/gsm8k --include 'main/train-*.parquet'" in str(failed.value)


def test_sources_need_a_place_and_weights_need_each_other():
    for sources, message in (
        ([{}], "`path` or `preset`"),
        ([{"path": "a", "weight": 1}, {"path": "b"}], "weight must"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Recipe.model_validate({"target": {"path": "t"}, "data": {"sources": sources}})


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    make_tiny_target(target, layers=6, vocab=200)  # its tokenizer has 259 tokens
    source = write_lines(tmp_path / "a.jsonl", [exchange("hi", "hello")])
    run = make_run(tmp_path, target, [source])
    with pytest.raises(DataError, match="the tokenizer has 259 tokens, the model 200") as error:
        prepare.execute(run)
    assert "own tokenizer files" in error.value.next
    assert not run.tokens_dir.exists()
