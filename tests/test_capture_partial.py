"""A few layers of a checkpoint give the states that the whole model gives, for every family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_families import FAMILIES, make_family
from safetensors.torch import load_file, save_file

from eyas.drafter.target import load_target_head
from eyas.engine.partial import PartialDecoder, Unchecked, embeddings, final_norm, lm_head
from eyas.settings import Target as TargetTable
from eyas.store.convert.tail import FinalNorm
from eyas.target import Target, load_target

CPU = torch.device("cpu")


def target_of(folder: Path) -> Target:
    return load_target(TargetTable(path=str(folder)))


@torch.inference_mode()
def whole_states(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """States entering layers 0..n-1, and the final state, of the whole model."""
    out = model(ids[None], output_hidden_states=True)
    states = [state[0] for state in out.hidden_states]
    return states[:-1], states[-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_alone_equal_the_whole_model(name: str, tmp_path: Path) -> None:
    model = make_family(tmp_path, name)
    entering, final = whole_states(model, ids := torch.arange(3, 43))
    target = target_of(tmp_path)
    torch.testing.assert_close(embeddings(target, ids.tolist()), entering[0])

    head = PartialDecoder(target, 0, 3, CPU).run(embeddings(target, ids.tolist()))
    assert sorted(head.entering) == [0, 1, 2, 3] and head.final is None
    for layer_id, states in head.entering.items():
        torch.testing.assert_close(states, entering[layer_id], rtol=1e-4, atol=1e-5)

    tail = PartialDecoder(target, 2, 6, CPU)
    entering.append(tail.run(entering[5], 5).entering[6])  # before the norm, which Transformers doesn't show
    for start in (2, 3, 4, 5, 2, 6):
        outcome = tail.run(entering[start], start)
        assert outcome.final is not None and sorted(outcome.entering) == list(range(start, 7))
        torch.testing.assert_close(outcome.final, final, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(outcome.entering[6], entering[6], rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(final @ lm_head(target).T, model.lm_head(final))


def test_a_wrapper_and_blocks_of_fp8(tmp_path: Path) -> None:
    """Kimi's wrapper: numbers in text_config, names with a prefix, other towers beside; weights in fp8 blocks."""
    model = make_family(tmp_path / "plain", "deepseek_v3")
    config = json.loads((tmp_path / "plain/config.json").read_text())
    tensors = load_file(tmp_path / "plain/model.safetensors")
    wrapped: dict[str, torch.Tensor] = {"vision_tower.encoder.layers.0.norm.weight": torch.ones(3)}
    for name, tensor in tensors.items():
        if name.endswith("mlp.down_proj.weight"):
            codes = (tensor / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
            model.get_parameter(name).data = codes.float() * 0.01
            wrapped[f"language_model.{name}_scale_inv"] = torch.full((1, 1), 0.01)
            tensor = codes
        wrapped[f"language_model.{name}"] = tensor.contiguous()
    wrapped["language_model.model.layers.6.mlp.up_proj.weight"] = torch.ones(2, 2)  # a layer of multi-token prediction
    folder = tmp_path / "wrapped"
    folder.mkdir()
    save_file(wrapped, folder / "model.safetensors")
    text = config | {"model_type": "kimi_k2", "quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    target = target_of(folder)
    entering, final = whole_states(model, ids := torch.arange(3, 43))
    head = PartialDecoder(target, 0, 2, CPU).run(embeddings(target, ids.tolist()))
    torch.testing.assert_close(head.entering[2], entering[2], rtol=1e-4, atol=1e-5)
    outcome = PartialDecoder(target, 4, 6, CPU).run(entering[4])
    assert outcome.final is not None
    torch.testing.assert_close(outcome.final, final, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_family(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    target = target_of(tmp_path)
    with pytest.raises(Unchecked, match=rf"{name} is I8: this form of quantised weights"):
        PartialDecoder(target, 0, 3, CPU)
    PartialDecoder(target, 3, 6, CPU)  # only the layers asked for are read
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1 << 16}))
    with pytest.raises(Unchecked, match="MiB in bfloat16, and 0 MiB are free"):
        PartialDecoder(target, 3, 6, CPU)


def test_copies_in_the_layer_of_multi_token_prediction_are_not_taken(tmp_path: Path) -> None:
    """DeepSeek-V3's index: layer 61 of 61 holds another embedding, norm and head of the same last names."""
    model = make_family(tmp_path, "deepseek_v3")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    extra = tensors.keys() - {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    copies = {
        "model.layers.6.embed_tokens.weight": tensors["model.embed_tokens.weight"] + 1,
        "model.layers.6.shared_head.norm.weight": tensors["model.norm.weight"] + 1,
        "model.layers.6.shared_head.head.weight": tensors["lm_head.weight"] + 1,
        "model.layers.6.shared_head.lm_head.weight": tensors["lm_head.weight"] + 1,
        "model.layers.6.enorm.weight": torch.ones(3),
    }
    first, second = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"
    save_file({name: tensors[name].contiguous() for name in extra}, tmp_path / first)
    save_file(
        {name: part.contiguous() for name, part in tensors.items() if name not in extra} | copies, tmp_path / second
    )
    places = {name: first if name in extra else second for name in (*tensors, *copies)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    target = target_of(tmp_path)

    head = load_target_head(target, torch.float32, CPU)
    assert torch.equal(head.embedding, model.get_parameter("model.embed_tokens.weight"))
    assert torch.equal(head.norm, model.get_parameter("model.norm.weight"))
    assert torch.equal(head.lm_head, model.get_parameter("lm_head.weight"))
    assert torch.equal(FinalNorm(target).weight, head.norm) and torch.equal(lm_head(target), head.lm_head)
    assert final_norm(target)[1] == "model.norm.weight"
    entering, final = whole_states(model, ids := torch.arange(3, 43))
    torch.testing.assert_close(embeddings(target, ids.tolist()), entering[0])
    outcome = PartialDecoder(target, 4, 6, CPU).run(entering[4])
    torch.testing.assert_close(outcome.final, final, rtol=1e-4, atol=1e-4)
