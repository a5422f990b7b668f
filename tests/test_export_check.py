"""The check of an exported folder: every way in which a drafter was served wrong is named."""

import dataclasses
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
from eyas.export.form import file_name, flat_config, folder_tensors, speculators_config
from eyas.settings import Target as TargetTable
from eyas.target import Target, load_target

Config, Tensors = dict[str, Any], dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetTable(path=str(tiny_target)))


DRAFTER = DrafterConfig(**drafter_config())


@pytest.fixture
def parts(target: Target) -> tuple[Config, Tensors]:
    config = flat_config(DRAFTER, target, dtype="bfloat16", sglang_version="0.5.23")
    return config, folder_tensors(drafter_tensors(), DRAFTER, torch.bfloat16, None)


def check(
    folder: Path, target: Target, config: Config, tensors: Tensors, drafter: DrafterConfig = DRAFTER, **options: Any
) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return check_folder(folder, target, drafter, AUX_LAYER_IDS, **options)


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
    "rope scaling": (_set("rope_scaling", {"rope_type": "yarn", "factor": 4.0}), "expected None (which the drafter"),
    "norm switch": (
        _set("norm_before_residual", True),
        "norm_before_residual is on as vLLM reads it; expected off: the drafter was trained without",
    ),
    "norm switch in eagle_config": (_set("eagle_config.norm_before_fc", True), "norm_before_fc is on as vLLM reads it"),
    "post-norm feedback": (_set("norm_output", True), "norm_output is on as SGLang 0.5.23 reads it; expected off"),
    "SGLang's other name for fc_norm": (_set("use_aux_norm", True), "fc_norm is on as SGLang 0.5.23 reads it"),
    "norm epsilon": (_set("rms_norm_eps", 1e-5), "rms_norm_eps is 1e-05; expected 1e-06"),
    "MLP width": (_set("intermediate_size", 128), "intermediate_size is 128; expected 96 (which was trained)"),
    "draft vocabulary null": (_set("draft_vocab_size", None), "null makes SGLang drop the trained lm_head"),
    "tied": (_set("tie_word_embeddings", True), "tie_word_embeddings is True"),
    "architecture": (_set("architectures", ["LlamaForCausalLM"]), "expected ['LlamaForCausalLMEagle3']"),
    "vocabulary of another target": (_set("vocab_size", 300), "vocab_size is 300; expected 259"),
    "hidden size key missing": (_drop("hidden_size"), "hidden_size is None"),
    "ids missing": (_drop("eagle_aux_hidden_state_layer_ids"), "eagle_aux_hidden_state_layer_ids is None"),
    "missing norm": (_drop("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
    "missing table": (_drop("t2d"), "t2d is missing"),
    "missing d2t": (_drop("d2t"), "d2t is missing: it would be left random (vLLM, SGLang 0.5.23)"),
    "unknown tensor": (
        _tensor("midlayer.self_attn.q_norm.weight", lambda t: torch.ones(12).bfloat16()),
        "q_norm.weight is unknown to the engine (vLLM stops, SGLang 0.5.23 skips it)",
    ),
    "an embedding that nobody asked for": (
        _tensor("embed_tokens.weight", lambda t: torch.ones(259, 48).bfloat16()),
        "embed_tokens.weight is in the folder; expected none: export.embedding is off",
    ),
    "prefixed names": (
        _tensor("model.fc.weight", lambda t: t["fc.weight"].clone()),
        "model.fc.weight is unknown to the engine (vLLM stops)",
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
    # A switch that both engines read is a fault for each of them; all else is one fault and no more.
    switch = name in ("norm switch in eagle_config", "post-norm feedback")
    assert len(faults) == (2 if switch else 1), faults


def variant(**switches: int) -> DrafterConfig:
    return DrafterConfig(**drafter_config(**switches))


def tensors_of(drafter: DrafterConfig, embedding: torch.Tensor | None = None) -> Tensors:
    """Random weights for any switches."""
    norms = {f"fc_norm.{i}.weight": (48,) for i in range(3)} if drafter.fc_norm else {}
    norms |= {"input_norm.weight": (144,)} if drafter.norm_before_fc else {}
    tensors = drafter_tensors(drafter.draft_vocab_size) | {name: torch.rand(shape) for name, shape in norms.items()}
    return folder_tensors(tensors, drafter, torch.bfloat16, embedding)


SWITCHES = [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}]


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda switches: "+".join(switches) or "plain")
@pytest.mark.parametrize("version", ["0.5.17", "0.5.23.post1"])
def test_right_folders_of_every_kind_pass(
    switches: dict[str, bool], version: str, tmp_path: Path, target: Target
) -> None:
    drafter = variant(**switches)
    config = flat_config(drafter, target, dtype="bfloat16", sglang_version=version)
    assert check(tmp_path, target, config, tensors_of(drafter), drafter) == []
    # The other names that engines read the layer under.
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors_of(drafter).items()}
    assert check(tmp_path, target, config, renamed, drafter) == []


@pytest.mark.parametrize("switches", [*SWITCHES, {"norm_before_residual": True}, {"sliding_window": 64}], ids=str)
def test_right_speculators_folders_pass_and_faults_are_named(
    switches: dict[str, bool], tmp_path: Path, target: Target
) -> None:
    drafter = variant(**switches)
    config = speculators_config(drafter, target, dtype="bfloat16", drafts=3)
    tensors = {file_name(name, "speculators"): tensor for name, tensor in tensors_of(drafter).items()}
    assert "layers.0.mlp.up_proj.weight" in tensors and "model_type" not in config
    assert check(tmp_path, target, config, tensors, drafter) == []
    layer = config["transformer_layer_config"]
    wrong = [
        (config | {"norm_output": not drafter.norm_output}, "norm_output is"),
        ({key: value for key, value in config.items() if key != "norm_before_residual"}, "norm_before_residual is on"),
        (config | {"transformer_layer_config": layer | {"max_position_embeddings": 2048}}, "is 2048; expected 512"),
        (config | {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "which vLLM would capture"),
        (
            config | {"transformer_layer_config": layer | {"rope_parameters": {"rope_theta": 5e5}}},
            "rope_theta is 500000.0; expected 10000.0",
        ),
    ]
    for changed, words in wrong:
        faults = check(tmp_path, target, changed, tensors, drafter)
        if words != "norm_before_residual is on" or not drafter.norm_before_residual:
            assert len(faults) == 1 and words in faults[0], faults


@pytest.mark.parametrize(
    ("switch", "version", "words"),
    [
        ("fc_norm", "0.5.11", "fc_norm is off as SGLang 0.5.11 reads it; expected on: the drafter was trained with"),
        ("norm_output", "0.5.11", "SGLang 0.5.11 does not know it: export for a later release"),
        ("norm_before_fc", "0.5.16", "norm_before_fc is off as SGLang 0.5.16 reads it"),
        ("norm_before_residual", "0.5.23", 'no SGLang release knows it: export.sglang_version = ""'),
    ],
)
def test_a_switch_that_a_release_ignores_is_refused_for_it(
    switch: str, version: str, words: str, tmp_path: Path, target: Target
) -> None:
    drafter = variant(**{switch: True})
    config = flat_config(drafter, target, dtype="bfloat16", sglang_version=version)
    faults = check(tmp_path, target, config, tensors_of(drafter), drafter)
    assert len(faults) == 1 and words in faults[0], faults
    alone = flat_config(drafter, target, dtype="bfloat16", sglang_version="")
    assert alone["architectures"] == ["Eagle3LlamaForCausalLM"]  # which SGLang doesn't load at all
    assert check(tmp_path, target, alone, tensors_of(drafter), drafter, for_sglang=False) == []
    assert check(tmp_path, target, alone, tensors_of(drafter), drafter) != []


def test_layer_ids_are_read_as_the_release_that_serves_reads_them(tmp_path: Path, target: Target) -> None:
    """DeepSeek's class (Kimi too) stopped adding 1 to the ids in 0.5.13."""
    kimi = dataclasses.replace(target, config=target.config | {"model_type": "kimi_k2"})
    config = flat_config(DRAFTER, kimi, dtype="bfloat16", sglang_version="0.5.23")
    assert check(tmp_path, kimi, config, tensors_of(DRAFTER), sglang_version="0.5.13") == []
    faults = check(tmp_path, kimi, config, tensors_of(DRAFTER), sglang_version="0.5.12")
    assert len(faults) == 1 and "SGLang 0.5.12 would capture [3, 5, 6] of a kimi_k2 target" in faults[0]


def test_a_sliding_window_is_carried_for_vllm_and_refused_for_sglang(tmp_path: Path, target: Target) -> None:
    drafter = variant(sliding_window=64)
    tensors = tensors_of(drafter)
    alone = flat_config(drafter, target, dtype="bfloat16", sglang_version="")
    assert check(tmp_path, target, alone, tensors, drafter, for_sglang=False) == []
    for unread in (
        {key: value for key, value in alone.items() if key != "layer_types"},
        alone | {"layer_types": ["full_attention"]},
    ):
        faults = check(tmp_path, target, unread, tensors, drafter, for_sglang=False)
        assert len(faults) == 1 and "vLLM would attend in a sliding window of 0 (0: none); expected 64" in faults[0]
    faults = check(tmp_path, target, alone, tensors, variant(), for_sglang=False)
    assert len(faults) == 1 and "vLLM would attend in a sliding window of 64 (0: none); expected 0" in faults[0]
    for_both = flat_config(drafter, target, dtype="bfloat16", sglang_version="0.5.23")
    faults = check(tmp_path, target, for_both, tensors, drafter)
    assert len(faults) == 1 and "SGLang 0.5.23 would attend in a sliding window of 0" in faults[0]
    assert 'export.sglang_version = ""' in faults[0]


@pytest.mark.parametrize("trained", [{}, {"fc_norm": True, "norm_output": True}], ids=str)
def test_the_wrong_norm_switch_is_named(trained: dict[str, bool], tmp_path: Path, target: Target) -> None:
    """Post-norm feedback served pre-norm, and the other way round: same weights, same shapes, another network."""
    drafter = variant(**trained)
    config = flat_config(drafter, target, dtype="bfloat16", sglang_version="0.5.23")
    config["norm_output"] = not drafter.norm_output
    faults = check(tmp_path, target, config, tensors_of(drafter), drafter)
    assert len(faults) == 2 and all("norm_output is" in fault and "trained with" in fault for fault in faults), faults


def test_an_embedding_that_the_engine_needs_is_missed(tmp_path: Path, target: Target) -> None:
    embedding = torch.randn(259, 48).bfloat16()
    config = flat_config(DRAFTER, target, dtype="bfloat16", sglang_version="0.5.23")
    whole, without = tensors_of(DRAFTER, embedding), tensors_of(DRAFTER)
    assert check(tmp_path, target, config, whole, embedding=embedding) == []
    faults = check(tmp_path, target, config, without, embedding=embedding)
    assert len(faults) == 1 and "embed_tokens.weight is missing: it has to be in this folder" in faults[0]
    other = tensors_of(DRAFTER, embedding + 1)
    faults = check(tmp_path, target, config, other, embedding=embedding)
    assert len(faults) == 1 and "differs from the target's: vLLM would keep it" in faults[0]


def test_missing_and_cut_files(tmp_path: Path, target: Target, parts: tuple[Config, Tensors]) -> None:
    assert "config.json: missing" in check_folder(tmp_path, target, DRAFTER, AUX_LAYER_IDS)[0]
    check(tmp_path, target, *parts)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "not a whole safetensors file" in check_folder(tmp_path, target, DRAFTER, AUX_LAYER_IDS)[0]
    weights.unlink()
    assert "model.safetensors: missing" in check_folder(tmp_path, target, DRAFTER, AUX_LAYER_IDS)[0]
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in check_folder(tmp_path, target, DRAFTER, AUX_LAYER_IDS)[0]


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
