"""The check of an exported folder: every way in which a drafter was served wrong is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_export import AUX_LAYER_IDS, drafter_config, drafter_tensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eyas.drafter.eagle3 import DrafterConfig
from eyas.drafter.vocab import check_vocabulary
from eyas.export.check import check_folder
from eyas.export.form import engine_config
from eyas.settings import Target as TargetTable
from eyas.target import Target, load_target

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetTable(path=str(tiny_target)))


@pytest.fixture
def parts(target: Target) -> tuple[Config, Tensors]:
    drafter = DrafterConfig(**drafter_config())
    config = engine_config(drafter, target, dtype="bfloat16", sglang_version="0.5.23")
    tensors = {k: v.bfloat16() if v.is_floating_point() else v for k, v in drafter_tensors().items()}
    return config, tensors


def check(folder: Path, target: Target, config: Config, tensors: Tensors) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return check_folder(folder, target, AUX_LAYER_IDS)


def test_a_right_folder_has_no_faults(tmp_path: Path, target: Target, parts: tuple[Config, Tensors]) -> None:
    assert check(tmp_path, target, *parts) == []


def _set(key: str, value: Any) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        table = config
        *path, last = key.split(".")
        for name in path:
            table = table[name]
        table[last] = value

    return change


def _tensor(name: str, make: Callable[[Tensors], torch.Tensor]) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        tensors[name] = make(tensors)

    return change


def _drop(name: str) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        del (tensors if name in tensors else config)[name]

    return change


def _absolute_ids(tensors: Tensors) -> torch.Tensor:
    return tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def _swap(tensors: Tensors) -> torch.Tensor:
    ids = _absolute_ids(tensors)
    ids[[3, 4]] = ids[[4, 3]]
    return ids - torch.arange(len(ids))


def _poison(tensors: Tensors) -> torch.Tensor:
    fc = tensors["fc.weight"].clone()
    fc[0, 0] = torch.nan
    return fc


# change -> what the one fault must say
FAULTS: dict[str, tuple[Callable[[Config, Tensors], None], str]] = {
    "vLLM ids in SGLang's convention": (_set("eagle_aux_hidden_state_layer_ids", [1, 3, 4]), "vLLM would capture"),
    "SGLang ids in our convention": (
        _set("eagle_config.eagle_aux_hidden_state_layer_ids", [2, 4, 5]),
        "SGLang 0.5.23 would capture [3, 5, 6] of a llama target; the store holds [2, 4, 5]",
    ),
    "no SGLang ids": (_set("eagle_config", {}), "eagle_config.eagle_aux_hidden_state_layer_ids is None"),
    "unknown release": (_set("eagle_config.sglang_version", "0.4.1"), "expected 0.5.11 to 0.5.23"),
    "aux states off": (_set("eagle_config.use_aux_hidden_state", False), "use_aux_hidden_state is off"),
    "context left at 2048": (_set("max_position_embeddings", 2048), "max_position_embeddings is 2048; expected 512"),
    "rope theta left at its default": (_set("rope_theta", 500000.0), "rope_theta is 500000.0; expected 10000.0"),
    "rope scaling": (_set("rope_scaling", {"rope_type": "yarn", "factor": 4.0}), "expected None (the target's"),
    "norm switch": (_set("norm_before_residual", True), "norm_before_residual is on; expected off"),
    "norm switch in eagle_config": (_set("eagle_config.norm_before_fc", True), "norm_before_fc is on"),
    "draft vocabulary null": (_set("draft_vocab_size", None), "null makes SGLang drop the trained lm_head"),
    "tied": (_set("tie_word_embeddings", True), "tie_word_embeddings is True"),
    "architecture": (_set("architectures", ["LlamaForCausalLM"]), "expected ['LlamaForCausalLMEagle3']"),
    "vocabulary of another target": (_set("vocab_size", 300), "vocab_size is 300; expected 259"),
    "hidden size key missing": (_drop("hidden_size"), "hidden_size is None"),
    "ids missing": (_drop("eagle_aux_hidden_state_layer_ids"), "eagle_aux_hidden_state_layer_ids is None"),
    "missing norm": (_drop("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
    "missing table": (_drop("t2d"), "t2d is missing"),
    "prefixed names": (
        _tensor("model.fc.weight", lambda t: t["fc.weight"].clone()),
        "model.fc.weight is unknown to the engines",
    ),
    "narrow fc": (_tensor("fc.weight", lambda t: t["fc.weight"][:, :96].contiguous()), "shape [48, 96]; config.json"),
    "q_proj of plain Llama": (
        _tensor("midlayer.self_attn.q_proj.weight", lambda t: torch.ones(48, 48).bfloat16()),
        "shape [48, 48]; config.json makes it [48, 96]",
    ),
    "fp32 weights": (_tensor("norm.weight", lambda t: t["norm.weight"].float()), "norm.weight is float32; expected"),
    "int32 d2t": (_tensor("d2t", lambda t: t["d2t"].int()), "d2t is int32; expected int64"),
    "t2d as bytes": (_tensor("t2d", lambda t: t["t2d"].to(torch.uint8)), "t2d is uint8; expected bool"),
    "absolute d2t": (_tensor("d2t", _absolute_ids), "d2t holds target ids; expected offsets"),
    "unsorted d2t": (_tensor("d2t", _swap), "expected strictly rising ids (1 such places)"),
    "d2t beyond the vocabulary": (_tensor("d2t", lambda t: t["d2t"] + 259), "expected 0 to 258 (96 such ids)"),
    "t2d of another vocabulary": (_tensor("t2d", lambda t: t["t2d"].flip(0)), "which are not the 96 that d2t stands"),
    "NaN": (_tensor("fc.weight", _poison), "fc.weight holds NaN or Inf"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named(name: str, tmp_path: Path, target: Target, parts: tuple[Config, Tensors]) -> None:
    change, words = FAULTS[name]
    change(*parts)
    faults = check(tmp_path, target, *parts)
    matching = [fault for fault in faults if words in fault]
    assert len(matching) == 1, faults
    # Changing a size also breaks shapes; all else is one fault and no more.
    assert len(faults) == 1 or name == "vocabulary of another target"


def test_missing_and_cut_files(tmp_path: Path, target: Target, parts: tuple[Config, Tensors]) -> None:
    assert "config.json: missing" in check_folder(tmp_path, target, AUX_LAYER_IDS)[0]
    check(tmp_path, target, *parts)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "not a whole safetensors file" in check_folder(tmp_path, target, AUX_LAYER_IDS)[0]
    weights.unlink()
    assert "model.safetensors: missing" in check_folder(tmp_path, target, AUX_LAYER_IDS)[0]
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in check_folder(tmp_path, target, AUX_LAYER_IDS)[0]


@given(st.integers(2, 80).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), min_size=1))))
def test_any_draft_vocabulary_passes_and_any_shift_is_caught(case: tuple[int, set[int]]) -> None:
    size, chosen = case
    ids = np.array(sorted(chosen))
    d2t = torch.from_numpy(ids - np.arange(len(ids)))
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[torch.from_numpy(ids)] = True
    assert check_vocabulary(d2t, t2d) == []
    assert check_vocabulary(d2t + 1, t2d) != []
    position = len(ids) // 2
    moved = d2t.clone()
    moved[position] -= 1
    assert check_vocabulary(moved, t2d) != []
    if len(ids) > 1:  # one id alone is its own offset
        assert "expected offsets" in check_vocabulary(torch.from_numpy(ids), t2d)[0]
