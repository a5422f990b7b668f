"""`eyas plan` with a server: its command line, shared memory, every shortfall; and a Kimi-K2.5 folder up to it."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from helpers_serve import make_stand_in, stand_in_run
from helpers_tiny import make_tiny_tokenizer
from safetensors.torch import save_file
from typer.testing import CliRunner

from eyas.cli import app, commands
from eyas.drafter.target import load_target_head
from eyas.recipe import load_recipe
from eyas.target import load_target

commands.register(app)

VOCAB, HIDDEN, LAYERS = 259, 64, 8


def run_plan(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def shortfalls(told: str) -> list[str]:
    return [line.removeprefix("short:").strip() for line in told.splitlines() if line.startswith("short:")]


def command_of(told: str) -> list[str]:
    """The words of the command line that is printed."""
    (line,) = [line for line in told.splitlines() if line.startswith("command")]
    return shlex.split(line.partition("   # ")[0])[1:]


def test_the_command_line_and_the_ring(tmp_path: Path, tiny_target: Path) -> None:
    stand_in_run(tmp_path, tiny_target)
    told = run_plan(str(tmp_path / "recipe.toml"), "--tokens", "1000", "--rate", "100")
    words = command_of(told)
    assert words[:5] == [sys.executable, "-m", "sglang.launch_server", "--model-path", str(tiny_target)]
    assert words[-4:] == ["--host", "127.0.0.1", "--port", "0"] and "port 0: a free one" in told
    assert "engine    SGLang 0.5.23, profile extraction: prefill only" in told
    assert f"PYTHONPATH={tmp_path / 'engine-0.5.23'}" in told
    assert "/dev/shm  1.05 MB (1.00 MiB) for the ring (capture.ring_bytes)" in told
    assert shortfalls(told) == []


def test_every_shortfall_is_listed(tmp_path: Path, tiny_target: Path) -> None:
    stand_in_run(tmp_path, tiny_target)
    told = run_plan(
        str(tmp_path / "recipe.toml"),
        *("--tokens", "87800000", "--hidden-size", "7168", "--share", "0.5"),
        *("--set", "engine.host=192.0.2.1", "--set", 'engine.args=["--enable-pdmux"]', "--set", "store.max_bytes=1000"),
    )
    assert "5.03 TB (4.58 TiB) as four bf16 states a token" in told and "4.41 TB (4.01 TiB) in bf16" in told
    found = shortfalls(told)
    for what in ("disk, by", "store.max_bytes = 1.00 kB", "engine.host = 192.0.2.1", "--enable-pdmux is True"):
        assert sum(what in line for line in found) == 1, (what, found)
    assert len(found) == 4


def test_neither_engine_nor_model_is_here_yet(tmp_path: Path) -> None:
    stand_in_run(tmp_path, tmp_path / "nowhere")
    told = run_plan(
        str(tmp_path / "recipe.toml"), "--tokens", "10", "--hidden-size", "64", "--set", "engine.python=/nowhere/python"
    )
    assert [line.partition(":")[0] for line in shortfalls(told)] == [
        "engine.python = /nowhere/python",
        f"target.path = {tmp_path / 'nowhere'}",
    ]
    assert "command" not in told


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    """A tiny KimiK25ForConditionalGeneration folder as the real one is built: the numbers in text_config, tensors under
    `language_model.`, a vision tower and a projector beside them, two weight files with an index, packed experts."""
    folder = tmp_path / "Kimi-K2.5"
    folder.mkdir()
    text = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": VOCAB}
    text |= {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 128, "moe_intermediate_size": 32}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24}
    text |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4}
    text |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "rope_theta": 50000.0}
    text |= {"max_position_embeddings": 262144, "tie_word_embeddings": False, "eos_token_id": 2}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    config |= {"vision_config": {"vt_hidden_size": 32, "vt_num_hidden_layers": 2}, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    make_tiny_tokenizer(folder)
    torch.manual_seed(0)
    first = {
        "language_model.model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16),
        "language_model.model.layers.0.input_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "language_model.model.layers.0.self_attn.kv_a_layernorm.weight": torch.ones(16, dtype=torch.bfloat16),
        "vision_tower.encoder.final_layernorm.weight": torch.ones(32, dtype=torch.bfloat16),
    }
    second = {
        "language_model.lm_head.weight": torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16),
        "language_model.model.norm.weight": torch.rand(HIDDEN, dtype=torch.bfloat16),
        "language_model.model.layers.1.mlp.experts.0.gate_proj.weight_packed": torch.zeros(32, 8, dtype=torch.int32),
        "mm_projector.pre_norm.weight": torch.ones(32, dtype=torch.bfloat16),
    }
    weight_map = {}
    for number, part in ((1, first), (2, second)):
        name = f"model-{number:05d}-of-000002.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_kimi_from_init_to_plan(tmp_path: Path, kimi: Path) -> None:
    data, out = tmp_path / "chats.jsonl", tmp_path / "kimi.toml"
    data.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    shown = CliRunner().invoke(app, ["init", "--target", str(kimi), "--data", str(data), "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert f"{kimi}: KimiK25ForConditionalGeneration, {LAYERS} layers, hidden size {HIDDEN}" in shown.output

    recipe = load_recipe(out)
    assert recipe.drafter.aux_layer_ids == [2, 4, 5]
    head = load_target_head(load_target(recipe.target), torch.float32, torch.device("cpu"))
    from safetensors import safe_open

    with safe_open(kimi / "model-00002-of-000002.safetensors", "pt") as file:
        lm_head, norm = (file.get_tensor(f"language_model.{name}.weight") for name in ("lm_head", "model.norm"))
    with safe_open(kimi / "model-00001-of-000002.safetensors", "pt") as file:
        embedding = file.get_tensor("language_model.model.embed_tokens.weight")
    assert torch.equal(head.lm_head, lm_head.float()) and torch.equal(head.norm, norm.float())
    assert torch.equal(head.embedding, embedding.float())

    engine = {"kind": "sglang", "python": sys.executable, "device": "cuda", "dtype": "bfloat16"}
    engine |= {"args": '["--tp-size", "8"]', "env": f'{{ PYTHONPATH = "{make_stand_in(tmp_path / "engine")}" }}'}
    overrides = [word for key, value in engine.items() for word in ("--set", f"engine.{key}={value}")]
    sizes = ["--tokens", "87800000", "--hidden-size", "7168", "--rate", "339", "--share", "0.5"]
    told = run_plan(str(out), *sizes, *overrides, "--set", "capture.ring_bytes=1048576")
    assert "5.03 TB (4.58 TiB) as four bf16 states a token" in told and "71.9 hours at 339 tokens/s" in told
    words = " ".join(command_of(told))
    assert f"--model-path {kimi} --dtype bfloat16" in words and "--device cuda" in words and "--tp-size 8" in words
    # DeepSeek's DFLASH setter adds 1 to each id; --return-aux... names the layers after which, not before.
    assert "--speculative-algorithm DFLASH --return-aux-hidden-state-layer-ids 1 3 4" in words
    assert [line.partition(",")[0] for line in shortfalls(told)] == ["disk"]


def test_kimi_with_a_shard_missing(tmp_path: Path, kimi: Path) -> None:
    (kimi / "model-00002-of-000002.safetensors").unlink()
    stand_in_run(tmp_path, kimi)
    (found,) = shortfalls(run_plan(str(tmp_path / "recipe.toml"), "--tokens", "10"))
    assert "1 weight files are missing, the first is model-00002-of-000002.safetensors" in found
