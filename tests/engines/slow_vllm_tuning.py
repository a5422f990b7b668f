"""Tuning, the tuned server, and what parity says of a drafter with wrong layer ids, with a real vLLM on CPU.

Run by `make test-vllm-tuning`.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from small_drafter import small_run
from vllm_serving_runs import eyas, settings_of

from eyas.engine.profile import load_profile
from eyas.errors import VerificationFailed
from eyas.run import open_run
from eyas.stages import run_stage

pytestmark = pytest.mark.timeout(1800)  # on a machine that does much else a server takes minutes to start


@pytest.fixture(scope="module")
def run(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run: plain EAGLE-3 by AdamW, which starts at what the target reads off its deepest aux
    layer, unnormed. To the demo's drafter, after so few steps, one layer off is all the same."""
    plain = ("train.optimizer=adamw", "drafter.fc_norm=false", "drafter.norm_output=false")
    return small_run(tmp_path_factory.mktemp("runs"), demo_target, *plain)


@pytest.fixture(scope="module")
def figures(run: Path) -> dict[str, Any]:
    done = eyas(run, "evaluate", "--engine", "vllm")
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads((run / "serving.json").read_text()))


def test_tune_writes_a_profile_that_serve_start_and_deploy_use(run: Path, figures: dict[str, Any]) -> None:
    choices = run.parent / "two.toml"
    choices.write_text('about = "two"\n[[choices]]\ndrafter = [{ drafts = 3 }, { drafts = 1 }]\nreason = "a test"\n')
    settings = {"serving.max_prompts": 4, "serving.concurrency": "[4]", "serving.max_new_tokens": 16}
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


def test_parity_names_wrong_layer_ids(run: Path, figures: dict[str, Any]) -> None:
    (run / "tuned-vllm.toml").unlink(missing_ok=True)
    config = run / "export/config.json"
    right = json.loads(config.read_text())
    ids = [layer + 1 for layer in right["eagle_aux_hidden_state_layer_ids"]]
    config.write_text(json.dumps(right | {"eagle_aux_hidden_state_layer_ids": ids}))
    # What was measured without the drafter is kept; the rest is measured anew, behind the check's back.
    (run / "records/serving.json").unlink()
    journal = run / "serving/journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(
        "".join(line for line in lines if '"variant":"with"' not in line and '"server":"with"' not in line)
    )
    with pytest.raises(VerificationFailed, match="a replay of its answers gives") as caught:
        # One layer off costs so small a drafter 2% of its acceptance length.
        changes = {"serving.max_gap": 0.005, "serving.servers": 1, "evaluate.decode_prompts": 0}
        run_stage(open_run(run, settings_of(run, **changes)), "serving")
    config.write_text(json.dumps(right))
    told = json.loads((run / "serving.json").read_text())
    print(json.dumps(told["parity"], indent=1))
    assert told["lossless"] is True, "wrong drafts cost speed, never tokens"
    assert not told["parity"]["passed"]
    cause = "layer ids: the engine captures each aux layer one too high"
    assert told["parity"]["causes"][0]["cause"] == cause and cause in caught.value.cause
