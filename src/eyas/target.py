"""The target model as its folder describes it: shape, identity, tokenizer. No weights are loaded here.

Works for plain decoder folders and for wrappers that keep the language model's numbers in `text_config`
(KimiK25ForConditionalGeneration and other multimodal ones).
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from eyas import fs
from eyas.errors import TargetError
from eyas.settings import Target as TargetTable

# Decoder-only families whose aux states and lm_head follow the plain contract: residual stream, final norm, lm_head.
SUPPORTED_MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "kimi_k2",
    "kimi_k25",
)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


@dataclass(frozen=True)
class Target:
    """The target model of a recipe.

    Attributes:
        path: its folder.
        config: config.json as it stands.
        trust_remote_code: whether the recipe allows the checkpoint's own code.
    """

    path: Path
    config: dict[str, Any] = field(repr=False)
    trust_remote_code: bool = False

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config (`text_config` of wrappers, else all of it)."""
        return dict(self.config.get("text_config") or self.config)

    @property
    def architecture(self) -> str:
        return str((self.config.get("architectures") or ["?"])[0])

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", "?"))

    @property
    def hidden_size(self) -> int:
        return int(self.text_config["hidden_size"])

    @property
    def num_layers(self) -> int:
        return int(self.text_config["num_hidden_layers"])

    @property
    def vocab_size(self) -> int:
        return int(self.text_config["vocab_size"])

    @property
    def intermediate_size(self) -> int:
        return int(self.text_config["intermediate_size"])

    @property
    def num_attention_heads(self) -> int:
        return int(self.text_config["num_attention_heads"])

    @property
    def num_key_value_heads(self) -> int:
        return int(self.text_config.get("num_key_value_heads") or self.num_attention_heads)

    @property
    def head_dim(self) -> int:
        # MLA targets state no head_dim that a plain drafter could use; H / heads is what engines assume then.
        return int(self.text_config.get("head_dim") or self.hidden_size // self.num_attention_heads)

    @property
    def rms_norm_eps(self) -> float:
        return float(self.text_config.get("rms_norm_eps", 1e-6))

    @property
    def rope_theta(self) -> float:
        """Transformers 5 writes `rope_parameters`, earlier ones `rope_theta`."""
        parameters = self.text_config.get("rope_parameters") or {}
        return float(parameters.get("rope_theta") or self.text_config.get("rope_theta") or 10000.0)

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """Scaling of the rotary embedding (YaRN, llama3...), as `named_rope` gives it, or None for the plain one."""
        return named_rope(self.text_config.get("rope_scaling") or self.text_config.get("rope_parameters") or {})

    @property
    def max_position_embeddings(self) -> int:
        return int(self.text_config.get("max_position_embeddings", 2048))

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a turn: generation_config.json goes before config.json, as in the engines."""
        path = self.path / "generation_config.json"
        generation = _read_json(path) if path.is_file() else {}
        value = generation.get("eos_token_id", self.text_config.get("eos_token_id"))
        return [] if value is None else [int(token) for token in (value if isinstance(value, list) else [value])]

    def default_aux_layer_ids(self) -> list[int]:
        """[2, n//2, n-3]: EAGLE-3's choice, in the one meaning of layer ids (residual stream after i layers)."""
        n = self.num_layers
        if n < 7:  # of 6 layers the second and the third would be the same
            raise TargetError(
                f"{self.path}: {n} layers are too few for the default aux layers [2, n//2, n-3]",
                next=f"set drafter.aux_layer_ids to three rising ids of 0 to {n - 1}",
            )
        return [2, n // 2, n - 3]

    def aux_layer_ids(self, wanted: list[int]) -> list[int]:
        """The recipe's aux layers, or the default; refuses ids that the target doesn't have."""
        ids = wanted or self.default_aux_layer_ids()
        if ids[-1] >= self.num_layers:
            raise TargetError(
                f"drafter.aux_layer_ids = {ids}, but the target has {self.num_layers} layers",
                expected=f"ids of 0 to {self.num_layers - 1}: id i is the residual stream after i decoder layers",
                next="mend drafter.aux_layer_ids, or leave it empty for the default",
            )
        return ids

    @cached_property
    def weight_files(self) -> dict[str, Path]:
        """Tensor name -> safetensors file. Raises TargetError where the index names a file that isn't there."""
        index_path = self.path / "model.safetensors.index.json"
        if index_path.is_file():
            weight_map = _read_json(index_path)["weight_map"]
            missing = sorted({name for name in weight_map.values() if not (self.path / name).is_file()})
            if missing:
                raise TargetError(
                    f"{self.path}: {len(missing)} weight files are missing, the first is {missing[0]}",
                    expected=f"the {len(set(weight_map.values()))} files that {index_path.name} names",
                    cause="the download or copy was cut short",
                    next="fetch the folder again; nothing of the run is lost",
                )
            return {tensor: self.path / name for tensor, name in weight_map.items()}
        single = self.path / "model.safetensors"
        if not single.is_file():
            raise TargetError(
                f"{self.path}: neither model.safetensors nor model.safetensors.index.json",
                expected="weights in safetensors form (pickled .bin files are not read)",
                next="convert the checkpoint with Transformers' save_pretrained",
            )
        try:
            with safe_open(single, framework="pt") as handle:
                return dict.fromkeys(handle.keys(), single)
        except SafetensorError as error:
            raise TargetError(f"{single}: not a whole safetensors file ({error})", cause="a cut download") from None

    @cached_property
    def model_digest(self) -> str:
        """Identity of the weights: config, and name, size and first 16 MiB of every weight file (all names, dtypes and
        shapes, and some values). The rest of a 1 TB checkpoint is not read; spot checks compare states instead."""
        heads = []
        for path in sorted(set(self.weight_files.values())):
            with path.open("rb") as handle:
                head = handle.read(min(path.stat().st_size, 16 << 20))
            heads.append([path.name, path.stat().st_size, fs.digest(head)])
        return fs.digest_json([self.config, heads])

    @cached_property
    def tokenizer_digest(self) -> str:
        """Identity of the tokenizer's files."""
        return fs.digest_files(path for name in _TOKENIZER_FILES if (path := self.path / name).is_file())

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer (Transformers)."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self.path, trust_remote_code=self.trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise TargetError(
                f"{self.path}: its tokenizer can't be loaded: {error}",
                expected="tokenizer.json (or what tokenizer_config.json names) in the target's folder",
                next="copy the tokenizer's files there, or set target.trust_remote_code = true if you trust its code",
            ) from None


def named_rope(scaling: dict[str, Any]) -> dict[str, Any] | None:
    """A config's scaling of the rotary embedding with its kind under `rope_type`; None for the plain one.

    DeepSeek-V3's and Kimi's config.json say `type`, the older name. Transformers and SGLang read `rope_type` first.
    """
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    rest = {key: value for key, value in scaling.items() if key not in ("rope_type", "type", "rope_theta")}
    return {"rope_type": kind} | rest


def load_target(table: TargetTable) -> Target:
    """Find and check the target's folder.

    Raises: TargetError where it is missing, is no model folder, or is of a family that Eyas doesn't know.
    """
    folder = _find(table)
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise TargetError(
            f"{folder}: no config.json",
            expected="a model folder in Transformers' layout",
            next="mend target.path in the recipe",
        )
    target = Target(folder, _read_json(config_path), table.trust_remote_code)
    if target.model_type not in SUPPORTED_MODEL_TYPES:
        raise TargetError(
            f"{folder}: model_type {target.model_type!r} ({target.architecture}) is not supported",
            expected=f"one of {', '.join(SUPPORTED_MODEL_TYPES)}",
            cause="an encoder, a head that scales its input, or states that were never compared with the engines'",
        )
    missing = [key for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key not in target.text_config]
    if missing:
        raise TargetError(
            f"{config_path}: no {', '.join(missing)}", expected="a decoder's config, in text_config for wrappers"
        )
    return target


def _find(table: TargetTable) -> Path:
    folder = Path(table.path).expanduser()
    if folder.is_dir():
        return folder
    if not folder.is_absolute() and table.path.count("/") == 1:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(table.path, revision=table.revision or None, local_files_only=True))
        except LocalEntryNotFoundError:
            pass
    raise TargetError(
        f"target.path = {table.path}: no such folder, and no such model in the local hub cache",
        cause="a typing error, or the model was not downloaded on this machine",
        next=f"mend target.path, or fetch it first: hf download {table.path}",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise TargetError(f"{path}: not valid JSON: {error}", cause="a cut download") from None
