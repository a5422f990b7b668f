"""The recipe: strict, helpful about mistakes, and kept without loss."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from eyas.errors import RecipeError
from eyas.recipe import Recipe, dump_recipe, known_keys, load_recipe

SMALLEST = '[target]\npath = "/models/t"\n[[data.sources]]\npath = "chats.jsonl"\n'


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(folder, text), overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_smallest_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST))
    assert recipe.name == "mine"
    assert recipe.data.sources[0].path == str(tmp_path / "chats.jsonl")
    assert (recipe.engine.kind, recipe.store.encoding, recipe.train.ttt_steps) == ("local", "bf16", 7)


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("[train]\nlearning_rat = 1e-4\n", ""),
        ("[train]\nwarm_up = 0.1\n", "train.warmup"),
        ("[train]\nephocs = 3\n", "train.epochs"),
        ("[trian]\nlr = 1e-4\n", "train"),
        ("[store]\nencodng = 'fp8'\n", "store.encoding"),
        ("[drafter]\naux_layers_ids = [2, 15, 27]\n", "drafter.aux_layer_ids"),
        ("[evaluate]\nlr = 0.1\n", ""),
    ],
)
def test_unknown_keys_name_the_nearest(tmp_path: Path, line: str, near: str) -> None:
    text = refused(tmp_path, SMALLEST + line)
    assert "unknown key" in text and str(tmp_path / "mine.toml") in text
    if near:
        assert f"did you mean `{near}`?" in text


def test_an_unknown_key_of_a_source(tmp_path: Path) -> None:
    assert "did you mean `data.sources.0.split`?" in refused(tmp_path, SMALLEST + 'splitt = "train"\n')


@pytest.mark.parametrize(
    ("line", "key", "got"),
    [
        ("[train]\nlr = -1.0\n", "train.lr", "-1.0"),
        ('[train]\nlr = "fast"\n', "train.lr", "'fast'"),
        ("[train]\nwarmup = 1.5\n", "train.warmup", "1.5"),
        ("[train]\nttt_steps = 0\n", "train.ttt_steps", "0"),
        ("[train]\nepochs = 0\n", "train.epochs", "0"),
        ('[store]\nencoding = "int8"\n', "store.encoding", "'int8'"),
        ('[engine]\nkind = "tgi"\n', "engine.kind", "'tgi'"),
        ("[drafter]\naux_layer_ids = [2, 15]\n", "drafter", "[2, 15]"),
        ("[drafter]\naux_layer_ids = [15, 2, 27]\n", "drafter", "[15, 2, 27]"),
        ("[drafter]\naux_layer_ids = [-1, 2, 27]\n", "drafter", "[-1, 2, 27]"),
        ("[evaluate]\ndrafts = 3.5\n", "evaluate.drafts", "3.5"),
    ],
)
def test_bad_values_name_key_and_value(tmp_path: Path, line: str, key: str, got: str) -> None:
    text = refused(tmp_path, SMALLEST + line)
    assert f"`{key}" in text and got in text


def test_several_faults_are_told_at_once(tmp_path: Path) -> None:
    text = refused(tmp_path, SMALLEST + "[train]\nlr = 0.0\nclipp = 1\n[store]\nshard_bytes = 1\n")
    assert all(key in text for key in ("train.lr", "train.clipp", "store.shard_bytes"))


def test_missing_tables_and_files(tmp_path: Path) -> None:
    assert "`target`: Field required" in refused(tmp_path, '[[data.sources]]\npath = "a.jsonl"\n')
    assert "either data.sources" in refused(tmp_path, '[target]\npath = "/t"\n[data]\nsources = []\n')
    with pytest.raises(RecipeError, match="no such recipe") as caught:
        load_recipe(tmp_path / "none.toml")
    assert "eyas init" in caught.value.next
    assert "not valid TOML" in refused(tmp_path, "[target\n")
    (tmp_path / "latin.toml").write_bytes(SMALLEST.replace("chats", "ch\xe4ts").encode("latin-1"))
    with pytest.raises(RecipeError, match="not valid TOML"):
        load_recipe(tmp_path / "latin.toml")


@pytest.mark.parametrize("name", ["../up", "..", ".", "/tmp/x", "a b"])
def test_names_that_would_leave_the_runs_folder_are_refused(tmp_path: Path, name: str) -> None:
    assert "`name`" in refused(tmp_path, f'name = "{name}"\n' + SMALLEST)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.lr=1e-4", lambda r: r.train.lr, 1e-4),
        ("train.epochs=3", lambda r: r.train.epochs, 3.0),
        ("drafter.aux_layer_ids=[2, 15, 27]", lambda r: r.drafter.aux_layer_ids, [2, 15, 27]),
        ("store.encoding=fp8", lambda r: r.store.encoding, "fp8"),
        ('store.encoding="fp8"', lambda r: r.store.encoding, "fp8"),
        ("name=other", lambda r: r.name, "other"),
        ("store.url=/a=b", lambda r: r.store.url, "/a=b"),
        ("data.template_args.enable_thinking=false", lambda r: r.data.template_args, {"enable_thinking": False}),
        (" train.lr = 0.5", lambda r: r.train.lr, 0.5),
    ],
)
def test_overrides(tmp_path: Path, override: str, read: Any, value: Any) -> None:
    assert read(load_recipe(write(tmp_path, SMALLEST), [override])) == value


def test_the_store_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    path = write(tmp_path, SMALLEST)
    used = load_recipe(path, ["store.url=../stores/a"])
    assert used.store.url == str(tmp_path.resolve() / "stores/a")
    (kept := tmp_path / "kept.toml").write_text(dump_recipe(used))
    monkeypatch.chdir(tmp_path)
    assert load_recipe(kept).store.url == used.store.url
    assert load_recipe(path, ["store.url=~/a"]).store.url == str((Path.home() / "a").resolve())
    for url in ("s3://bucket/a", "file:///a", ""):
        assert load_recipe(path, [f'store.url="{url}"']).store.url == url


def test_the_last_override_holds_and_beats_the_file(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, SMALLEST + "[train]\nlr = 0.1\n"), ["train.lr=0.2", "train.lr=0.3"])
    assert recipe.train.lr == 0.3


def test_bad_overrides(tmp_path: Path) -> None:
    assert "no key=value" in refused(tmp_path, SMALLEST, "train.lr")
    assert "no key=value" in refused(tmp_path, SMALLEST, "=3")
    assert "sources is no table of single keys" in refused(tmp_path, SMALLEST, "data.sources.path=x")
    assert "did you mean `train`?" in refused(tmp_path, SMALLEST, "trian.lr=1e-4")
    assert "did you mean `train.lr`?" in refused(tmp_path, SMALLEST, "train.lrr=1e-4")
    assert "`train.lr`" in refused(tmp_path, SMALLEST, "train.lr=quick")


def test_paths_are_relative_to_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there" / "model").mkdir(parents=True)
    text = '[target]\npath = "model"\n[data]\ntemplate = "t.jinja"\n[[data.sources]]\npath = "../data/*.jsonl"\n'
    path = write(tmp_path / "there", text)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe = load_recipe(path)
    assert recipe.target.path == str(tmp_path / "there" / "model")
    assert recipe.data.template == str(tmp_path / "there" / "t.jinja")
    assert recipe.data.sources[0].path == str(tmp_path / "there" / "../data/*.jsonl")
    assert recipe.runs_dir == str(tmp_path / "here" / "runs")
    hub = load_recipe(write(tmp_path, SMALLEST.replace("/models/t", "org/model")))
    assert hub.target.path == "org/model"


def test_every_key_has_a_description() -> None:
    def walk(model: type[BaseModel], path: str = "") -> list[str]:
        missing = []
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                missing += walk(inner, f"{path}{name}.")
            elif not field.description:
                missing.append(f"{path}{name}")
        return missing

    assert walk(Recipe) == []
    assert {"train.lr", "data.sources.0.path", "runs_dir"} <= set(known_keys())


# Text that TOML must escape: quotes, backslashes, newlines, control characters, other scripts.
text = st.text(st.characters(codec="utf-8"), max_size=20)
tables = st.fixed_dictionaries(
    {
        "target": st.fixed_dictionaries(
            {"path": st.just("/m")}, optional={"revision": text, "trust_remote_code": st.booleans()}
        ),
        "data": st.fixed_dictionaries(
            {
                "sources": st.lists(
                    st.fixed_dictionaries(
                        {"path": text.map(lambda name: f"/data/{name}")},
                        optional={"name": text, "split": st.sampled_from(["auto", "train", "heldout"])},
                    ),
                    min_size=1,
                    max_size=3,
                )
            },
            optional={
                "max_tokens": st.integers(8, 2**40),
                "heldout_fraction": st.floats(0, 1),
                "template_args": st.dictionaries(text, st.one_of(st.booleans(), st.integers(-(2**60), 2**60), text)),
                "seed": st.integers(-(2**60), 2**60),
            },
        ),
    },
    optional={
        "name": st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,11}", fullmatch=True),
        "drafter": st.fixed_dictionaries(
            {}, optional={"aux_layer_ids": st.sets(st.integers(0, 100), min_size=3, max_size=3).map(sorted)}
        ),
        "train": st.fixed_dictionaries(
            {},
            optional={
                "lr": st.floats(1e-12, 1e3),
                "betas": st.tuples(st.floats(0, 1), st.floats(0, 1)).map(list),
                "ttt_steps": st.integers(1, 16),
                "precision": st.sampled_from(["fp32", "bf16"]),
            },
        ),
    },
)


@given(tables)
def test_a_kept_recipe_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, raw: dict[str, Any]) -> None:
    import tomli_w

    folder = tmp_path_factory.getbasetemp() / "recipes"
    (folder / "kept").mkdir(parents=True, exist_ok=True)
    path = folder / "first.toml"
    path.write_text(tomli_w.dumps(raw), encoding="utf-8")
    recipe = load_recipe(path)
    kept = folder / "kept" / "recipe.toml"
    kept.write_text(dump_recipe(recipe), encoding="utf-8")
    again = load_recipe(kept)
    assert again == recipe
    assert tomllib.loads(dump_recipe(again)) == tomllib.loads(dump_recipe(recipe))
