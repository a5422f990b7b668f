"""vLLM's command line, what is refused before it is started, and its HTTP answers. The real one: tests/engines/."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers_serve import stand_in_run

from eyas.engine import vllm
from eyas.engine.client import Prefilled, Refused, Transient
from eyas.engine.flags import read_flags
from eyas.engine.launch import check_values
from eyas.engine.vllm_client import VLLMClient
from eyas.errors import EngineError, RecipeError
from eyas.target import load_target


def plan(tmp_path: Path, target: Path, *overrides: str, version: str = "0.32.0+cpu", **more: Any) -> Any:
    run = stand_in_run(tmp_path, target, "", 'engine.kind="vllm"', *overrides, **more)
    return vllm.plan_launch(run, load_target(run.recipe.target), version)


def test_the_command(tmp_path: Path, tiny_target: Path) -> None:
    launch = plan(tmp_path, tiny_target, 'engine.args=["--max-num-batched-tokens", "64"]')
    words = launch.command(8000)
    assert words[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    assert launch.kind.model_of(words) == str(tiny_target)
    told = words[5:]
    assert told[:6] == ["--dtype", "float32", "--seed", "0", "--max-model-len", "264"]  # data.max_tokens and 8
    assert told[6:11] == [
        *("--no-enable-prefix-caching", "--enforce-eager", "--disable-uvicorn-access-log"),
        *("--max-num-batched-tokens", "64"),
    ]
    drafter, connector = (json.loads(told[told.index(flag) + 1]) for flag in list(vllm.CAPTURE_FLAGS)[1:])
    assert drafter["method"] == "extract_hidden_states" and drafter["num_speculative_tokens"] == 1
    # Eyas's ids are vLLM's own; the stream after the last of 8 layers comes as a fourth.
    assert drafter["draft_model_config"]["hf_config"] == {"eagle_aux_hidden_state_layer_ids": [2, 4, 5, 8]}
    assert connector["kv_connector_module_path"] == "eyas_tap.vllm"
    assert told[-4:] == ["--host", "127.0.0.1", "--port", "8000"]
    assert launch.env["VLLM_NO_USAGE_STATS"] == "1" and launch.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert launch.cache_bytes == 1 << 30
    settings = launch.tap_settings
    assert settings == {"norm_file": str(tiny_target / "model.safetensors"), "norm_tensor": "model.norm.weight"} | {
        "norm_eps": 1e-6
    }


def test_a_plain_server_has_no_capture(tmp_path: Path, tiny_target: Path) -> None:
    own = ["--speculative-config", '{"method": "eagle3"}', "--max-model-len", "300"]
    launch = plan(tmp_path, tiny_target, f"engine.args={json.dumps(own)}", profile="serving")
    told = " ".join(launch.flags)
    assert told == f"{tiny_target} --dtype float32 --seed 0 {' '.join(own)}" and not launch.tap_settings


def test_releases_that_take_a_steps_log_probabilities_at_once_take_shorter_steps(
    tmp_path: Path, tiny_target: Path
) -> None:
    assert "--max-num-batched-tokens 2048" in " ".join(plan(tmp_path, tiny_target, version="0.28.0").flags)
    assert "--max-num-batched-tokens" not in plan(tmp_path, tiny_target, version="0.29.0").flags


@pytest.mark.parametrize("version", ["0.26.0", "0.34.0", "0.10.2", "1.0.0", "main"])
def test_other_releases_are_refused(version: str) -> None:
    with pytest.raises(EngineError, match="vLLM") as error:
        vllm.VLLM.check_release(version, "engine")
    assert "0.27.0 to 0.33.0" in error.value.expected


@pytest.mark.parametrize("version", ["0.27.0", "0.32.0+cpu", "0.33.0", "0.30.1.post1"])
def test_releases_that_are_taken(version: str) -> None:
    assert vllm.VLLM.releases.find(version) == vllm.VLLM.check_release(version, "engine")


@pytest.mark.parametrize(
    "word",
    [
        "--model",
        "--max-model-len",
        "--max_model_len=9",
        "--speculative-config.method",
        "--kv-transfer-config",
        "--dtype",
    ],
)
def test_what_the_recipe_says_elsewhere_is_refused(tmp_path: Path, tiny_target: Path, word: str) -> None:
    with pytest.raises(RecipeError, match="engine.args holds --"):
        plan(tmp_path, tiny_target, f'engine.args=["{word}"]')


def test_samples_longer_than_the_context_are_refused(tmp_path: Path, tiny_target: Path) -> None:
    """The tiny target has 512 positions: vLLM takes prompts of 511, with a token behind them."""
    assert "512" in plan(tmp_path, tiny_target, "data.max_tokens=511").flags
    with pytest.raises(RecipeError, match="data.max_tokens = 512") as error:
        plan(tmp_path, tiny_target, "data.max_tokens=512")
    assert error.value.next == "--set data.max_tokens=511"


def test_latent_attention_is_refused(tmp_path: Path, tiny_target: Path) -> None:
    target = load_target(stand_in_run(tmp_path, tiny_target, "").recipe.target)
    target.config["model_type"] = "deepseek_v3"
    with pytest.raises(EngineError, match="'deepseek_v3' with vLLM") as error:
        vllm.capture_flags(target, [2, 4, 5])
    assert "sglang" in error.value.next


def test_the_tap_is_among_the_plugins(tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "VLLM_PLUGINS" not in plan(tmp_path, tiny_target).env
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    assert plan(tmp_path, tiny_target).env["VLLM_PLUGINS"] == "mine,eyas_tap"
    assert "VLLM_PLUGINS" not in plan(tmp_path, tiny_target, profile="serving").env


def test_values_that_make_states_wrong(tmp_path: Path, tiny_target: Path) -> None:
    launch = plan(tmp_path, tiny_target)
    check_values({"pipeline_parallel_size": 1, "enable_dbo": False, "nnodes": None}, launch)
    for name, value in (("pipeline_parallel_size", 2), ("data_parallel_size", 4), ("enable_dbo", True)):
        with pytest.raises(EngineError, match=f"--{name.replace('_', '-')} is {value}") as error:
            check_values({name: value}, launch)
        assert error.value.cause


PARSER = {
    "vllm/__init__.py": "",
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": "import argparse\nclass FlexibleArgumentParser(argparse.ArgumentParser): ...\n",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/cli/__init__.py": "",
    "vllm/entrypoints/cli/serve.py": """
class ServeSubcommand:
    def subparser_init(self, subparsers):
        serve = subparsers.add_parser("serve")
        serve.add_argument("model_tag", nargs="?")
        for flag in ("--dtype", "--host", "--speculative-config", "--kv-transfer-config"):
            serve.add_argument(flag)
        for flag in ("--seed", "--port", "--max-model-len", "--max-num-seqs"):
            serve.add_argument(flag, type=int)
        for flag in ("--no-enable-prefix-caching", "--enforce-eager", "--disable-uvicorn-access-log"):
            serve.add_argument(flag, action="store_true")
        return serve
""",
}


def test_flags_are_read_by_the_servers_own_parser(tmp_path: Path, tiny_target: Path) -> None:
    for name, text in PARSER.items():
        (tmp_path / "stand-in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "stand-in" / name).write_text(text)
    env = f'engine.env={{ PYTHONPATH = "{tmp_path / "stand-in"}" }}'

    def read(*args: str) -> dict[str, Any]:
        return read_flags(plan(tmp_path, tiny_target, env, f"engine.args={json.dumps(args)}"), 8000)

    values = read("--max-num-seqs", "16")
    assert (values["model_tag"], values["max_num_seqs"], values["port"]) == (str(tiny_target), 16, 8000)
    with pytest.raises(EngineError, match="vLLM 0.32.0.cpu does not know --max-num-sequences") as error:
        read("--max-num-sequences", "16")
    assert "the nearest is --max-num-seqs" in error.value.expected and "--help=all" in error.value.next
    with pytest.raises(EngineError, match="refuses its flags: argument --max-num-seqs: invalid int value"):
        read("--max-num-seqs", "many")


class Answers(BaseHTTPRequestHandler):
    """Sends what the test wants: (status, body)."""

    status, body = 200, {}  # type: ignore[var-annotated]
    asked: dict[str, Any] = {}

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.answer(200, {"version": "0.32.0"})

    def do_POST(self) -> None:
        Answers.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(Answers.status, Answers.body)

    def answer(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def ask(url: str, *arguments: Any) -> Prefilled:
    async def run() -> Prefilled:
        async with VLLMClient(url, Path("/none")) as client:
            return await client.prefill(*arguments)

    return asyncio.run(run())


def choice(**more: Any) -> dict[str, Any]:
    entries = [None, {"8": {"logprob": -1.5}}, {"9": {"logprob": -0.25}, "4": {"logprob": -0.1}}]
    return {
        "choices": [{"token_ids": [5], "prompt_token_ids": [7, 8, 9], "prompt_logprobs": entries} | more],
    }


def test_a_prompt_and_its_logprobs(url: str) -> None:
    Answers.status, Answers.body = 200, choice()
    answer = ask(url, [7, 8, 9], "eyas-1", 0)
    assert answer.next_token == 5 and answer.logprobs.tolist() == [-1.5, -0.25]
    assert Answers.asked["kv_transfer_params"] == {"eyas_rid": "eyas-1"} and Answers.asked["max_tokens"] == 1
    assert ask(url, [7, 8, 9], "eyas-1", 1).logprobs.tolist() == [-0.25]
    assert len(ask(url, [7, 8, 9], "eyas-1").logprobs) == 0 and "prompt_logprobs" not in Answers.asked


@pytest.mark.parametrize(
    ("status", "body", "error", "match"),
    [
        (400, {"error": "max_tokens must be at least 1"}, Refused, "HTTP 400"),
        (500, {"error": "EngineDeadError"}, Transient, "HTTP 500"),
        (404, {}, EngineError, "HTTP 404"),
        (200, {"choices": []}, EngineError, "ValueError"),
        (200, choice(prompt_logprobs=None), EngineError, "TypeError"),
        (200, choice(prompt_token_ids=[7, 8]), EngineError, "2 prompt tokens were read"),
    ],
)
def test_answers_that_are_none(url: str, status: int, body: Any, error: type[Exception], match: str) -> None:
    Answers.status, Answers.body = status, body
    with pytest.raises(error, match=match):
        ask(url, [7, 8, 9], "eyas-1", 0)


def test_what_runs_there_is_told_by_the_tap(url: str, tmp_path: Path) -> None:
    async def facts() -> Any:
        async with VLLMClient(url, tmp_path / "events.jsonl") as client:
            return await client.facts()

    with pytest.raises(EngineError, match="has not told what runs"):
        asyncio.run(facts())
    told = {"version": "0.32.0", "longest_prompt": 511, "chunk_tokens": 64, "dtype": "float32", "load_format": "dummy"}
    lines = [{"event": "plugin"}, {"event": "layers"} | told]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "fir')
    found = asyncio.run(facts())
    assert (found.longest_prompt, found.chunk_tokens, found.dummy_weights) == (511, 64, True)
