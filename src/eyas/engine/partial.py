"""A few decoder layers of the target's checkpoint, through Transformers: only their weights are read.

    embeddings -> [layer 0] -> ... -> [layer n-1] -> norm
                 ^ entering 0        ^ entering n-1     ^ entering "n" is before the norm, final is after it

A model of `last - first` layers is made of the target's own config, with all that depends on a layer's number moved
along, and is fed residual streams instead of token ids.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from eyas import checkpoint
from eyas.errors import TargetError
from eyas.target import Target

# Kimi-K2 is DeepSeek-V3's architecture under another name; its wrapper keeps it in text_config.
_SAME_AS = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3"}
_TORCH = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BLOCK_SCALE = "_scale_inv"  # DeepSeek-V3's name: fp8 weights, one float32 factor for each block of 128 x 128


class Unchecked(Exception):
    """These layers can't be run here; the text says why, in a few words."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run of layers.

    Attributes:
        entering: layer id -> float [T, H], the residual stream after that many decoder layers.
        final: float [T, H], post-norm, where the last layer of the target was run; else None.
    """

    entering: dict[int, Tensor]
    final: Tensor | None


class PartialDecoder:
    """Layers first..last of the target (`last` excluded), and the final norm where they end with its last layer.

    Args:
        device: cpu or cuda.
    Attributes:
        dtype: what they compute in: float32, or bfloat16 where memory is short.
    Raises: Unchecked where their weights are quantised in a way that isn't undone here, too large for the memory, or
        of a family that Transformers doesn't have; TargetError for a damaged checkpoint.
    """

    def __init__(self, target: Target, first: int, last: int, device: torch.device) -> None:
        if not 0 <= first < last <= target.num_layers:
            raise ValueError(f"layers {first} to {last} of {target.num_layers}")
        self.first, self.last, self.device = first, last, device
        self.whole = last == target.num_layers
        names = _layer_tensors(target, first, last)
        self.dtype = _affordable(_stored_bytes(target, names), device)
        config = _short_config(target, first, last)
        self.decoder = _build(target, config, _weights(target, names, first, self.dtype), self.dtype).to(device)

    @torch.inference_mode()
    def run(self, states: Tensor, start: int | None = None) -> Outcome:
        """Run layers start..last over one sequence.

        Args:
            states: float [T, H], the residual stream that enters layer `start`.
            start: first..last, `last` for the norm alone; None: `first`.
        """
        start = self.first if start is None else start
        kept: list[Tensor] = []

        def keep(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            kept.append((arguments[0] if arguments else named["hidden_states"])[0])

        with self._from(start - self.first) as (layers, norm):
            handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in (*layers, norm)]
            try:
                embeds = states.to(self.device, self.dtype)[None]
                final = self.decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state[0]
            finally:
                for handle in handles:
                    handle.remove()
        return Outcome(dict(zip(range(start, self.last + 1), kept, strict=True)), final if self.whole else None)

    @contextmanager
    def _from(self, skipped: int) -> Iterator[tuple[nn.ModuleList, nn.Module]]:
        """The decoder without its first `skipped` layers; models look a layer's kind up by its place in the list."""
        config, layers = self.decoder.config, self.decoder.layers
        before = {name: getattr(config, name) for name in ("num_hidden_layers", "layer_types") if hasattr(config, name)}
        try:
            self.decoder.layers = layers[skipped:]
            for name, value in before.items():
                if value is not None:
                    setattr(config, name, value[skipped:] if isinstance(value, list) else value - skipped)
            yield self.decoder.layers, self.decoder.norm
        finally:
            self.decoder.layers = layers
            for name, value in before.items():
                setattr(config, name, value)


def embeddings(target: Target, token_ids: Sequence[int]) -> Tensor:
    """Rows of the target's embedding matrix, float32 [T, H]: the residual stream that enters layer 0.

    Raises: Unchecked where the matrix is quantised; TargetError where there is none.
    """
    name = checkpoint.name_of(target, "embedding")
    rows: dict[int, Tensor] = {}
    with checkpoint.opened(target.weight_files[name]) as handle:
        matrix = handle.get_slice(name)
        if matrix.get_dtype() not in _TORCH:
            raise Unchecked(f"the embedding is {matrix.get_dtype()}")
        for index in sorted(set(token_ids)):
            rows[index] = matrix[index : index + 1][0].float()
    return torch.stack([rows[index] for index in token_ids])


def lm_head(target: Target) -> Tensor:
    """The matrix [V, H] that makes logits out of the final state, as it is stored; the embedding where it is tied.

    Raises: Unchecked where it is quantised; TargetError where there is none.
    """
    tensor = checkpoint.read(target, checkpoint.name_of(target, "lm_head"))
    if tensor.dtype not in _TORCH.values():
        raise Unchecked(f"lm_head is {tensor.dtype}")
    return tensor[: target.vocab_size]


def final_norm(target: Target) -> tuple[Path, str, float]:
    """Where the weight [H] of the RMS norm before the lm_head stands (file and tensor), and its epsilon.

    Raises: TargetError where one of them is missing.
    """
    name = checkpoint.name_of(target, "norm")
    if "rms_norm_eps" not in target.text_config:
        raise TargetError(
            f"{target.path}: no rms_norm_eps in config.json", cause="a layout that Eyas doesn't know, or a cut config"
        )
    return target.weight_files[name], name, float(target.text_config["rms_norm_eps"])


def _prefix(target: Target) -> str:
    return checkpoint.layers_prefix(checkpoint.name_of(target, "embedding"))


def _layer_tensors(target: Target, first: int, last: int) -> list[str]:
    """Names of the checkpoint's tensors that these layers are made of."""
    prefix = _prefix(target)
    wanted = re.compile(rf"{re.escape(prefix)}layers\.(\d+)\..+")
    names = [
        name for name in target.weight_files if (found := wanted.fullmatch(name)) and first <= int(found[1]) < last
    ]
    return [*names, *([f"{prefix}norm.weight"] if last == target.num_layers else [])]


def _stored_bytes(target: Target, names: Sequence[str]) -> tuple[int, int]:
    """Number of values of these tensors, and the bytes that they take in their files.

    Raises: Unchecked where one is quantised, except in DeepSeek-V3's block form.
    """
    values = raw = 0
    for path, here in _by_file(target, names):
        with checkpoint.opened(path) as handle:
            for name in here:
                piece = handle.get_slice(name)
                dtype, count = piece.get_dtype(), torch.Size(piece.get_shape()).numel()
                blocks = dtype == "F8_E4M3" and name + _BLOCK_SCALE in target.weight_files
                if dtype not in _TORCH and not blocks:
                    raise Unchecked(f"{name} is {dtype}: this form of quantised weights isn't undone here")
                values += count
                raw += count * (1 if blocks else torch.finfo(_TORCH[dtype]).bits // 8)
    return values, raw


def _affordable(amounts: tuple[int, int], device: torch.device) -> torch.dtype:
    """float32, or bfloat16 where float32 needs more than half of the free memory.

    Raises: Unchecked where that is too much as well.
    """
    values, raw = amounts
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        if values * width + raw <= free // 2:
            return dtype
    raise Unchecked(f"its layers need {values * 2 + raw >> 20:,} MiB in bfloat16, and {free >> 20:,} MiB are free")


def _short_config(target: Target, first: int, last: int) -> Any:
    """The target's config for layers first..last alone.

    Raises: Unchecked where Transformers doesn't know the family.
    """
    from transformers import CONFIG_MAPPING

    values = {
        name: value for name, value in target.text_config.items() if name not in ("quantization_config", "auto_map")
    }
    kind = _SAME_AS.get(str(values.get("model_type")), str(values.get("model_type")))
    if kind not in CONFIG_MAPPING:
        raise Unchecked(f"this Transformers has no model_type {kind}")
    make = CONFIG_MAPPING[kind].from_dict
    full = make({**values, "model_type": kind})
    count, total = last - first, target.num_layers
    # What is listed by layer is cut; what is computed from a layer's number is moved.
    moved: dict[str, Any] = {
        name: value[first:last]
        for name, value in full.to_dict().items()
        if isinstance(value, list) and len(value) == total and name in ("layer_types", "mlp_layer_types")
    }
    if "first_k_dense_replace" in values:
        moved["first_k_dense_replace"] = max(0, int(values["first_k_dense_replace"]) - first)
    if hasattr(full, "decoder_sparse_step"):
        dense = set(full.mlp_only_layers)
        step = full.decoder_sparse_step
        moved["mlp_only_layers"] = [i for i in range(count) if first + i in dense or (first + i + 1) % step]
        moved["decoder_sparse_step"] = 1
    moved |= {"num_hidden_layers": count, "vocab_size": 1, "tie_word_embeddings": False}
    moved |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return make({**values, "model_type": kind, **moved})


def _weights(target: Target, names: Sequence[str], first: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors under the names that a model of these layers alone gives them."""
    prefix, weights = _prefix(target), {}
    for path, here in _by_file(target, names):
        with checkpoint.opened(path) as handle:
            for name in here:
                if name.endswith(_BLOCK_SCALE):
                    continue
                tensor = handle.get_tensor(name)
                if tensor.dtype == torch.float8_e4m3fn:
                    tensor = _undo_blocks(tensor, checkpoint.read(target, name + _BLOCK_SCALE), dtype)
                short = name[len(prefix) :]
                if short.startswith("layers."):
                    _, number, rest = short.split(".", 2)
                    short = f"layers.{int(number) - first}.{rest}"
                weights[short] = tensor
    return weights


def _undo_blocks(codes: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """fp8 weights [out, in] times their factors [out / 128, in / 128] (rounded up)."""
    rows, columns = codes.shape
    wide = factors.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (codes.float() * wide).to(dtype)


def _build(target: Target, config: Any, weights: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """The decoder with these weights. What the layers don't need (embedding; the norm of earlier ones) is made up.

    Raises: Unchecked where the checkpoint's names don't fit Transformers' model.
    """
    from transformers import MODEL_MAPPING
    from transformers.utils import logging

    weights.setdefault("embed_tokens.weight", torch.zeros(1, target.hidden_size))
    weights.setdefault("norm.weight", torch.ones(target.hidden_size))
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        decoder, info = MODEL_MAPPING[type(config)].from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
        )
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    wrong = sorted([*info["missing_keys"], *info["unexpected_keys"], *(str(key) for key in info["mismatched_keys"])])
    if wrong:
        raise Unchecked(f"{type(decoder).__name__} of Transformers doesn't fit the checkpoint: {wrong[0]}")
    return decoder.eval()


def _by_file(target: Target, names: Sequence[str]) -> Iterator[tuple[Any, list[str]]]:
    for path in sorted({target.weight_files[name] for name in names}):
        yield path, [name for name in names if target.weight_files[name] == path]
