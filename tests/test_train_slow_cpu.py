"""CPUs that are slow in bfloat16 compute in float32: what is trained is what the recipe with float32 gives."""

from pathlib import Path

import pytest
import torch
from helpers_drafter import make_drafter
from helpers_train import capture_run, copy_of, weights

from eyas.settings import Train
from eyas.stages import run_stage
from eyas.train import optim
from eyas.train.optim import Float32Muon, make_optimizer

SHAPES = [(24, 24), (40, 16), (16, 40)]
MUON = {"lr": 1e-2, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


def moved(kind: type[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Weights after five steps along given gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = kind(parameters, **MUON)
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def test_float32_muon_is_torchs_but_for_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = moved(Float32Muon), moved(torch.optim.Muon)
    start = moved(lambda parameters, **_: torch.optim.SGD(parameters, lr=0.0))  # type: ignore[arg-type]
    for one, other, before in zip(ours, theirs, start, strict=True):
        assert (one - other).norm() < 0.02 * (other - before).norm(), "bfloat16 rounds by up to 1/256 in each product"
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    for one, other in zip(ours, moved(torch.optim.Muon), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("capability", "kind"), [("AVX2", Float32Muon), ("AVX512", torch.optim.Muon)])
def test_the_cpu_decides_which_muon_steps(
    capability: str, kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    made = make_optimizer(make_drafter(), Train(optimizer="muon"))
    assert isinstance(made, optim.MuonAndAdamW) and type(made._parts[0]) is kind


@pytest.mark.usefixtures("slow")
def test_bf16_on_such_a_cpu_is_fp32(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "captured").mkdir()
    captured = capture_run(tmp_path / "captured", tiny_target, count=12)
    runs = [copy_of(captured, tmp_path / name, f"train.precision={name}") for name in ("fp32", "bf16")]
    for run in runs:
        run_stage(run, "train")
    assert "float32 in the place of train.precision bf16" in capsys.readouterr().err
    one, other = (weights(run) for run in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)
