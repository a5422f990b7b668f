"""`eyas init`: the recipe it writes, what it refuses, and the interpreters it finds."""

import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.cli import app, commands
from eyas.engine import find
from eyas.errors import RecipeError, TargetError
from eyas.recipe import Recipe, load_recipe

commands.register(app)


def init(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, ["init", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with one data file, and no interpreter to be found."""
    (tmp_path / "chats.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    return tmp_path


def fake_python(path: Path, script: str) -> Path:
    """An executable that stands for an interpreter which prints or does something else than Python would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_recipe_loads_and_has_the_targets_numbers(tiny_target: Path, folder: Path) -> None:
    output = init("--target", tiny_target, "--data", "chats.jsonl")
    recipe = load_recipe(folder / "recipe.toml")
    assert recipe.target.path == str(tiny_target)
    assert recipe.drafter.aux_layer_ids == [2, 4, 5] and recipe.drafter.fc_norm and recipe.drafter.norm_output
    assert recipe.train.draft_vocab_size == 259
    assert recipe.data.max_tokens == 512
    assert recipe.data.sources[0].path == str(folder / "chats.jsonl")
    assert 'path = "chats.jsonl"' in (folder / "recipe.toml").read_text()
    assert "eyas run recipe.toml --limit 50" in output
    assert output.rstrip().endswith("eyas run recipe.toml")


def test_the_commented_defaults_are_the_defaults(tiny_target: Path, folder: Path) -> None:
    init("--target", tiny_target, "--data", "chats.jsonl")
    text = (folder / "recipe.toml").read_text()
    (folder / "full.toml").write_text(re.sub(r"(?m)^#(?=\w)", "", text))
    assert load_recipe(folder / "full.toml") == load_recipe(folder / "recipe.toml")
    written = tomllib.loads((folder / "full.toml").read_text())
    for table, field in Recipe.model_fields.items():
        keys = getattr(field.annotation, "model_fields", None)
        assert (set(written[table]) == set(keys)) if keys else table in written


def test_every_key_has_its_description_as_comment(tiny_target: Path, folder: Path) -> None:
    init("--target", tiny_target)
    lines = (folder / "recipe.toml").read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"#?\w+ = ", line):
            assert lines[number - 1].startswith("# "), line
    assert max(map(len, lines)) <= 120


def test_it_never_overwrites(tiny_target: Path, folder: Path) -> None:
    (folder / "recipe.toml").write_text("mine")
    with pytest.raises(RecipeError, match="recipe.toml is there already"):
        init("--target", tiny_target)
    assert (folder / "recipe.toml").read_text() == "mine"


def test_nothing_is_written_for_a_bad_target_or_data_file(tiny_target: Path, folder: Path) -> None:
    with pytest.raises(TargetError, match="no such folder"):
        init("--target", folder / "absent")
    with pytest.raises(RecipeError, match="--data absent.jsonl: no such file"):
        init("--target", tiny_target, "--data", "absent.jsonl")
    assert not (folder / "recipe.toml").exists()


def test_engines_are_found_where_they_are(tiny_target: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for environment, engines in (("named", {"vllm": "0.33.0"}), ("active", {"sglang": "0.5.23"}), ("path", {})):
        fake_python(folder / environment / "bin/python", f"echo '{json.dumps(engines)}'")
    fake_python(folder / "path/bin/python3", "echo 'No module named site' >&2; exit 4")
    monkeypatch.setenv("VIRTUAL_ENV", str(folder / "active"))
    monkeypatch.setenv("PATH", f"{folder / 'path/bin'}{os.pathsep}{os.environ['PATH']}{os.pathsep}/bin")
    output = init("--target", tiny_target, "--engine-python", folder / "named/bin/python")
    assert f"{folder}/named/bin/python: vllm 0.33.0" in output
    assert f"{folder}/active/bin/python: sglang 0.5.23" in output
    assert f"{folder}/path/bin/python3: exit code 4: No module named site" in output
    assert f"{folder}/path/bin/python:" not in output


def test_no_engine_is_said_and_no_error(tiny_target: Path, folder: Path) -> None:
    assert "name one with --engine-python PATH" in init("--target", tiny_target)
    output = init("--target", tiny_target, "--engine-python", folder / "absent", "--out", "b.toml")
    assert "absent: No such file or directory" in output


def test_a_real_interpreter_with_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment's python is asked itself, not the one it links to; metadata alone is not an engine."""
    (tmp_path / "site/sglang").mkdir(parents=True)
    (tmp_path / "site/sglang/__init__.py").write_text("raise SystemExit('never imported')")
    for name, version in (("sglang", "0.5.11"), ("vllm", "0.33.0")):
        (tmp_path / f"site/{name}-{version}.dist-info").mkdir()
        (tmp_path / f"site/{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    assert find.probe(python).engines == {}
    site = {"PYTHONPATH": str(tmp_path / "site")}
    assert find.probe(python, site) == find.Interpreter(python, {"sglang": "0.5.11"})
    monkeypatch.setenv("PYTHONPATH", site["PYTHONPATH"])  # no server gets it, so nothing is found by it
    assert find.probe(python).engines == {}


def test_an_interpreter_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "_PROBE_S", 0.3)
    start = time.monotonic()
    assert find.probe(fake_python(tmp_path / "python", "exec sleep 30")).fault == "no answer within 0.3 s"
    assert find.probe(fake_python(tmp_path / "python", "echo hello")).fault.startswith("its answer is not")
    assert time.monotonic() - start < 10
