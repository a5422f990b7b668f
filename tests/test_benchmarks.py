"""What benchmarks keep of what they measured."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_the_training_benchmark_keeps_every_block_and_names_its_mfus_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    train = importlib.import_module("train")
    known: dict[str, Any] = {"eyas losses as speculators": {}, "speculators losses": {}, "eyas-kimi full": {}}
    for repeat in range(3):
        for case in ("full", "half"):
            for name in (f"eyas {case}", f"eyas {case} frozen", f"speculators {case}"):
                known[f"{name} {repeat}"] = {"tokens_per_s": 100.0 + repeat, "mfu": 0.5, "mfu_peak_flops": 7e14}
    told = train.summary(known, ["eyas", "speculators"], {"eyas": 8, "speculators": 2}, 2)
    assert len(told["blocks"]) == 2 * 2 * 3 and told["blocks"]["eyas half frozen 1"]["tokens_per_s"] == 101.0
    assert told["full"]["eyas"] == 100.5 and (told["mfu"], told["mfu_peak_flops"]) == (0.5, 7e14)
