"""Stage records: what they keep, and which input they say has changed."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas import __version__
from eyas.errors import RecipeError
from eyas.record import Record, changed_input, load_record, save_record

values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
inputs = st.dictionaries(st.text(max_size=5), st.one_of(values, st.lists(values, max_size=3)), max_size=5)


def test_a_record_says_what_it_was_made_with(tmp_path: Path) -> None:
    assert load_record(tmp_path, "train") is None
    save_record(tmp_path, Record("train", {"train.lr": 1e-4}, "abc", {"steps": 7}, 12.5))
    record = load_record(tmp_path, "train")
    assert record is not None
    assert (record.inputs, record.output, record.counts, record.duration_s) == (
        {"train.lr": 1e-4},
        "abc",
        {"steps": 7},
        12.5,
    )
    assert record.versions["eyas"] == __version__ and {"python", "torch", "numpy"} <= set(record.versions)
    assert record.finished.endswith("Z") and len(record.finished) == 20


@given(inputs)
def test_inputs_survive_the_file(tmp_path_factory: pytest.TempPathFactory, pairs: dict[str, object]) -> None:
    folder = tmp_path_factory.getbasetemp() / "records-of-hypothesis"
    save_record(folder, Record("prepare", pairs, "x", {}, 0))
    record = load_record(folder, "prepare")
    assert record is not None and changed_input(record, pairs) == ""


def test_the_changed_key_is_named_with_both_values() -> None:
    record = Record("train", {"a": 1, "train.lr": 1e-4, "gone": True}, "x", {}, 0)
    assert changed_input(record, {"a": 1, "train.lr": 2e-4, "gone": True}) == "train.lr was 0.0001 and is now 0.0002"
    assert changed_input(record, {"a": 1, "train.lr": 1e-4}) == "gone was true and is now absent"
    assert (
        changed_input(record, {"a": 1, "train.lr": 1e-4, "gone": True, "new": "x"}) == 'new was absent and is now "x"'
    )


def test_long_values_are_cut_but_told_apart() -> None:
    one, two = list(range(100)), [*range(99), 7]
    words = changed_input(Record("s", {"k": one}, "x", {}, 0), {"k": two})
    first, second = words.removeprefix("k was ").split(" and is now ")
    assert first != second and len(words) < 250


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"stage": "train"}), json.dumps({"unknown": 1})])
def test_a_damaged_record_says_which_file_to_remove(tmp_path: Path, content: str) -> None:
    path = tmp_path / "records" / "train.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(RecipeError, match="not a stage record") as caught:
        load_record(tmp_path, "train")
    assert f"rm {path}" in caught.value.next


def test_no_part_of_a_record_is_ever_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas import fs

    save_record(tmp_path, Record("train", {}, "first", {}, 0))

    def fails(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fs, "pwrite_all", fails)
    with pytest.raises(OSError, match="No space"):
        save_record(tmp_path, Record("train", {}, "second", {}, 0))
    record = load_record(tmp_path, "train")
    assert record is not None and record.output == "first"
    assert sorted(path.name for path in (tmp_path / "records").iterdir()) == ["train.json"]
