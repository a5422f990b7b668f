"""What serves a drafter: flags by engine, [serving] in the place of [engine], and the forms it is deployed in."""

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_export import make_run

from eyas.engine.choices import choice_names, combine, configurations, load_choices, profile_of
from eyas.engine.deploy import deployment
from eyas.engine.drafting import Drafting, find_drafting, find_profile, serving_kind, serving_run, tuned_profile
from eyas.engine.profile import Profile, load_profile, profile_names
from eyas.errors import ExportError, RecipeError
from eyas.run import Run
from eyas.stages import stages_of

SERVING = """
[engine]
kind = "sglang"
python = "/opt/sglang/bin/python"
env = { PYTHONPATH = "/opt/site" }
args = ["--mem-fraction-static", "0.5"]
[serving]
args = ["--tp-size", "2"]
env = { NCCL_PROTO = "LL" }
drafts = 5
port = 31000
dtype = "float16"
"""


@pytest.fixture
def run(tmp_path: Path, tiny_target: Path) -> Run:
    made = make_run(tmp_path, tiny_target, SERVING)
    made.export_dir.mkdir(parents=True)
    (made.export_dir / "config.json").write_text("{}")
    return made


def test_sglang_takes_steps_and_topk_and_vllm_one_json_value() -> None:
    chain, tree = Drafting(Path("/d"), 3), Drafting(Path("/d"), 3, top_k=4, draft_tokens=8)
    assert shlex.join(chain.flags("sglang")) == (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path /d --speculative-num-steps 3 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )
    assert tree.flags("sglang")[-1] == "8" and tree.topology == "tree, 8 tokens"
    flag, value = chain.flags("vllm")
    assert flag == "--speculative-config"
    assert json.loads(value) == {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}
    with pytest.raises(RecipeError, match="serving.top_k = 4 with vLLM"):
        tree.flags("vllm")
    with pytest.raises(RecipeError, match="serving.draft_tokens = 0") as caught:
        Drafting(Path("/d"), 3, top_k=4).flags("sglang")
    assert "4 to 49" in caught.value.expected


def test_the_serving_table_takes_the_place_of_engine(run: Run) -> None:
    assert serving_kind(run) == "sglang"
    served = serving_run(run, find_drafting(run))
    engine = served.recipe.engine
    assert served.engine_folder == "serving" and run.engine_folder == "engine"
    assert engine.python == "/opt/sglang/bin/python" and engine.env == {"PYTHONPATH": "/opt/site", "NCCL_PROTO": "LL"}
    assert engine.args[-2:] == ["--tp-size", "2"] and "--mem-fraction-static" not in engine.args
    assert engine.args[: engine.args.index("--tp-size")] == find_drafting(run).flags("sglang")
    assert (engine.port, engine.dtype, engine.profile) == (31000, "float16", "serving")
    assert serving_run(run, None, folder="serving/without").recipe.engine.port == 0, "beside others"
    alone = serving_run(run, None)
    assert alone.recipe.engine == engine.model_copy(update={"args": ["--tp-size", "2"]}), "all other flags alike"


@pytest.mark.parametrize("given", [["--tp-size", "8"], ["--tp=8"], ["--tensor-parallel-size=8", "--log-level", "info"]])
def test_the_ranks_of_engine_are_taken_over(given: list[str], run: Run) -> None:
    """A model that was captured on eight GPUs is served on eight, whatever the engine calls it."""

    def served(kind: str = "sglang", profile: str = "serving", **serving: object) -> list[str]:
        engine = run.recipe.engine.model_copy(update={"args": given})
        table = run.recipe.serving.model_copy(update={"args": [], "kind": kind} | serving)
        changed = Run(run.recipe.model_copy(update={"engine": engine, "serving": table}), "")
        return serving_run(changed, None, profile=profile).recipe.engine.args

    assert served() == ["--tp-size", "8"]
    assert served("vllm") == ["--tensor-parallel-size", "8"]
    assert served(args=["--tp", "4"]) == ["--tp", "4"] and served(args=["--tp-size=4"]) == ["--tp-size=4"]
    assert served(profile="pcie-8gpu") == [], "the profile says it"


def test_the_tuned_profile_is_used_once_it_is_there(run: Run) -> None:
    assert find_profile(run) == "serving"
    path = tuned_profile(run, "sglang")
    path.write_text('purpose = "serve"\nabout = "tuned"\n[drafter]\ndrafts = 2\n[evidence]\nbest = "drafts 2"\n')
    assert find_profile(run) == str(path) and find_drafting(run).drafts == 2
    named = run.recipe.serving.model_copy(update={"profile": "serving"})
    asked = Run(run.recipe.model_copy(update={"serving": named}), run.arguments)
    assert find_profile(asked) == "serving" and find_drafting(asked).drafts == 5


def test_a_recipe_that_names_the_engine_ends_with_serving(run: Run) -> None:
    named = run.recipe.serving.model_copy(update={"kind": "sglang"})
    serving = Run(run.recipe.model_copy(update={"serving": named}), "")
    assert stages_of(run)[-1] == "export" and stages_of(serving)[-1] == "serving"


def test_no_drafter_and_no_engine_are_told(run: Run) -> None:
    shutil.rmtree(run.export_dir)
    with pytest.raises(ExportError, match="no config.json"):
        find_drafting(run)
    local = run.recipe.engine.model_copy(update={"kind": "local"})
    with pytest.raises(RecipeError, match="serving.kind is empty"):
        serving_kind(Run(run.recipe.model_copy(update={"engine": local}), ""))


@pytest.fixture
def deployable(tmp_path: Path, tiny_target: Path) -> Run:
    made = make_run(tmp_path, tiny_target, '[serving]\nkind = "sglang"\nport = 31000\nenv = { A = "100% $x \\"y\\"" }')
    made.export_dir.mkdir(parents=True)
    (made.export_dir / "config.json").write_text("{}")
    return made


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_what_is_deployed_can_be_read_back(deployable: Run, kind: str, tmp_path: Path, tiny_target: Path) -> None:
    made = deployment(deployable, kind)
    script = tmp_path / "serve.sh"
    script.write_text(made.script.replace("exec ", "env; printf '%s\\n' "))
    ran = subprocess.run(["sh", script], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
    said = shlex.split(made.script.split("exec ")[1])
    assert said == ran.stdout.splitlines()[-len(said) :]
    assert str(deployable.export_dir) in " ".join(said) and str(tiny_target) in said
    if kind == "sglang":
        assert 'A=100% $x "y"' in ran.stdout.splitlines()
        assert 'Environment="A=100%% $x \\"y\\""' in made.unit
        assert 'ENV A="100% \\$x \\"y\\""' in made.dockerfile.splitlines()
    entry = json.loads(made.dockerfile.rpartition("ENTRYPOINT ")[2])
    assert str(tmp_path) not in " ".join(entry) and "/model" in entry and "0.0.0.0" in entry
    paths = {str(deployable.export_dir): "/drafter", str(tiny_target): "/model", "127.0.0.1": "0.0.0.0"}
    for ours, theirs in paths.items():
        said = [word.replace(ours, theirs) for word in said]
    assert entry == said, "the same words, with the image's paths"


def test_an_earlier_drafter_leaves_nothing_beside_the_new_one(deployable: Run, tmp_path: Path) -> None:
    earlier = tmp_path / "deploy/drafter/model.safetensors.index.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("of a sharded drafter")
    (tmp_path / "deploy/notes.txt").write_text("the user's own")
    deployment(deployable, "sglang").write(tmp_path / "deploy")
    assert [path.name for path in (tmp_path / "deploy/drafter").iterdir()] == ["config.json"]
    names = ["Dockerfile", "drafter", "eyas-drafter.service", "notes.txt", "serve.sh"]
    assert sorted(path.name for path in (tmp_path / "deploy").iterdir()) == names


def test_the_image_is_published_where_serving_host_says(deployable: Run) -> None:
    assert "-p 127.0.0.1:31000:31000 " in deployment(deployable, "sglang").dockerfile
    open_to_all = deployable.recipe.serving.model_copy(update={"host": "0.0.0.0"})
    run = replace(deployable, recipe=deployable.recipe.model_copy(update={"serving": open_to_all}))
    assert "-p 0.0.0.0:31000:31000 " in deployment(run, "sglang").dockerfile


def test_secrets_stay_at_home(deployable: Run) -> None:
    env = {"HF_TOKEN": "hf_x1", "AWS_SECRET_ACCESS_KEY": "s3_x1", "TOKENIZERS_PARALLELISM": "true"}
    serving = deployable.recipe.serving.model_copy(update={"env": env})
    run = replace(deployable, recipe=deployable.recipe.model_copy(update={"serving": serving}))
    for text in deployment(run, "sglang").files.values():
        assert "_x1" not in text and "TOKENIZERS_PARALLELISM" in text
        assert "set it yourself (docker run -e, EnvironmentFile=): HF_TOKEN, AWS_SECRET_ACCESS_KEY" in text


def test_a_user_without_a_name_is_told_by_number(deployable: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_001)
    assert "User=4000001" in deployment(deployable, "sglang").unit


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_systemd_takes_the_unit(deployable: Run, kind: str, tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here")
    unit = tmp_path / "eyas-drafter.service"
    unit.write_text(deployment(deployable, kind).unit)
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr


@pytest.mark.parametrize("name", choice_names())
def test_every_configuration_of_every_choice_is_a_profile(name: str) -> None:
    choices, base = load_choices(name), load_profile("serving")
    kind = "vllm" if name.startswith("vllm") else "sglang"
    found, complete = configurations(choices, 12)
    assert found[0].places == (0,) * len(choices.choices) and len({one.name for one in found}) == len(found)
    if not complete:
        assert len(found) == 1 + sum(choice.count - 1 for choice in choices.choices)
    for one in found:
        profile = Profile.model_validate({"name": "x"} | profile_of(base, choices, one, kind))
        assert profile.purpose == "serve" and profile.drafter is not None
        Drafting(Path("/d"), **profile.drafter.model_dump()).flags(kind)


def test_no_flag_is_tried_that_does_nothing() -> None:
    """SGLang 0.5.11 to 0.5.23 define --num-continuous-decode-steps and read it nowhere."""
    flags = [choice.flag for name in choice_names() for choice in load_choices(name).choices]
    flags += [entry.flag for name in profile_names() for entry in load_profile(name).flags]
    assert flags and "--num-continuous-decode-steps" not in flags


def test_all_combinations_or_single_changes_and_the_best_together(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        'about = "mine"\n[[choices]]\ndrafter = [{ drafts = 3 }, { drafts = 5 }]\nreason = "r"\n'
        '[[choices]]\nflag = "--max-running-requests"\nvalues = ["", "2", "4"]\nreason = "r"\n'
        '[[choices]]\nenv = "NCCL_PROTO"\nvalues = ["", "LL"]\nreason = "r"\n'
        '[[choices]]\nflag = "--disable-custom-all-reduce"\nvalues = ["", "on"]\nreason = "r"\n'
    )
    choices = load_choices(str(path))
    assert len(configurations(choices, 24)[0]) == 2 * 3 * 2 * 2 and configurations(choices, 24)[1]
    single, complete = configurations(choices, 23)
    assert not complete and len(single) == 1 + 1 + 2 + 1 + 1
    assert [one.text for one in single] == [
        *("drafts 3", "drafts 5", "drafts 3, --max-running-requests 2"),
        *("drafts 3, --max-running-requests 4", "drafts 3, NCCL_PROTO=LL"),
        "drafts 3, --disable-custom-all-reduce",
    ]
    together = combine(choices, [single[3], single[2], single[5]])
    assert together.text == "drafts 3, --max-running-requests 4, --disable-custom-all-reduce"
    content = profile_of(load_profile("serving"), choices, together, "sglang")
    assert [(flag["flag"], flag.get("value", "")) for flag in content["flags"]] == [
        ("--max-running-requests", "4"),
        ("--disable-custom-all-reduce", ""),
    ]


def test_a_choice_of_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('about = "mine"\n[[choices]]\nflag = "--x"\nenv = "Y"\nvalues = ["1"]\nreason = "r"\n')
    with pytest.raises(RecipeError, match="a choice needs"):
        load_choices(str(path))
    with pytest.raises(RecipeError, match="no such choices"):
        load_choices("none")
