"""The evaluate stage on a tiny random target: figures by source, and which prompts are decoded."""

import json
from pathlib import Path

import pytest
from helpers_capture import make_run, random_samples

from eyas.evaluate.stage import spread
from eyas.run import Run
from eyas.stages import run_stage
from eyas.store.reader import StoreReader

SETTINGS = ["train.draft_vocab_size=200", "train.epochs=1", "train.batch_tokens=128", "train.ttt_steps=2"]
SETTINGS += ["train.device=cpu", "train.precision=fp32", "train.lr=3e-3", "evaluate.decode_prompts=0"]


@pytest.fixture(scope="module")
def evaluated(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(
        tmp_path_factory.mktemp("evaluated"),
        tiny_target,
        random_samples([20 + 3 * i % 41 for i in range(40)]),
        overrides=SETTINGS,
    )
    for stage in ("capture", "verify", "train", "evaluate"):
        run_stage(run, stage)
    return run


def test_the_sources_add_up_to_the_whole(evaluated: Run) -> None:
    result = json.loads((evaluated.dir / "eval.json").read_text())
    assert sorted(result["by_source"]) == ["source0", "source1"]
    parts = result["by_source"].values()
    assert sum(part["verifications"] for part in parts) == result["verifications"] > 0
    accepted = sum((part["acceptance_length"] - 1) * part["verifications"] for part in parts)
    assert accepted == pytest.approx((result["acceptance_length"] - 1) * result["verifications"], abs=0.1)


def test_prompts_are_taken_from_the_sources_in_turn(evaluated: Run) -> None:
    reader = StoreReader(evaluated.store_url)
    samples = [reader.read(ref.sample_id) for ref in reader.samples("heldout")]
    chosen = spread(samples, 4)
    assert sorted(sample.source for sample in chosen) == ["source0", "source0", "source1", "source1"]
    assert [sample.source for sample in chosen][:2] in (["source0", "source1"], ["source1", "source0"])
    assert {sample.id for sample in spread(samples, 1000)} == {sample.id for sample in samples}
