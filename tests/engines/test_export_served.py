"""An EAGLE-3.1 drafter, trained and exported, is accepted by vLLM exactly where reference decoding accepts it; with the
wrong norm switch the same weights are not. A tiny random target learns its own greedy answers by heart, in fp32.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_capture import make_run
from helpers_tiny import make_tiny_target
from transformers import LlamaForCausalLM

from eyas.data.tokens import Sample, sample_id
from eyas.drafter.eagle3 import Drafter
from eyas.drafter.saved import load_drafter
from eyas.drafter.target import load_target_head
from eyas.drafter.walk import Acceptance
from eyas.errors import VerificationFailed
from eyas.evaluate.decode import DrafterSession, TargetSession, decode_speculative
from eyas.export.stage import check, trained_checkpoint
from eyas.run import Run
from eyas.stages import run_stage
from eyas.target import load_target

HERE = Path(__file__).resolve().parent
PROMPTS, ANSWER, DRAFTS, WINDOW = 8, 40, 3, 16
SETTINGS = [
    *("train.draft_vocab_size=200", "train.epochs=180", "train.batch_tokens=512", "train.ttt_steps=4"),
    *("train.lr=3e-3", "train.device=cpu", "train.precision=fp32", "train.eval_every=1000"),
    *("drafter.fc_norm=true", "drafter.norm_output=true", "export.dtype=float32"),
    *(f"evaluate.drafts={DRAFTS}", f"evaluate.decode_prompts={PROMPTS}", f"evaluate.decode_tokens={ANSWER}"),
]


def own_answers(target: Path) -> list[list[int]]:
    """Random prompts with the target's own greedy answers."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompts = torch.from_numpy(np.random.default_rng(0).integers(10, 259, (PROMPTS, 8)))
    with torch.no_grad():
        answers = model.generate(prompts, max_new_tokens=ANSWER + 8, do_sample=False, pad_token_id=2)
    return [[int(token) for token in row] for row in answers]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("served")
    target = make_tiny_target(folder / "target", hidden=128)
    samples = []
    for row in own_answers(target):
        # The held-out sample is one token shorter: another sample, whose answer was learned.
        for split, ids in (("train", row), ("heldout", row[:-1])):
            tokens, mask = np.array(ids, dtype=np.int32), np.arange(len(ids)) >= 8
            samples.append(Sample(sample_id(tokens, mask), "own", split, tokens, mask))
    made = make_run(folder, target, samples, overrides=SETTINGS)
    for stage in ("capture", "verify", "train", "evaluate", "export"):
        run_stage(made, stage)
    return made


def serve(run: Run, folder: Path) -> dict[str, Any]:
    venv = os.environ.get("EYAS_VLLM_VENV")
    assert venv, "EYAS_VLLM_VENV is not set: run `make test-engines`"
    target = Path(run.recipe.target.path)
    prompts = [row[:8] for row in own_answers(target)]
    wanted = {"target": str(target), "draft": str(folder), "drafts": DRAFTS, "tokens": ANSWER, "prompts": prompts}
    unset = ("PYTHONPATH", "OMP_NUM_THREADS")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "0"}  # one thread never waits for another on a busy machine
    command = [Path(venv) / "bin/python", HERE / "accept_vllm.py", json.dumps(wanted)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    return dict(json.loads(done.stdout.split("RESULT", 1)[1]))


def test_vllm_accepts_what_reference_decoding_accepts(run: Run) -> None:
    decode = json.loads((run.dir / "eval.json").read_text())["decode"]
    assert decode["acceptance_length"] > 3, "a drafter that learned its text"
    served = serve(run, run.export_dir)
    print(
        "reference",
        decode["verifications"],
        decode["acceptance_per_position"],
        "vLLM",
        served["verifications"],
        served["accepted_at"],
    )
    # The last verification of an answer may accept drafts beyond its end, which vLLM counts and the reference does not.
    assert abs(served["verifications"] - decode["verifications"]) <= 1
    for share, accepted in zip(decode["acceptance_per_position"], served["accepted_at"], strict=True):
        reference = round(share * decode["verifications"])
        assert reference - 1 <= accepted <= reference + PROMPTS


def decoded_in_a_window(run: Run, window: int) -> Acceptance:
    """Reference decoding of the prompts with the run's weights, each row seeing that many positions."""
    trained = load_drafter(trained_checkpoint(run))
    drafter = Drafter(replace(trained.config, sliding_window=window))
    drafter.load_state_dict(trained.state_dict())
    target, cpu = load_target(run.recipe.target), torch.device("cpu")
    session = DrafterSession(drafter, load_target_head(target, torch.float32, cpu).embedding, DRAFTS)
    engine = TargetSession(target, torch.float32, cpu, drafter.config.aux_layer_ids)
    total = Acceptance.none(DRAFTS)
    for row in own_answers(target.path):
        total.merge(decode_speculative(engine, session, row[:8], ANSWER, 0.0, torch.Generator()).acceptance)
    return total


def test_vllm_attends_in_the_window_that_reference_decoding_has(run: Run, tmp_path: Path) -> None:
    """Narrower than recipes allow, so that short answers pass its edge. Reference decoding verifies 157 times with a
    window of 15, 147 times with 16, 141 times with 17: one position more or less would be seen."""
    reference, whole = decoded_in_a_window(run, WINDOW), decoded_in_a_window(run, 0)
    config = json.loads((run.export_dir / "config.json").read_text())
    folder = tmp_path / "windowed"
    folder.mkdir()
    window = {"sliding_window": WINDOW, "layer_types": ["sliding_attention"]}
    (folder / "config.json").write_text(json.dumps(config | window))
    (folder / "model.safetensors").symlink_to(run.export_dir / "model.safetensors")
    served = serve(run, folder)
    print("window", WINDOW, reference, "whole", whole, "vLLM", served["verifications"], served["accepted_at"])
    assert reference.verifications > 1.2 * whole.verifications, "the window must matter"
    assert abs(served["verifications"] - reference.verifications) <= 1
    for wanted, accepted in zip(reference.accepted_at, served["accepted_at"], strict=True):
        assert wanted - 1 <= accepted <= wanted + PROMPTS


def test_the_wrong_norm_switch_is_named_and_costs_acceptance(run: Run, tmp_path: Path) -> None:
    config = json.loads((run.export_dir / "config.json").read_text())
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "config.json").write_text(json.dumps(config | {"norm_output": False}))
    (wrong / "model.safetensors").symlink_to(run.export_dir / "model.safetensors")
    served = serve(run, wrong)
    length = 1 + sum(served["accepted_at"]) / served["verifications"]
    decode = json.loads((run.dir / "eval.json").read_text())["decode"]
    print(f"wrong switch: {length:.2f} instead of {decode['acceptance_length']:.2f}")
    assert length < decode["acceptance_length"] - 0.5
    kept = (run.export_dir / "config.json").read_text()
    (run.export_dir / "config.json").write_text(json.dumps(config | {"norm_output": False}))
    with pytest.raises(VerificationFailed, match="norm_output is off as vLLM reads it; expected on"):
        check(run)
    (run.export_dir / "config.json").write_text(kept)
    check(run)
