"""The export stage: from a checkpoint to a folder that an engine loads, whole or absent."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_export import (
    AUX_LAYER_IDS,
    drafter_config,
    make_run,
    write_checkpoint,
    write_record,
    write_store,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from eyas import cli, fs
from eyas.drafter.eagle3 import DrafterConfig
from eyas.errors import CorruptStore, ExportError, EyasError, TrainError, VerificationFailed
from eyas.export import stage
from eyas.export.form import flat_config
from eyas.run import Run
from eyas.settings import Target as TargetTable
from eyas.stages import run_stage
from eyas.target import load_target


@pytest.fixture
def run(tmp_path: Path, tiny_target: Path) -> Run:
    made = make_run(tmp_path, tiny_target)
    write_store(made, tiny_target)
    write_checkpoint(made, 20)
    write_record(made, "train", "weights at step 20")
    write_record(made, "evaluate", "measured")
    return made


def test_the_folder_holds_what_was_trained(run: Run) -> None:
    write_checkpoint(run, 9)  # an older one, whose name sorts after step-20
    record = run_stage(run, "export")
    assert sorted(path.name for path in run.export_dir.iterdir()) == ["config.json", "model.safetensors"]
    trained = load_file(run.train_dir / "step-20" / "model.safetensors")
    exported = load_file(run.export_dir / "model.safetensors")
    assert exported.keys() == trained.keys()
    assert not [name for name in exported if "embed" in name]
    for name, tensor in trained.items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert exported[name].dtype == wanted.dtype and torch.equal(exported[name], wanted), name
    assert exported["d2t"].dtype == torch.int64 and exported["t2d"].dtype == torch.bool
    config = json.loads((run.export_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == AUX_LAYER_IDS
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["eagle_config"]["sglang_version"] == run.recipe.export.sglang_version
    assert (config["max_position_embeddings"], config["rope_theta"], config["rope_scaling"]) == (512, 10000.0, None)
    assert (config["draft_vocab_size"], config["vocab_size"], config["tie_word_embeddings"]) == (96, 259, False)
    assert record.counts["checkpoint"] == "step-20"
    assert record.counts["bytes"] == sum(path.stat().st_size for path in run.export_dir.iterdir())
    assert record.counts["parameters"] == sum(t.numel() for t in trained.values() if t.is_floating_point())
    assert run_stage(run, "export").finished == record.finished  # skipped
    stage.check(run)


def test_transformers_reads_the_config_as_engines_do(run: Run) -> None:
    run_stage(run, "export")
    config = AutoConfig.from_pretrained(run.export_dir)
    assert config.rope_parameters["rope_theta"] == 10000.0 and config.rope_parameters["rope_type"] == "default"
    assert (config.head_dim, config.num_hidden_layers, config.dtype) == (12, 1, torch.bfloat16)


def test_scaled_rope_survives(tiny_target: Path, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0}
    target = load_target(TargetTable(path=str(tiny_target)))
    drafter = DrafterConfig(**drafter_config(rope_theta=50000.0, rope_scaling=yarn))
    config = flat_config(drafter, target, dtype="bfloat16", sglang_version="0.5.14")
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert read == yarn | {"rope_theta": 50000.0}


def test_a_whole_draft_vocabulary_keeps_its_own_head(tmp_path: Path, tiny_target: Path) -> None:
    run = make_run(tmp_path, tiny_target)
    write_store(run, tiny_target)
    write_checkpoint(run, 1, draft_vocab_size=259)
    write_record(run, "evaluate", "measured")
    run_stage(run, "export")
    config = json.loads((run.export_dir / "config.json").read_text())
    assert config["draft_vocab_size"] == 259  # null would make SGLang use the target's lm_head
    exported = load_file(run.export_dir / "model.safetensors")
    assert exported["lm_head.weight"].shape == (259, 48)
    # vLLM has no parameter for a table of the whole vocabulary, and stops at one.
    assert not {"d2t", "t2d"} & exported.keys()
    stage.check(run)


def test_layers_of_another_store_are_refused_and_nothing_appears(tmp_path: Path, tiny_target: Path) -> None:
    run = make_run(tmp_path, tiny_target)
    write_store(run, tiny_target, aux_layer_ids=[1, 4, 5])
    write_checkpoint(run, 1)
    write_record(run, "evaluate", "measured")
    with pytest.raises(ExportError, match=r"the store holds \[1, 4, 5\]"):
        run_stage(run, "export")
    assert not run.export_dir.exists()


def test_poisoned_weights_keep_the_old_export(run: Run) -> None:
    run_stage(run, "export")
    before = fs.digest_file(run.export_dir / "model.safetensors")
    write_checkpoint(run, 30)
    weights = load_file(run.train_dir / "step-30" / "model.safetensors")
    weights["norm.weight"][5] = torch.inf
    save_file(weights, run.train_dir / "step-30" / "model.safetensors")
    with pytest.raises(ExportError, match="norm.weight holds NaN or Inf"):
        stage.execute(run)
    assert fs.digest_file(run.export_dir / "model.safetensors") == before
    assert not list(run.dir.glob(".partial-*"))


def test_another_form_needs_redo_and_another_checkpoint_is_seen(run: Run, tmp_path: Path, tiny_target: Path) -> None:
    run_stage(run, "export")
    other = make_run(tmp_path, tiny_target, '[export]\nsglang_version = "0.5.14"\n')
    with pytest.raises(EyasError, match="export.sglang_version was"):
        run_stage(other, "export")
    run_stage(other, "export", redo=True)
    assert json.loads((run.export_dir / "config.json").read_text())["eagle_config"]["sglang_version"] == "0.5.14"
    write_record(run, "train", "weights at step 30")
    with pytest.raises(EyasError, match="output of train was"):
        run_stage(other, "export")


def test_missing_and_cut_checkpoints(run: Run) -> None:
    weights = run.train_dir / "step-20" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(TrainError, match="model.safetensors: not readable"):
        run_stage(run, "export")
    weights.unlink()
    with pytest.raises(TrainError, match="model.safetensors: missing"):
        run_stage(run, "export")
    (run.train_dir / "step-20").rename(run.train_dir / ".partial-step-20")
    with pytest.raises(ExportError, match="no checkpoint") as caught:
        run_stage(run, "export")
    assert "eyas train" in caught.value.next


def test_a_store_that_is_gone_is_said(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path(run.store_url).rename(run.dir / "moved")
    run_stage(run, "export")
    assert "layer ids are not compared with the store's" in capsys.readouterr().err
    (run.dir / "moved").rename(run.store_url)
    manifest = Path(run.store_url) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("[", "[ "))
    with pytest.raises(CorruptStore):
        stage.check(run)


def test_check_names_an_edit(run: Run) -> None:
    run_stage(run, "export")
    path = run.export_dir / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": 2048}
    path.write_text(json.dumps(config))
    with pytest.raises(VerificationFailed, match="max_position_embeddings is 2048; expected 512") as caught:
        stage.check(run)
    assert caught.value.exit_code == 3 and "--redo" in caught.value.next


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _absolute_ids(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))
    save_file(tensors, folder / "model.safetensors")


def _without_embedding(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "embed" not in name}, folder / "model.safetensors")


MISTAKES = {
    "wrong layer ids": (
        _config(eagle_aux_hidden_state_layer_ids=[1, 3, 4]),
        "which vLLM would capture; the store holds",
    ),
    "wrong layer ids for SGLang": (
        _config(eagle_config={"eagle_aux_hidden_state_layer_ids": AUX_LAYER_IDS, "sglang_version": "0.5.23"}),
        "SGLang 0.5.23 would capture [3, 5, 6] of a llama target; the store holds [2, 4, 5]",
    ),
    "max positions 2048": (_config(max_position_embeddings=2048), "max_position_embeddings is 2048; expected 512"),
    "missing embedding": (_without_embedding, "embed_tokens.weight is missing: it has to be in this folder"),
    "d2t as absolute ids": (_absolute_ids, "d2t holds target ids; expected offsets"),
    "wrong norm switch": (_config(norm_output=True), "norm_output is on as vLLM reads it; expected off"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_on_the_command_line_names_what_users_report(
    mistake: str,
    tmp_path: Path,
    tiny_target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(tmp_path, tiny_target, "[export]\nembedding = true\n")
    write_store(run, tiny_target)
    write_checkpoint(run, 20)
    write_record(run, "evaluate", "measured")
    run_stage(run, "export")
    monkeypatch.setattr(sys, "argv", ["eyas", "export", str(tmp_path / "tiny.toml"), "--check"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code in (0, None)
    change, words = MISTAKES[mistake]
    change(run.export_dir)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 3
    assert words in capsys.readouterr().err.replace("\n", " ")
