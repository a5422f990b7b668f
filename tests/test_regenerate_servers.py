"""The stage against a server that fails on command: every fault ends in the same answers, or in one clear error.

The server is fake_llm_server.py; real vLLM: tests/engines.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from fake_llm_server import END, answer_to
from helpers_data import exchange, write_lines

from eyas.data.tokens import Tokens
from eyas.errors import DataError, EngineError, RecipeError
from eyas.record import load_record
from eyas.run import open_run
from eyas.stages import run_stage, stages_of

COUNT = 24


class Fake:
    """One server process."""

    def __init__(self, folder: Path, port: int = 0, **faults: str | float) -> None:
        self.log = folder / f"requests{port}-{time.monotonic_ns()}.jsonl"
        command = [sys.executable, Path(__file__).with_name("fake_llm_server.py"), self.log, json.dumps(faults)]
        self.process = subprocess.Popen([*command, str(port)], stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def requests(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def fake(tmp_path):
    servers = []

    def start(port=0, **faults):
        servers.append(Fake(tmp_path, port, **faults))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def recipe_of(folder, target, servers, rows=None, data="", **settings):
    rows = [exchange(f"question {i}", "old") for i in range(COUNT)] if rows is None else rows
    write_lines(folder / "a.jsonl", rows)
    values = {"servers": [server if isinstance(server, str) else server.url for server in servers]}
    values |= {"temperature": 0, "max_new_tokens": 32, "in_flight": 6, "patience_s": 20.0, "timeout_s": 20.0} | settings
    path = folder / "recipe.toml"
    path.write_text(
        f'runs_dir = "{folder / "runs"}"\n[target]\npath = "{target}"\n[[data.sources]]\npath = "a.jsonl"\n'
        f"[data]\nmax_tokens = 300\n{data}\n[regenerate]\n"
        + "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    )
    return path


def regenerate(recipe, **options):
    run = open_run(recipe)
    return run_stage(run, "regenerate", **options).counts


def lines(recipe):
    text = (recipe.parent / "runs/recipe/regenerated/000.jsonl").read_text()
    found = {line["id"]: line for line in map(json.loads, text.splitlines())}
    assert len(found) == text.count("\n")
    return found


def refused(recipe):
    text = (recipe.parent / "runs/recipe/regenerated/refused.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory, tiny_target):
    """Answers of a run that nothing disturbed, by id."""
    folder = tmp_path_factory.mktemp("expected")
    server = Fake(folder)
    try:
        recipe = recipe_of(folder, tiny_target, [server])
        counts = regenerate(recipe)
    finally:
        server.stop()
    found = lines(recipe)
    assert counts["conversations"] == len(found) == COUNT and counts["cut_off"] == 0
    assert counts["by_source"] == {"a.jsonl": {"read": COUNT, "kept": COUNT, "rejected": {}}}
    return found


def test_ids_are_the_servers_own(expected):
    for line in expected.values():
        start = line["loss_mask"].index(1)
        assert line["input_ids"][start:] == answer_to(line["input_ids"][:start])
        assert line["tokens"] == len(line["input_ids"]) - start


def test_all_stages_know_where_it_stands(tmp_path, tiny_target, fake):
    recipe = recipe_of(tmp_path, tiny_target, [fake()])
    run = open_run(recipe)
    assert list(stages_of(run))[:3] == ["regenerate", "prepare", "capture"]
    with pytest.raises(RecipeError, match="the stage before it, regenerate, is not finished"):
        run_stage(run, "prepare")
    run_stage(run, "regenerate")
    run_stage(run, "prepare")
    emitted = {tuple(line["input_ids"]) for line in lines(recipe).values()}
    assert {tuple(sample.token_ids.tolist()) for sample in Tokens(run.tokens_dir)} == emitted
    assert load_record(run.dir, "prepare").inputs["output of regenerate"] == load_record(run.dir, "regenerate").output
    without = open_run(recipe, ["regenerate.servers=[]"])
    assert list(stages_of(without))[0] == "prepare"
    with pytest.raises(RecipeError, match="names no server"):
        run_stage(without, "regenerate")


# Each fault hits requests 3 and 7 of the run; the same prompts are asked again.
@pytest.mark.parametrize("fault", ["500", "503", "429", "cut", "garbage", "abort", "hang"])
def test_a_fault_that_passes_is_asked_again(tmp_path, tiny_target, fake, expected, fault):
    server = fake(**{"3": fault, "7": fault})
    recipe = recipe_of(tmp_path, tiny_target, [server], timeout_s=1.0)
    assert regenerate(recipe)["conversations"] == COUNT
    assert lines(recipe) == expected and len(server.requests) == COUNT + 2


def test_sglang_s_protocol(tmp_path, tiny_target, fake, expected):
    server = fake()
    recipe = recipe_of(tmp_path, tiny_target, [server], kind="sglang", temperature=0.0, top_k=20, top_p=0.9)
    regenerate(recipe)
    assert lines(recipe) == expected
    first = server.requests[0]
    assert first["path"] == "/generate" and "text" not in first
    assert first["sampling_params"] == {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [END],
        "max_new_tokens": 32,
        "sampling_seed": first["sampling_params"]["sampling_seed"],
    }


def test_openai_s_protocol_seeds_and_key(tmp_path, tiny_target, fake, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "s3cret")
    server = fake()
    recipe = recipe_of(tmp_path, tiny_target, [server], temperature=0.7, api_key_env="SERVER_KEY")
    regenerate(recipe)
    asked = server.requests
    assert all(each["key"] == "Bearer s3cret" and each["path"] == "/v1/completions" for each in asked)
    assert all(each["return_token_ids"] is True and each["top_k"] == -1 and each["model"] == "tiny" for each in asked)
    seeds = {tuple(each["prompt"]): each["seed"] for each in asked}
    assert len(set(seeds.values())) == COUNT and all(0 <= seed < 2**31 for seed in seeds.values())
    regenerate(recipe, redo=True)
    assert {tuple(each["prompt"]): each["seed"] for each in server.requests[COUNT:]} == seeds
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(RecipeError, match="no such environment variable"):
        regenerate(recipe, redo=True)


def test_several_servers_share_the_work_and_a_dead_one_is_left_out(tmp_path, tiny_target, fake, expected):
    servers = [fake(delay_s=0.02), fake(**{"3": "die"}, delay_s=0.02), "http://127.0.0.1:9"]
    recipe = recipe_of(tmp_path, tiny_target, servers)
    regenerate(recipe)
    assert lines(recipe) == expected
    asked = [len(server.requests) for server in servers[:2]]
    assert asked[1] >= 3 and asked[0] + asked[1] >= COUNT


def test_the_least_loaded_server_is_asked(tmp_path, tiny_target, fake):
    servers = [fake(delay_s=0.4), fake(delay_s=0.02)]
    regenerate(recipe_of(tmp_path, tiny_target, servers))
    slow, fast = (len(server.requests) for server in servers)
    assert slow + fast == COUNT and fast > 2 * slow


def test_a_prompt_that_always_fails_is_given_up(tmp_path, tiny_target, fake):
    rows = [exchange(f"question {i}" + ("~" if i == 5 else ""), "old") for i in range(COUNT)]
    poison = 3 + sorted(__import__("tokenizers").pre_tokenizers.ByteLevel.alphabet()).index("~")
    recipe = recipe_of(tmp_path, tiny_target, [fake(**{f"token {poison}": "500"})], rows, attempts=2)
    counts = regenerate(recipe)
    assert counts["conversations"] == COUNT - 1
    assert counts["by_source"]["a.jsonl"]["rejected"] == {"server_error": 1}


def test_a_refused_prompt_is_noted_and_not_asked_again(tmp_path, tiny_target, fake):
    server = fake(**{"4": "400"})
    recipe = recipe_of(tmp_path, tiny_target, [server])
    counts = regenerate(recipe)
    assert counts["by_source"]["a.jsonl"] == {"read": COUNT, "kept": COUNT - 1, "rejected": {"refused_by_server": 1}}
    assert refused(recipe)[0]["reason"] == "refused_by_server" and "made to say 400" in refused(recipe)[0]["detail"]
    assert len(server.requests) == COUNT


def test_prompts_that_leave_no_room_are_not_asked(tmp_path, tiny_target, fake):
    rows = [exchange(f"question {i}", "old") for i in range(COUNT)] + [exchange("x" * 150, "old")]
    server = fake(context=120)
    recipe = recipe_of(tmp_path, tiny_target, [server], rows)
    assert regenerate(recipe)["by_source"]["a.jsonl"]["rejected"] == {"too_long": 1}
    assert "120 are the most" in refused(recipe)[0]["detail"] and len(server.requests) == COUNT


WRONG = [
    ("no_ids", "holds no token ids", "serve the target with vLLM"),
    ("outside", "token id 259", "another model than target.path"),
    ("no_end", "stops after token", "another model than target.path"),
    ("other_prompt", "prompt ids were read that are not", "adds or cuts tokens"),
    ("401", "HTTP 401", "api_key_env"),
]


@pytest.mark.parametrize(("fault", "seen", "help"), WRONG)
def test_a_server_of_another_kind_ends_it_at_once(tmp_path, tiny_target, fake, fault, seen, help):
    with pytest.raises(EngineError, match=seen) as error:
        regenerate(recipe_of(tmp_path, tiny_target, [fake(**{"*": fault, "probe": fault})]))
    assert help in str(error.value)


def test_finished_answers_outlive_a_wrong_server(tmp_path, tiny_target, fake, expected):
    recipe = recipe_of(tmp_path, tiny_target, [fake(**{"12": "outside"})])
    with pytest.raises(EngineError, match="token id 259"):
        regenerate(recipe)
    kept = lines(recipe)
    assert 0 < len(kept) < COUNT and kept.items() <= expected.items()
    good = fake()
    regenerate(recipe_of(tmp_path, tiny_target, [good]))
    assert lines(recipe) == expected and len(good.requests) == COUNT - len(kept)


def test_no_server_is_an_error_at_once(tmp_path, tiny_target):
    with pytest.raises(EngineError, match="All connection attempts failed") as error:
        regenerate(recipe_of(tmp_path, tiny_target, ["http://127.0.0.1:9"]))
    assert "start it" in str(error.value)


def test_a_server_that_never_comes_back_ends_it(tmp_path, tiny_target, fake):
    recipe = recipe_of(tmp_path, tiny_target, [fake(**{"5": "die"})], patience_s=1.5)
    with pytest.raises(EngineError, match=r"no server answered for 1.5 s; the last fault: .*ConnectError"):
        regenerate(recipe)
    assert lines(recipe)


def test_another_model_name(tmp_path, tiny_target, fake):
    with pytest.raises(EngineError, match="serves tiny") as error:
        regenerate(recipe_of(tmp_path, tiny_target, [fake()], model="big"))
    assert "regenerate.model = 'big'" in str(error.value)


def test_turns_follow_one_another(tmp_path, tiny_target, fake):
    rows = [{"turns": [f"one {i}", f"two {i}", f"three {i}"]} for i in range(4)]
    server = fake()
    recipe = recipe_of(tmp_path, tiny_target, [server], rows)
    counts = regenerate(recipe)
    assert counts["conversations"] == 4 and counts["answers"] == len(server.requests) == 12
    for line in lines(recipe).values():
        ids, mask = line["input_ids"], line["loss_mask"]
        ends = [i for i, mine in enumerate(mask) if mine and ids[i] == END]
        assert line["answers"] == len(ends) == 3 and "further" not in line
        for end in ends:
            start = max(i for i in range(end) if not mask[i]) + 1
            assert ids[start : end + 1] == answer_to(ids[:start])


def test_cut_answers_are_kept_or_dropped(tmp_path, tiny_target, fake, expected):
    """At most 5 tokens: some answers are longer, and end the conversation."""
    fits = {id for id, line in expected.items() if line["tokens"] <= 5}
    assert 0 < len(fits) < COUNT
    for policy in ("keep", "drop"):
        folder = tmp_path / policy
        folder.mkdir()
        recipe = recipe_of(folder, tiny_target, [fake()], max_new_tokens=5, cut_answers=policy)
        if policy == "drop" and len(fits) * 2 < COUNT:
            with pytest.raises(EngineError, match="conversations got an answer"):
                regenerate(recipe)
        else:
            regenerate(recipe)
        found = lines(recipe)
        assert {id for id, line in found.items() if not line["cut"]} == fits
        assert all(line["input_ids"][-1] != END for line in found.values() if line["cut"])
        assert (found.keys() == expected.keys()) == (policy == "keep")
        assert len(refused(recipe)) == (0 if policy == "keep" else COUNT - len(fits))


def test_a_cut_answer_ends_its_conversation(tmp_path, tiny_target, fake):
    rows = [{"turns": [f"one {i}", f"two {i}"]} for i in range(12)]
    kept = {}
    for policy in ("keep", "drop"):
        folder = tmp_path / policy
        folder.mkdir()
        recipe = recipe_of(folder, tiny_target, [fake()], rows, max_new_tokens=6, cut_answers=policy)
        regenerate(recipe)
        kept[policy] = lines(recipe)
    assert any(line["answers"] == 1 and not line["cut"] for line in kept["drop"].values())
    for id, line in kept["drop"].items():
        whole = kept["keep"][id]
        assert not line["cut"] and whole["answers"] == line["answers"] + whole["cut"]
        assert whole["input_ids"][: len(line["input_ids"])] == line["input_ids"]


def client(recipe):
    command = [Path(sys.executable).with_name("eyas"), "regenerate", recipe]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def wait_for(recipe, count, process):
    path = recipe.parent / "runs/recipe/regenerated/000.jsonl"
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)


def test_kills_and_signals_lose_nothing(tmp_path, tiny_target, fake, expected):
    """SIGKILL, SIGTERM and SIGINT one after the other, then to the end: the answers of an undisturbed run."""
    server = fake(delay_s=0.3)
    recipe = recipe_of(tmp_path, tiny_target, [server], in_flight=2)
    ends = [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
    before = 0
    for signum, code in ends:
        process = client(recipe)
        wait_for(recipe, before + 3, process)
        sent = time.monotonic()
        process.send_signal(signum)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == code and time.monotonic() - sent < 10, said
        if signum != signal.SIGKILL:
            assert f"stopped by {signum.name}" in said and "next: eyas regenerate" in said
            assert "Traceback" not in said
        before = len(lines(recipe))
    assert len(lines(recipe)) < COUNT
    process = client(recipe)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert lines(recipe) == expected
    # At most the two requests in flight are asked again, each time.
    assert len(server.requests) <= COUNT + 2 * len(ends)


def test_a_server_that_is_killed_and_started_again(tmp_path, tiny_target, fake, expected):
    first = fake(**{"9": "die"})
    recipe = recipe_of(tmp_path, tiny_target, [first], patience_s=60.0)
    process = client(recipe)
    first.process.wait(timeout=60)
    fake(port=first.port)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert lines(recipe) == expected


def test_settings_that_changed_midway_are_refused(tmp_path, tiny_target, fake):
    recipe = recipe_of(tmp_path, tiny_target, [fake(**{"5": "die"})], patience_s=0.6)
    with pytest.raises(EngineError):
        regenerate(recipe)
    changed = recipe_of(tmp_path, tiny_target, [fake()], temperature=0.5)
    with pytest.raises(RecipeError, match=r"regenerate.temperature was 0.0 and is now 0.5"):
        regenerate(changed)
    assert regenerate(changed, redo=True)["conversations"] == COUNT


def test_a_target_without_a_template(tmp_path, tiny_target, fake):
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(tiny_target, bare)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(DataError, match="no chat template"):
        regenerate(recipe_of(tmp_path, bare, [fake()]))


def test_the_fake_server_is_alive(fake):
    assert httpx.get(f"{fake().url}/v1/models").json()["data"][0]["id"] == "tiny"
