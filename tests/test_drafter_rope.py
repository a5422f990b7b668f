"""Scaled rotary embeddings: the drafter turns as its target's config says, however that names the kind."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_export import AUX_LAYER_IDS, make_run, write_checkpoint, write_record
from helpers_tiny import make_tiny_target
from torch import Tensor

from eyas.drafter.eagle3 import LENGTH_DEPENDENT_ROPES, Drafter, DrafterConfig
from eyas.drafter.published import read_published
from eyas.export.form import flat_config
from eyas.export.stage import check, execute
from eyas.settings import Drafter as DrafterTable
from eyas.settings import Target as TargetTable
from eyas.target import Target, load_target

# As config.json of DeepSeek-V3, Llama 3.1 and others has them, but for the lengths.
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
    | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "longrope": {"short_factor": [1.5] * 6, "long_factor": [3.0] * 6, "original_max_position_embeddings": 64},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(TargetTable(path=str(make_tiny_target(tmp_path_factory.mktemp("target")))))


def scaled(target: Target, scaling: dict[str, Any] | None) -> Target:
    """The target with `rope_scaling` and `rope_theta` as Transformers before 5 wrote them."""
    config = {key: value for key, value in target.config.items() if key != "rope_parameters"}
    return replace(target, config=config | {"rope_theta": 10000.0, "rope_scaling": scaling})


def angles(config: DrafterConfig) -> Tensor:
    """Cosines and sines, also beyond the target's 512 positions."""
    return torch.cat(Drafter(config).rope(torch.arange(600), torch.zeros(1)), dim=-1)


def drafter_of(target: Target) -> DrafterConfig:
    return DrafterConfig.for_target(target, DrafterTable(), 96, AUX_LAYER_IDS)


@pytest.mark.parametrize("kind", SCALINGS)
def test_the_older_name_of_the_kind_is_heeded(kind: str, plain: Target, tmp_path: Path) -> None:
    older, newer = (drafter_of(scaled(plain, {name: kind} | SCALINGS[kind])) for name in ("type", "rope_type"))
    assert torch.equal(angles(older), angles(newer))
    unscaled = torch.allclose(angles(older), angles(drafter_of(scaled(plain, None))), atol=0.1)
    assert unscaled == (kind in LENGTH_DEPENDENT_ROPES)
    assert older == newer
    # A published drafter's config too.
    config = flat_config(newer, plain, dtype="bfloat16", sglang_version="0.5.23")
    config["rope_scaling"] = {"type": kind} | SCALINGS[kind]
    (tmp_path / "config.json").write_text(json.dumps(config))
    published = read_published(tmp_path, plain)
    assert published.config.rope_scaling == {"rope_type": kind} | SCALINGS[kind]  # its weights were trained with it
    assert any("turns by a text's length" in note for note in published.notes) == (kind in LENGTH_DEPENDENT_ROPES)


@pytest.mark.parametrize("form", ["flat", "speculators"])
def test_yarn_by_its_older_name_is_exported(form: str, tmp_path: Path) -> None:
    folder = make_tiny_target(tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn"} | SCALINGS["yarn"]}
    (folder / "config.json").write_text(json.dumps(config))
    run = make_run(tmp_path, folder, f'[export]\nform = "{form}"\n')
    drafter = drafter_of(load_target(run.recipe.target))
    write_checkpoint(run, 1, rope_scaling=drafter.rope_scaling)
    write_record(run, "evaluate", "measured")
    execute(run)
    written = json.loads((run.export_dir / "config.json").read_text())
    layer = written.get("transformer_layer_config", {}).get("rope_parameters") or written["rope_scaling"]
    assert layer["rope_type"] == "yarn" and layer["factor"] == 8.0
    check(run)
