"""A trained drafter in a real vLLM on CPU, in fp32: nothing changes but speed, and acceptance is what replay and
reference decoding say. Then tuning, the tuned server, and a drafter with wrong layer ids.

Run by `make test-engines`, which makes vLLM's environment and names it in EYAS_VLLM_VENV.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from small_drafter import small_run

from eyas.engine.profile import load_profile
from eyas.errors import VerificationFailed
from eyas.run import open_run
from eyas.stages import run_stage

PROMPTS, DRAFTS = 16, 3
ARGS = '["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"]'


@pytest.fixture(scope="module")
def run(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    return small_run(tmp_path_factory.mktemp("runs"), demo_target)


def settings_of(run: Path, **changes: Any) -> list[str]:
    """Overrides: fp32, 48 tokens an answer, four streams."""
    venv = os.environ.get("EYAS_VLLM_VENV")
    assert venv, "EYAS_VLLM_VENV is not set: run `make test-engines`"
    given = {
        "runs_dir": str(run.parent),
        "serving.kind": "vllm",
        "serving.python": f"{venv}/bin/python",
        "serving.args": ARGS,
        "serving.dtype": "float32",
        "serving.drafts": DRAFTS,
        "serving.max_new_tokens": 48,
        "serving.repeats": 1,
        "serving.concurrency": "[4]",
        "serving.parity_prompts": PROMPTS,
        "evaluate.decode_prompts": PROMPTS,
    } | changes
    return [f"{key}={value}" for key, value in given.items()]


def eyas(run: Path, command: str, *options: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Run a command (`serve start` is one) on the run."""
    words = [sys.executable, "-m", "eyas", *command.split(), run, *options]
    words += [word for text in settings_of(run, **changes) for word in ("--set", text)]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {"GOMP_SPINCOUNT": "1000"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=1800)
    print(done.stdout, done.stderr, sep="\n")
    return done


@pytest.fixture(scope="module")
def figures(run: Path) -> dict[str, Any]:
    done = eyas(run, "evaluate", "--engine", "vllm")
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads((run / "serving.json").read_text()))


def test_outputs_are_the_same_with_and_without_the_drafter(figures: dict[str, Any]) -> None:
    assert figures["dtype"] == "float32" and figures["version"].startswith("0.32")
    assert figures["lossless"] is True
    assert figures["identical"] == {"same": figures["identical"]["of"], "of": 17 + PROMPTS}
    assert figures["parity"]["differences"] == {"answers": 0, "of": PROMPTS, "largest_tie": None}


def test_engine_replay_and_reference_decoding_accept_the_same(figures: dict[str, Any]) -> None:
    told = figures["parity"]
    engine, replay, decode = (told[name]["acceptance_length"] for name in ("engine", "replay", "decode"))
    print(f"acceptance length: engine {engine}, replay {replay}, reference decoding {decode}; gap {told['gap']:.4f}")
    assert told["decode"]["prompts"] == told["prompts"] == PROMPTS
    assert engine > 1.2 and told["passed"]
    assert abs(engine / replay - 1) <= 0.03 and abs(engine / decode - 1) <= 0.03
    assert told["engine"]["verifications"] == told["replay"]["verifications"] == told["decode"]["verifications"]


def test_the_figures_are_whole(figures: dict[str, Any]) -> None:
    assert figures["acceptance_length"] > 1.2 and figures["drafts"] == DRAFTS
    shares = figures["acceptance_per_position"]
    assert len(shares) == DRAFTS and sorted(shares, reverse=True) == shares
    for part in (figures, *figures["sets"].values()):
        assert part["speedup"]["4"]["mean"] > 0
        for rates in part["rates"]["4"].values():
            assert rates["tokens_per_s"]["mean"] >= rates["tokens_per_s_per_stream"]["mean"] > 0
            assert 0 < rates["first_token_s"]["median"] <= rates["first_token_s"]["p90"]
    alone, drafted = (figures["servers"][name]["command"] for name in ("without", "with"))
    at = drafted.index("--speculative-config")
    assert drafted[:at] + drafted[at + 2 : -1] == alone[:-1], "all other flags but the port are alike"


def test_a_second_call_measures_nothing(run: Path, figures: dict[str, Any]) -> None:
    done = eyas(run, "evaluate", "--engine", "vllm")
    assert done.returncode == 0 and "skipped" in done.stderr and "started" not in done.stderr


def test_tune_writes_a_profile_that_serve_start_and_deploy_use(run: Path, figures: dict[str, Any]) -> None:
    choices = run.parent / "two.toml"
    choices.write_text('about = "two"\n[[choices]]\ndrafter = [{ drafts = 3 }, { drafts = 1 }]\nreason = "a test"\n')
    settings = {"serving.max_prompts": 4, "serving.servers": 2, "serving.max_new_tokens": 24}
    done = eyas(run, "tune", "--choices", str(choices), "--minutes", "20", **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    profile = load_profile(str(run / "tuned-vllm.toml"))
    assert profile.drafter is not None and profile.drafter.drafts in (1, 3)
    tried = {entry["settings"]: entry for entry in profile.evidence["configurations"]}
    assert tried.keys() == {"drafts 3", "drafts 1"} and all(entry["passes"] == 3 for entry in tried.values())
    assert done.stderr.count("serve: vLLM") == 2, "each server was started once"
    deployed = eyas(run, "deploy", "--engine", "vllm")
    assert f'"num_speculative_tokens": {profile.drafter.drafts}' in deployed.stdout
    started = eyas(run, "serve start", "--with-drafter")
    try:
        assert started.returncode == 0, started.stderr[-3000:]
        url = next(word for word in started.stdout.split() if word.startswith("http://"))
        body = {"prompt": "The river", "max_tokens": 8, "temperature": 0}
        body["model"] = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["usage"]["completion_tokens"] == 8
        assert "vllm:spec_decode_num_drafts_total" in httpx.get(f"{url}/metrics", timeout=60).text
        status = eyas(run, "serve status", "--with-drafter").stdout
        assert "ready" in status and f'"num_speculative_tokens": {profile.drafter.drafts}' in status
    finally:
        stopped = eyas(run, "serve stop", "--with-drafter")
    assert stopped.returncode == 0 and "processes ended" in stopped.stdout


def test_wrong_layer_ids_are_named_before_the_start_and_by_parity(run: Path, figures: dict[str, Any]) -> None:
    (run / "tuned-vllm.toml").unlink(missing_ok=True)
    config = run / "export/config.json"
    right = json.loads(config.read_text())
    ids = [layer + 1 for layer in right["eagle_aux_hidden_state_layer_ids"]]
    config.write_text(json.dumps(right | {"eagle_aux_hidden_state_layer_ids": ids}))
    refused = eyas(run, "evaluate", "--engine", "vllm", "--redo")
    assert refused.returncode == 3 and "layer" in refused.stderr and "serve: vLLM" not in refused.stderr
    # What was measured without the drafter is kept; the rest is measured anew, behind the check's back.
    (run / "records/serving.json").unlink()
    journal = run / "serving/journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(
        "".join(line for line in lines if '"variant":"with"' not in line and '"server":"with"' not in line)
    )
    with pytest.raises(VerificationFailed, match="a replay of its answers gives") as caught:
        # One layer off costs so small a drafter 2% of its acceptance length.
        run_stage(open_run(run, settings_of(run, **{"serving.max_gap": 0.01})), "serving")
    config.write_text(json.dumps(right))
    told = json.loads((run / "serving.json").read_text())
    print(json.dumps(told["parity"], indent=1))
    assert told["lossless"] is True, "wrong drafts cost speed, never tokens"
    assert not told["parity"]["passed"]
    cause = "layer ids: the engine captures each aux layer one too high"
    assert told["parity"]["causes"][0]["cause"] == cause and cause in caught.value.cause
