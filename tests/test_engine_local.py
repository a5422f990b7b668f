"""The local engine against Transformers' own output_hidden_states, one sample at a time."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from eyas.engine.local import LocalEngine, find_decoder, find_device
from eyas.errors import EngineError, TargetError
from eyas.settings import Engine
from eyas.settings import Target as TargetTable
from eyas.target import Target, load_target

LENGTHS = (1, 2, 37, 5, 64, 37)
FP32 = Engine(dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 (norms on queries and keys, tied embeddings) of 8 layers."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(params=["tiny_target", "tiny_qwen3"])
def target(request: pytest.FixtureRequest) -> Target:
    return load_target(TargetTable(path=str(request.getfixturevalue(request.param))))


def batch_of(lengths: tuple[int, ...]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 259, length).astype(np.int32) for length in lengths]
    return ids, [rng.random(length) < 0.5 for length in lengths]


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def open_engine(folder: Path) -> LocalEngine:
    target = load_target(TargetTable(path=str(folder)))
    return LocalEngine(target, FP32, target.default_aux_layer_ids())


def test_states_equal_a_run_of_each_sample_alone(target: Target) -> None:
    ids, masks = batch_of(LENGTHS)
    aux_layer_ids = target.default_aux_layer_ids()
    states = list(LocalEngine(target, FP32, aux_layer_ids).states(ids, masks))
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    for sample, tokens, mask in zip(states, ids, masks, strict=True):
        with torch.inference_mode():
            alone = model(torch.from_numpy(tokens).long()[None], output_hidden_states=True)
        expected = torch.stack([alone.hidden_states[layer_id][0] for layer_id in aux_layer_ids], dim=1)
        assert sample.aux_hidden_states.shape == (len(tokens), 3, target.hidden_size)
        torch.testing.assert_close(sample.aux_hidden_states, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            sample.final_hidden_states, alone.hidden_states[-1][0][torch.from_numpy(mask)], rtol=1e-4, atol=1e-5
        )
        with torch.inference_mode():
            logits = model.lm_head(sample.final_hidden_states)
        torch.testing.assert_close(logits, alone.logits[0][torch.from_numpy(mask)], rtol=1e-4, atol=1e-4)


def test_layer_ids_off_by_one_differ_clearly(target: Target) -> None:
    ids, masks = batch_of((33,))
    right, late = (
        next(LocalEngine(target, FP32, layer_ids).states(ids, masks)).aux_hidden_states
        for layer_ids in ([1, 2, 3], [2, 3, 4])
    )
    assert torch.equal(right[:, 1:], late[:, :2])  # the same layers, whichever place they have in the list
    difference = (right - late).norm(dim=-1) / right.norm(dim=-1)
    assert difference.min() > 0.05


def test_id_0_is_the_embeddings(target: Target) -> None:
    ids, masks = batch_of((9,))
    engine = LocalEngine(target, FP32, [0, 1, 2])
    embedded = engine.decoder.embed_tokens(torch.from_numpy(ids[0]).long())
    assert torch.equal(next(engine.states(ids, masks)).aux_hidden_states[:, 0], embedded)


@pytest.mark.parametrize(
    ("capability", "asked", "dtype"),
    [
        ("AVX512", "bfloat16", torch.bfloat16),
        ("AVX2", "bfloat16", torch.float32),  # on such a CPU bfloat16 takes eight times as long
        ("AVX2", "float16", torch.float16),
        ("AVX512", "float32", torch.float32),
    ],
)
def test_states_have_the_dtype_of_the_recipe_and_carry_no_graph(
    capability: str, asked: Any, dtype: torch.dtype, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    ids, masks = batch_of((4, 6))
    target = load_target(TargetTable(path=str(tiny_target)))
    for sample in LocalEngine(target, Engine(dtype=asked, device="cpu"), [2, 4, 5]).states(ids, masks):
        assert sample.aux_hidden_states.dtype == sample.final_hidden_states.dtype == dtype
        assert not sample.aux_hidden_states.requires_grad


def test_hooks_are_removed(tiny_target: Path) -> None:
    engine = open_engine(tiny_target)
    list(engine.states(*batch_of((4,))))
    assert not any(layer._forward_pre_hooks for layer in engine.decoder.layers)


def test_a_token_id_outside_the_vocabulary_is_refused(tiny_target: Path) -> None:
    engine = open_engine(tiny_target)
    for wrong in (259, -1):
        with pytest.raises(EngineError, match=f"token id {wrong}"):
            list(engine.states([np.array([5, wrong], np.int32)], [np.array([True, True])]))


def test_missing_folder_and_wrong_architecture(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such folder"):
        open_engine(tmp_path / "absent")
    folder = copy_of(tiny_target, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "bert", "architectures": ["BertModel"]}))
    with pytest.raises(TargetError, match="model_type 'bert'"):
        open_engine(folder)


def test_cut_weights(tiny_target: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_target, tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(TargetError, match="not a whole safetensors file"):
        open_engine(folder)


def test_a_missing_tensor_is_not_filled_with_random_values(tiny_target: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_target, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lack 1 tensors of LlamaForCausalLM: model\.layers\.3\.mlp\.up_proj"):
        open_engine(folder)


def test_weights_of_another_shape(tiny_target: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_target, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(TargetError, match="can't load LlamaForCausalLM"):
        open_engine(folder)


def test_packed_weights(tiny_target: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_target, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=f"{name} is I8"):
        open_engine(folder)


def test_unknown_layout(tiny_target: Path) -> None:
    class Odd(torch.nn.Module):
        def get_decoder(self) -> torch.nn.Module:
            return torch.nn.Linear(2, 2)

    with pytest.raises(EngineError, match="Odd: its decoder Linear has no `.layers` of 8"):
        find_decoder(Odd(), load_target(TargetTable(path=str(tiny_target))))


def test_devices() -> None:
    assert find_device("cpu", "engine.device") == torch.device("cpu")
    with pytest.raises(EngineError, match="engine.device = 'gpu'"):
        find_device("gpu", "engine.device")
    with pytest.raises(EngineError, match="sees . CUDA devices"):
        find_device("cuda:63", "engine.device")
