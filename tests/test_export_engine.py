"""An exported folder against the very engine that is to serve it: what that release would make of it is told before a
server is started."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from helpers_export import make_run, write_checkpoint, write_record, write_store
from helpers_serve import make_stand_in

from eyas import cli
from eyas.errors import EngineError, VerificationFailed
from eyas.export.stage import check_served
from eyas.run import Run
from eyas.stages import run_stage

COMMANDS = (
    *(["evaluate", "--engine", "sglang"], ["tune"], ["serve", "start", "--with-drafter"]),
    ["deploy", "--engine", "sglang"],
)


def exported(
    folder: Path, target: Path, release: str, *, kind: str = "sglang", export: str = "", switch: str = "norm_output"
) -> Run:
    """A run that exported a drafter, and whose [serving] names an interpreter that holds that release."""
    site = make_stand_in(folder / "engine", release)
    if kind == "vllm":
        (site / "vllm").mkdir()
        (site / "vllm/__init__.py").touch()
        (site / f"vllm-{release}.dist-info").mkdir()
        (site / f"vllm-{release}.dist-info/METADATA").write_text(f"Name: vllm\nVersion: {release}\n")
    serving = f'kind = "{kind}"\npython = "{sys.executable}"\nenv = {{ PYTHONPATH = "{site}" }}\n'
    run = make_run(folder, target, f"[serving]\n{serving}[export]\n{export}\n")
    write_store(run, target)
    write_checkpoint(run, 20, **({switch: True} if switch else {}))
    write_record(run, "train", "weights at step 20")
    write_record(run, "evaluate", "measured")
    run_stage(run, "export")
    return run


def test_the_release_that_it_was_exported_for_serves_it(tmp_path: Path, tiny_target: Path) -> None:
    check_served(exported(tmp_path, tiny_target, "0.5.23"))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_an_older_release_that_leaves_a_norm_out_is_refused_before_a_start(
    command: list[str],
    tmp_path: Path,
    tiny_target: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = exported(tmp_path, tiny_target, "0.5.11")
    monkeypatch.setattr(sys, "argv", ["eyas", *command, str(tmp_path / "tiny.toml")])
    with pytest.raises(SystemExit) as left:
        cli.main()
    told = " ".join(capsys.readouterr().err.split())
    assert left.value.code == 3, told
    assert "as SGLang 0.5.11 would serve it" in told and "norm_output is off as SGLang 0.5.11 reads it" in told
    assert "export" in told and 'export.sglang_version = "0.5.11" in the recipe' in told
    assert not list(run.dir.glob("serving*")) and not list(run.dir.glob("tune*")), "nothing was started"


@pytest.mark.parametrize(
    ("export", "words"),
    [
        ('form = "speculators"', "speculators' form, which SGLang 0.5.23 has no reader for"),
        ('sglang_version = ""', "eagle_config.eagle_aux_hidden_state_layer_ids is None"),
    ],
)
def test_a_folder_for_vllm_alone_is_refused_for_sglang_and_served_by_vllm(
    export: str, words: str, tmp_path: Path, tiny_target: Path
) -> None:
    with pytest.raises(VerificationFailed, match=words) as caught:
        check_served(exported(tmp_path / "a", tiny_target, "0.5.23", export=export))
    assert 'export.form = "flat" and export.sglang_version = "0.5.23"' in caught.value.next
    check_served(exported(tmp_path / "b", tiny_target, "0.32.0", kind="vllm", export=export))


def test_vllm_is_asked_what_it_reads_alone(tmp_path: Path, tiny_target: Path) -> None:
    run = exported(tmp_path, tiny_target, "0.32.0", kind="vllm", switch="")
    path = run.export_dir / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"eagle_config": config["eagle_config"] | {"sglang_version": "0.5.11"}}))
    check_served(run)
    path.write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}))
    with pytest.raises(VerificationFailed, match="as vLLM 0.32.0 would serve it") as caught:
        check_served(run)
    assert "which vLLM would capture" in caught.value.seen and caught.value.next.endswith("--redo")


def test_an_interpreter_without_the_engine_is_told(tmp_path: Path, tiny_target: Path) -> None:
    run = exported(tmp_path, tiny_target, "0.5.23")
    shutil.rmtree(tmp_path / "engine")
    with pytest.raises(EngineError, match="No module named sglang"):
        check_served(run)


def test_without_checkpoints_the_release_is_still_checked(
    tmp_path: Path, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported(tmp_path, tiny_target, "0.5.11")
    shutil.rmtree(run.train_dir)
    with pytest.raises(VerificationFailed, match="norm_output is off as SGLang 0.5.11 reads it"):
        check_served(run)
    assert "not compared with what was trained" in capsys.readouterr().err


def test_deploy_leaves_out_the_engine_that_would_serve_another_drafter(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exported(tmp_path, tiny_target, "0.5.11")  # a release that leaves norm_output out
    words = ["eyas", "deploy", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "deploy")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        cli.main()
    told = capsys.readouterr()
    assert left.value.code in (0, None), told.err
    assert "norm_output is off as SGLang 0.5.11 reads it" in " ".join(told.err.split())
    assert "# ---- vLLM" in told.out and "SGLang" not in told.out
    assert [path.name for path in (tmp_path / "deploy").iterdir()] == ["vllm"]
    assert (tmp_path / "deploy/vllm/drafter/model.safetensors").is_file()
