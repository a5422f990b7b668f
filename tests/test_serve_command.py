"""The server's command line by release, profiles with a reason for everything, and what the recipe may not say."""

from pathlib import Path

import pytest
from helpers_serve import stand_in_run
from typer.testing import CliRunner

from eyas.cli import app, commands
from eyas.engine.launch import engine_env
from eyas.engine.profile import Profile, load_profile, profile_names
from eyas.engine.sglang import SGLANG, aux_flags, plan_launch
from eyas.errors import EngineError, RecipeError
from eyas.target import load_target

commands.register(app)


def flags(tmp_path: Path, target: Path, version: str, *overrides: str, profile: str = "extraction") -> str:
    run = stand_in_run(tmp_path, target, "", *overrides, profile=profile)
    return " ".join(plan_launch(run, load_target(run.recipe.target), version).command(8000)[3:])


def test_the_command_of_the_newest_release(tmp_path: Path, tiny_target: Path) -> None:
    assert flags(tmp_path, tiny_target, "0.5.23") == (
        f"--model-path {tiny_target} --dtype float32 --random-seed 0 --device cpu --max-total-tokens 16384 "
        "--disable-radix-cache --disable-prefill-cuda-graph --enforce-disable-flashinfer-allreduce-fusion "
        "--disable-cuda-graph --skip-tokenizer-init "
        "--enable-return-aux-hidden-states --speculative-algorithm DFLASH --return-aux-hidden-state-layer-ids 1 3 4 "
        "--host 127.0.0.1 --port 8000"
    )


@pytest.mark.parametrize(
    ("version", "has", "lacks"),
    [
        ("0.5.11", "--disable-piecewise-cuda-graph", "--disable-prefill-cuda-graph"),
        ("0.5.13.post1", "--disable-piecewise-cuda-graph", "--disable-prefill-cuda-graph"),
        ("0.5.14", "--disable-prefill-cuda-graph", "--disable-piecewise-cuda-graph"),
        ("0.5.22", "--disable-prefill-cuda-graph", "--enable-return-aux-hidden-states"),
    ],
)
def test_flags_by_release(tmp_path: Path, tiny_target: Path, version: str, has: str, lacks: str) -> None:
    told = flags(tmp_path, tiny_target, version).split()
    assert has in told and lacks not in told and "--disable-radix-cache" in told


@pytest.mark.parametrize("version", ["0.5.10", "0.5.24", "0.4.10.post2", "1.0.0", "main", "0.5.2"])
def test_other_releases_are_refused(version: str) -> None:
    with pytest.raises(EngineError, match="SGLang") as error:
        SGLANG.check_release(version, "engine")
    assert "0.5.11 to 0.5.23" in error.value.expected


@pytest.mark.parametrize(
    ("model_type", "ids", "given"),
    [
        ("llama", [2, 15, 27], "DFLASH 1 14 26"),
        ("qwen2", [2, 15, 27], "EAGLE3 1 14 26"),  # its class has no DFLASH setter
        ("kimi_k25", [3, 31, 59], "DFLASH 2 30 58"),  # that of DeepSeek adds 1 for DFLASH only
        ("llama", [0, 15, 27], ""),  # -1 is not taken: the tap sets the layers itself
    ],
)
def test_aux_layers_in_the_words_of_the_official_flag(model_type: str, ids: list[int], given: str) -> None:
    words = aux_flags(ids, model_type, (0, 5, 23))
    assert " ".join(word for word in words if not word.startswith("--")) == given
    assert aux_flags(ids, model_type, (0, 5, 22)) == []


def test_a_plain_server_has_no_capture(tmp_path: Path, tiny_target: Path) -> None:
    told = flags(tmp_path, tiny_target, "0.5.23", profile="serving")
    assert "aux" not in told and "radix" not in told and "--skip-tokenizer-init" not in told


def test_args_stand_behind_the_profile(tmp_path: Path, tiny_target: Path) -> None:
    told = flags(tmp_path, tiny_target, "0.5.14", 'engine.args=["--chunked-prefill-size", "64"]')
    assert told.endswith("--skip-tokenizer-init --chunked-prefill-size 64 --host 127.0.0.1 --port 8000")


@pytest.mark.parametrize("word", ["--port", "--port=1", "--dtype", "--trust-remote-code", "--mod", "--config"])
def test_what_the_recipe_says_elsewhere_is_refused(tmp_path: Path, tiny_target: Path, word: str) -> None:
    with pytest.raises(RecipeError, match="engine.args holds"):
        flags(tmp_path, tiny_target, "0.5.23", f'engine.args=["{word}"]')


def test_a_gpu_by_number_is_told_how(tmp_path: Path, tiny_target: Path) -> None:
    with pytest.raises(RecipeError, match="cuda:1") as error:
        flags(tmp_path, tiny_target, "0.5.23", "engine.device=cuda:1")
    assert "CUDA_VISIBLE_DEVICES" in error.value.next


def test_the_environment_is_the_engines(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/eyas")
    monkeypatch.setenv("VIRTUAL_ENV", "/of/eyas")
    run = stand_in_run(tmp_path, tiny_target, "", 'engine.env={A="1"}', "engine.python=/opt/sglang/bin/python")
    launch = plan_launch(run, load_target(run.recipe.target), "0.5.23")
    env = engine_env(launch.python, launch.env)
    assert "PYTHONPATH" not in env and "VIRTUAL_ENV" not in env and env["A"] == "1"
    assert env["PATH"].startswith("/opt/sglang/bin:")  # flashinfer compiles with the `ninja` that lies there


def test_every_flag_and_variable_has_its_reason() -> None:
    assert profile_names() == ["extraction", "pcie-8gpu", "serving"]
    for name in profile_names():
        profile = load_profile(name)
        assert profile.about and all(len(entry.reason) > 20 for entry in (*profile.flags, *profile.env))
    assert {flag.flag for flag in load_profile("extraction").flags if flag.required} == {
        "--disable-radix-cache",
        "--disable-piecewise-cuda-graph",
        "--disable-prefill-cuda-graph",
        "--enforce-disable-flashinfer-allreduce-fusion",
    }


def test_a_profile_of_ones_own_keeps_what_capture_needs(tmp_path: Path, tiny_target: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'purpose = "capture"\nabout = "mine"\n'
        '[[flags]]\nflag = "--disable-custom-all-reduce"\nreason = "peer access fails here"\n'
        '[[env]]\nname = "NCCL_P2P_DISABLE"\nvalue = "1"\nreason = "the IOMMU is on"\n'
    )
    told = flags(tmp_path, tiny_target, "0.5.23", profile="mine.toml")
    assert "--disable-custom-all-reduce" in told and "--disable-radix-cache" in told
    assert "--skip-tokenizer-init" not in told  # not needed: only quicker


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('purpose = "capture"\nabout = "x"\n[[flags]]\nflag = "--x"\n', "reason"),
        ('purpose = "other"\nabout = "x"\n', "purpose"),
        ("purpose = ", "Invalid"),
    ],
)
def test_a_bad_profile_is_refused(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(RecipeError, match=match):
        load_profile(str(tmp_path / "bad.toml"))


def test_an_unknown_profile_names_the_known() -> None:
    with pytest.raises(RecipeError, match="no such profile") as error:
        load_profile("fast")
    assert "extraction, pcie-8gpu, serving" in error.value.expected


def test_profiles_are_listed_with_reasons() -> None:
    shown = CliRunner().invoke(app, ["serve", "profiles"])
    assert shown.exit_code == 0
    for word in ("--disable-prefill-cuda-graph from 0.5.14", "NCCL_PROTO=LL", "tuned for decoding"):
        assert word in shown.output
    assert "Not for capture" in CliRunner().invoke(app, ["serve", "profiles", "pcie-8gpu"]).output


def test_the_profile_class_takes_no_unknown_keys() -> None:
    with pytest.raises(ValueError, match="flagz"):
        Profile.model_validate({"name": "x", "purpose": "serve", "about": "x", "flagz": []})
