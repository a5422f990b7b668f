"""The demo's prompts and stored answers: held-out ones are kept apart, and the answers are the target's own."""

import gzip
import importlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = Path(__file__).parent.parent / "examples" / "smollm2"
ANSWERS = EXAMPLE / "answers.jsonl.gz"
END_OF_TURN = 2
MAX_NEW_TOKENS = 96

Record = dict[str, Any]


@pytest.fixture(scope="session")
def scripts() -> dict[str, ModuleType]:
    """The example's scripts, which import one another as neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        return {name: importlib.import_module(name) for name in ("make_target", "make_prompts", "make_answers")}


@pytest.fixture(scope="session")
def tokenizer(demo_target: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_target)


@pytest.fixture(scope="session")
def records() -> list[Record]:
    with gzip.open(ANSWERS, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def of_split(records: list[Record], split: str) -> list[Record]:
    return [record for record in records if record["split"] == split]


def question(record: Record) -> str:
    return record["messages"][0]["content"]


def test_file_is_small_and_has_no_date_in_it() -> None:
    assert ANSWERS.stat().st_size <= 2_000_000
    assert ANSWERS.read_bytes()[4:8] == b"\0\0\0\0"  # gzip's mtime


def test_counts(records: list[Record]) -> None:
    assert Counter(record["split"] for record in records) == {"train": 1526, "heldout": 64}
    assert len({record["id"] for record in records}) == len(records)
    assert len({question(record) for record in records}) == len(records)


def test_every_kind_is_in_both_splits(records: list[Record]) -> None:
    train, heldout = (Counter(record["kind"] for record in of_split(records, split)) for split in ("train", "heldout"))
    assert set(train) == set(heldout)
    assert len(train) == 13
    assert min(train.values()) >= 50
    assert min(heldout.values()) >= 4


def test_stored_prompts_are_those_of_the_prompt_files(records: list[Record], scripts: dict[str, ModuleType]) -> None:
    prompts = scripts["make_prompts"].training_prompts() + scripts["make_prompts"].heldout_prompts()
    assert [(r["id"], r["kind"], r["split"], question(r)) for r in records] == [
        (p.id, p.kind, p.split, p.text) for p in prompts
    ]


def test_heldout_prompts_share_no_five_words_with_training_ones(
    records: list[Record], scripts: dict[str, ModuleType]
) -> None:
    word_runs = scripts["make_prompts"].word_runs
    trained = set().union(*(word_runs(question(record)) for record in of_split(records, "train")))
    for record in of_split(records, "heldout"):
        assert not word_runs(question(record)) & trained, question(record)


def test_word_runs_ignore_case_and_punctuation(scripts: dict[str, ModuleType]) -> None:
    runs = scripts["make_prompts"].word_runs("Tell me: WHY is it so?")
    assert runs == {("tell", "me", "why", "is", "it"), ("me", "why", "is", "it", "so")}


def test_prompt_ids_are_the_rendered_messages(records: list[Record], tokenizer: Any) -> None:
    for record in records:
        rendered = tokenizer.apply_chat_template(record["messages"], add_generation_prompt=True)["input_ids"]
        assert record["prompt_ids"] == rendered, record["id"]


def test_answers_end_by_themselves_or_at_the_limit(records: list[Record]) -> None:
    for record in records:
        ids = record["response_ids"]
        assert 0 < len(ids) <= MAX_NEW_TOKENS, record["id"]
        assert END_OF_TURN not in ids[:-1], record["id"]
        assert ids[-1] == END_OF_TURN or len(ids) == MAX_NEW_TOKENS, record["id"]


def test_answers_decode_to_text(records: list[Record], tokenizer: Any) -> None:
    texts = [tokenizer.decode(record["response_ids"], skip_special_tokens=True) for record in records]
    assert all(text.strip() for text in texts)
    assert len(set(texts)) > 0.95 * len(texts)
    # A character cut in two by the limit leaves U+FFFD at the end, never inside.
    assert not any("\ufffd" in text.rstrip("\ufffd") for text in texts)


def test_heldout_answers_are_what_plain_greedy_decoding_gives(
    records: list[Record], demo_target: Path, scripts: dict[str, ModuleType]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.float32).eval()
    for record in of_split(records, "heldout")[::25]:
        [ids] = scripts["make_answers"].answer(model, [record["prompt_ids"]], max_new_tokens=24)
        assert ids == record["response_ids"][:24], record["id"]


def test_interrupted_regeneration_keeps_what_still_fits(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    make_answers = scripts["make_answers"]
    asked = [{"id": "a", "prompt_ids": [1, 2]}, {"id": "b", "prompt_ids": [3]}, {"id": "c", "prompt_ids": [4]}]
    answered = [{**record, "response_ids": [9]} for record in asked]
    answered[1]["prompt_ids"] = [5]  # of an older prompt
    partial = tmp_path / "answers.partial"
    assert make_answers.read_partial(partial, asked) == {}
    partial.write_text(make_answers.to_lines(answered)[:-3])  # killed while it wrote the last line
    assert make_answers.read_partial(partial, asked) == {"a": answered[0]}
