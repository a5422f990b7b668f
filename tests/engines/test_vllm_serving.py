"""A trained drafter in a real vLLM on CPU, in fp32: nothing changes but speed, and acceptance is what replay and
reference decoding say; wrong layer ids are told before a server is started.

Run by `make test-engines`, which makes vLLM's environment and names it in EYAS_VLLM_VENV.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from small_drafter import small_run
from vllm_serving_runs import DRAFTS, PROMPTS, STREAMS, eyas

pytestmark = pytest.mark.timeout(1800)  # on a machine that does much else a server takes minutes to start


@pytest.fixture(scope="module")
def run(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    return small_run(tmp_path_factory.mktemp("runs"), demo_target)


@pytest.fixture(scope="module")
def figures(run: Path) -> dict[str, Any]:
    done = eyas(run, "evaluate", "--engine", "vllm")
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads((run / "serving.json").read_text()))


def test_outputs_are_the_same_with_and_without_the_drafter(figures: dict[str, Any]) -> None:
    assert figures["dtype"] == "float32" and figures["version"].startswith("0.32")
    assert figures["lossless"] is True
    assert figures["identical"] == {"same": figures["identical"]["of"], "of": STREAMS + PROMPTS}
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
        assert part["speedup"][str(STREAMS)]["mean"] > 0
        for rates in part["rates"][str(STREAMS)].values():
            assert rates["tokens_per_s"]["mean"] >= rates["tokens_per_s_per_stream"]["mean"] > 0
            assert 0 < rates["first_token_s"]["median"] <= rates["first_token_s"]["p90"]
    alone, drafted = (figures["servers"][name]["command"] for name in ("without", "with"))
    at = drafted.index("--speculative-config")
    assert drafted[:at] + drafted[at + 2 : -1] == alone[:-1], "all other flags but the port are alike"


def test_a_second_call_measures_nothing(run: Path, figures: dict[str, Any]) -> None:
    done = eyas(run, "evaluate", "--engine", "vllm")
    assert done.returncode == 0 and "skipped" in done.stderr and "started" not in done.stderr


def test_wrong_layer_ids_are_named_before_the_start(run: Path, figures: dict[str, Any]) -> None:
    config = run / "export/config.json"
    right = config.read_text()
    ids = [layer + 1 for layer in json.loads(right)["eagle_aux_hidden_state_layer_ids"]]
    config.write_text(json.dumps(json.loads(right) | {"eagle_aux_hidden_state_layer_ids": ids}))
    refused = eyas(run, "evaluate", "--engine", "vllm", "--redo")
    config.write_text(right)
    assert refused.returncode == 3 and f"is {ids}, which vLLM would capture" in refused.stderr
    assert "serve: vLLM" not in refused.stderr and json.loads((run / "serving.json").read_text()) == figures
