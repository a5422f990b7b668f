"""Variants through the whole train stage: they learn, resume bit for bit, and leave what they promise."""

from pathlib import Path

import pytest
import torch
from helpers_train import capture_run, copy_of, losses, weights

from eyas.drafter.target import load_target_head
from eyas.errors import TrainError
from eyas.stages import run_stage
from eyas.target import load_target
from eyas.train import trainer as trainer_module


@pytest.fixture(scope="module")
def captured(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture_run(tmp_path_factory.mktemp("captured"), tiny_target, count=20)


@pytest.fixture(autouse=True)
def every_step_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "LOG_EVERY", 1)


class Stopped(Exception):
    """Stands for a kill right after a step."""


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the trainer die after so many steps of this process."""
    done = 0
    original = trainer_module.Trainer._step

    def counted(self: object, *arguments: object) -> object:
        nonlocal done
        if done == step:
            raise Stopped
        done += 1
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer_module.Trainer, "_step", counted)


VARIANTS = {
    "muon": ["train.optimizer=muon", "train.weight_decay=0.01"],
    "lk-hybrid": ["train.loss=lk-hybrid"],
    "lk-alpha": ["train.loss=lk-alpha"],
    "frozen head": ["train.freeze_lm_head=true"],
    "EAGLE-3.1": ["drafter.fc_norm=true", "drafter.norm_output=true"],
    "speculators' form": ["drafter.norm_before_fc=true", "drafter.norm_before_residual=true"],
    "bf16": ["train.precision=bf16", "train.loss=lk-hybrid", "train.optimizer=muon"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_learns_and_resumes_bit_for_bit(name: str, captured: Path, tmp_path: Path) -> None:
    settings = ["train.epochs=7", "train.lr=5e-3", *VARIANTS[name]]
    straight = copy_of(captured, tmp_path / "straight", *settings)
    epoch = run_stage(straight, "train").counts["steps"] // 7
    assert sum(losses(straight)[-epoch:]) < 0.9 * sum(losses(straight)[:epoch])
    broken = copy_of(captured, tmp_path / "broken", *settings)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(10, patch)
        run_stage(broken, "train")
    run_stage(broken, "train")
    for tensor_name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(broken)[tensor_name]), tensor_name
    assert losses(straight) == losses(broken)


def test_variants_train_other_weights(captured: Path, tmp_path: Path) -> None:
    """No switch is without effect."""
    runs = {name: copy_of(captured, tmp_path / name.replace(" ", "-"), *VARIANTS[name]) for name in VARIANTS}
    runs["plain"] = copy_of(captured, tmp_path / "plain")
    for run in runs.values():
        run_stage(run, "train")
    seen = {name: losses(run)[-1] for name, run in runs.items()}
    assert len(set(seen.values())) == len(runs), seen


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["train.compile=true", "train.lk_eta=2.0"], ["train.compile", "train.lk_eta"]),
        (["train.compile=true", "train.lk_eta=2.0", "train.loss=lk-alpha"], ["train.lk_eta"]),
        (["train.compile=true", "train.lk_eta=2.0", "train.loss=lk-hybrid"], []),
        ([], []),
    ],
    ids=["ce", "lk-alpha", "lk-hybrid", "defaults"],
)
def test_settings_without_effect_are_told(
    settings: list[str], told: list[str], captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_stage(copy_of(captured, tmp_path, "train.epochs=1", *settings), "train")
    lines = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert [next(name for name in ("train.compile", "train.lk_eta") if name in line) for line in lines] == told


def test_a_frozen_head_is_the_targets_rows(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path, "train.freeze_lm_head=true")
    record = run_stage(run, "train")
    trained = weights(run)
    head = load_target_head(load_target(run.recipe.target), torch.float32, torch.device("cpu"))
    assert torch.equal(trained["lm_head.weight"], head.lm_head[trained["t2d"]])
    assert record.counts["lm_head"] == "frozen, the target's rows"


def test_a_checkpoint_of_another_shape_is_not_gone_on_from(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that another version of Eyas made from the same inputs, and that no tensor tells apart."""
    run = copy_of(captured, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        stop_after(6, patch)
        run_stage(run, "train")
    (kept,) = run.train_dir.glob("step-*/drafter.json")
    kept.write_text(kept.read_text().replace('"rope_scaling": null', '"rope_scaling": {"rope_type": "dynamic"}'))
    with pytest.raises(TrainError, match=r"rope_scaling was .*dynamic.* and is now absent"):
        run_stage(run, "train")
