"""What training takes as its store: one that was imported, and none with samples beyond the drafter's positions."""

import json
import re
import shutil
from pathlib import Path

import pytest
from helpers_capture import make_run, random_samples

from eyas.errors import DataError, ManifestMismatch, RecipeError, TrainError
from eyas.evaluate.again import Exchange, capture_again
from eyas.evaluate.prompts import load_sets
from eyas.record import load_record
from eyas.run import Run, open_run
from eyas.stages import run_all, run_stage, stages_of
from eyas.store.convert.exporter import export_store
from eyas.store.convert.importer import ImportOptions, import_folder
from eyas.store.reader import StoreReader
from eyas.target import load_target
from eyas.train import argmax

SETTINGS = ["train.draft_vocab_size=200", "train.epochs=1", "train.batch_tokens=128", "train.ttt_steps=2"]
SETTINGS += ["train.device=cpu", "train.precision=fp32", "evaluate.decode_prompts=0"]
IMPORTED = """
name = "imported"
runs_dir = "{runs}"
target.path = "{target}"
store.url = "{store}"
"""


@pytest.fixture(scope="module")
def captured(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose capture and verify are finished."""
    run = make_run(tmp_path_factory.mktemp("captured"), tiny_target, random_samples([30 + i % 9 for i in range(20)]))
    run_stage(run, "capture")
    run_stage(run, "verify")
    return run


@pytest.fixture(scope="module")
def imported_store(captured: Run, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store made by `eyas store import` of another tool's folder."""
    folder = tmp_path_factory.mktemp("other") / "speculators"
    target = load_target(captured.recipe.target)
    export_store("speculators", captured.store_url, folder, target=target, split=None, compress=False)
    options = ImportOptions(aux_layer_ids=[2, 4, 5], heldout=0.2)
    import_folder("speculators", folder, str(folder.parent / "store"), target, options)
    return folder.parent / "store"


@pytest.fixture
def imported(imported_store: Path, tiny_target: Path, tmp_path: Path) -> Run:
    """A run that knows of that store only."""
    return given_store(tmp_path, tiny_target, imported_store)


def given_store(folder: Path, target: Path, store: Path, *more: str) -> Run:
    recipe = folder / "imported.toml"
    recipe.write_text(IMPORTED.format(runs=folder / "runs", target=target, store=store))
    return open_run(recipe, [*SETTINGS, *more])


def test_an_imported_store_is_verified_trained_evaluated_and_exported(imported: Run) -> None:
    assert list(stages_of(imported)) == ["verify", "train", "evaluate", "export"]
    with pytest.raises(RecipeError, match="the stage before it, verify, is not finished"):
        run_stage(imported, "train")
    records = run_all(imported)
    assert records["train"].inputs["output of verify"] == records["verify"].output
    assert records["train"].counts["heldout"]["verifications"] > 0
    assert records["evaluate"].counts["acceptance_length"] >= 1
    assert (imported.export_dir / "model.safetensors").is_file()
    assert not imported.tokens_dir.exists()


def test_an_engines_answers_are_captured_again_for_an_imported_store(imported: Run) -> None:
    """What parity is measured on: states of the answers are the run's own, whatever its recipe captured."""
    exchange = Exchange(prompt=list(range(10, 20)), answer=list(range(30, 45)), plain=[])
    (sample,) = capture_again(imported, [exchange], [2, 4, 5], "float32", "replay")
    assert sample.token_ids.tolist() == exchange.prompt + exchange.answer
    assert len(sample.final_hidden_states) == len(exchange.answer) and sample.aux_hidden_states.shape[:2] == (25, 3)
    assert not imported.tokens_dir.exists()
    # The prompts that an engine answers have to be named: an imported store has none.
    with pytest.raises(RecipeError, match="its store was imported") as error:
        load_sets(imported, load_target(imported.recipe.target))
    assert "serving.prompts=" in error.value.next


def test_the_targets_argmax_is_made_once_for_all_runs_on_a_store(
    imported_store: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, made = Path(shutil.copytree(imported_store, tmp_path / "store")), []
    original = argmax._argmax
    monkeypatch.setattr(argmax, "_argmax", lambda logits: made.append(len(logits)) or original(logits))
    outputs = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        run = given_store(tmp_path / name, tiny_target, store)
        run_stage(run, "verify")
        made.clear()
        outputs.append(run_stage(run, "train").output)
        assert bool(made) == (name == "first")
    assert outputs[0] == outputs[1]
    assert (tmp_path / "store.argmax.safetensors").is_file()
    assert StoreReader(str(store)).files.others() == StoreReader(str(imported_store)).files.others()
    # Where nothing can be written beside the store it is the run's own.
    monkeypatch.setattr(argmax.os, "access", lambda *place: False)
    assert argmax.cache_path(run, StoreReader(str(store))).parent == run.train_dir


def test_nothing_is_captured_into_an_imported_store(imported: Run) -> None:
    digest = StoreReader(imported.store_url).digest
    for name in ("prepare", "capture"):
        with pytest.raises(RecipeError) as error:
            run_stage(imported, name)
        assert "names no data.sources" in error.value.seen and "eyas run" in error.value.next
    assert StoreReader(imported.store_url).digest == digest


def test_an_imported_store_with_other_layers_says_how_to_train_on_them(
    imported_store: Path, tiny_target: Path, tmp_path: Path
) -> None:
    run = given_store(tmp_path, tiny_target, imported_store, "drafter.aux_layer_ids=[1,4,5]")
    run_stage(run, "verify")
    with pytest.raises(ManifestMismatch) as error:
        run_stage(run, "train")
    assert "--set drafter.aux_layer_ids='[2, 4, 5]'" in error.value.next


def test_a_recipe_without_data_and_store_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'target.path = "{tiny_target}"\n')
    with pytest.raises(RecipeError, match="either data.sources says what is captured, or store.url"):
        open_run(recipe)


def test_samples_beyond_the_drafters_positions_are_refused_with_their_number(tiny_target: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 36}))
    run = make_run(tmp_path, target, random_samples([30 + i % 9 for i in range(20)]), overrides=SETTINGS)
    run_stage(run, "capture")
    run_stage(run, "verify")
    with pytest.raises(TrainError) as error:
        run_stage(run, "train")
    assert "4 of 20 samples are longer than 36 tokens; the longest has 38" in error.value.seen
    assert "--redo prepare" in error.value.next and "--set data.max_tokens=36" in error.value.next
    assert load_record(run.dir, "train") is None


def test_prepare_refuses_them_before_anything_is_captured(tiny_target: Path, tmp_path: Path) -> None:
    """512 positions, by the tiny target's config.json."""
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 300}] * 2
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'runs_dir = "{tmp_path}/runs"\ntarget.path = "{tiny_target}"\n')
    data = 'data.sources=[{path="data.jsonl", split="train"}]'
    with pytest.raises(DataError) as error:
        run_stage(open_run(recipe, [data]), "prepare")
    assert re.search(r"1 of 1 samples are longer than 512 tokens; the longest has 6\d\d", error.value.seen)
    assert "--set data.max_tokens=512" in error.value.next
    run = open_run(recipe, [data, "data.max_tokens=512"])
    assert run_stage(run, "prepare").counts["samples"] == 1
