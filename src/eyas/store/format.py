"""What a store looks like: the manifest and the layout of a shard. docs/format.md says it in words."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas import fs
from eyas.errors import CorruptStore, StoreError
from eyas.target import Target

FORMAT = "eyas-store"
FORMAT_VERSION = 1
MANIFEST, PLAN, INDEX, SHARDS = "manifest.json", "plan.parquet", "index.parquet", "shards"
AUX_LAYERS = 3
_HEADER_ALIGN = 64  # the first tensor starts at a multiple of this, bytes

Encoding = Literal["bf16", "fp8"]


class TokenSample(Protocol):
    """Tokens of one sample, as every writer hands them in."""

    @property
    def id(self) -> str: ...
    @property
    def token_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def loss_mask(self) -> npt.NDArray[np.bool_]: ...


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TargetInfo(_Part):
    """The target model. `path` is where it lay and only a hint; `model_digest` is its identity."""

    path: str
    architecture: str
    model_digest: str
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)

    @classmethod
    def of(cls, target: Target) -> "TargetInfo":
        """What a store keeps of the target that it is captured from."""
        return cls(
            path=str(target.path),
            architecture=target.architecture,
            model_digest=target.model_digest,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_layers=target.num_layers,
        )


class EngineInfo(_Part):
    """What ran the target; `version` is the release that began the store."""

    kind: str
    dtype: str
    version: str


class PlanInfo(_Part):
    """Sums over plan.parquet and the digest of its content; filled in by the writer."""

    samples: int
    tokens: int
    supervised: int
    shards: int
    digest: str


class Manifest(_Part):
    """What all samples of a store share.

    Attributes:
        aux_layer_ids: id i = the residual stream after i decoder layers, 0 = embeddings.
        encoding: of aux_hidden_states.
        final_encoding: of final_hidden_states.
        final_state: final_hidden_states are what the target's lm_head consumes: after the last norm.
        shard_bytes: aimed size of a shard.
        plan: None until the writer has dealt the samples to shards.
    """

    target: TargetInfo
    tokenizer_digest: str
    template_digest: str
    tokens_digest: str
    aux_layer_ids: list[int] = Field(min_length=AUX_LAYERS, max_length=AUX_LAYERS)
    encoding: Encoding = "bf16"
    final_encoding: Encoding = "bf16"
    final_state: Literal["post_norm"] = "post_norm"
    engine: EngineInfo
    shard_bytes: int = Field(ge=1)
    format_version: int = FORMAT_VERSION
    plan: PlanInfo | None = None

    def to_json(self) -> str:
        """The text of manifest.json; `digest` in it is the xxh3-128 of the rest in compact JSON with sorted keys."""
        content = {"format": FORMAT} | self.model_dump()
        return json.dumps(content | {"digest": fs.digest_json(content)}, indent=1, sort_keys=True) + "\n"

    def identity(self) -> dict[str, Any]:
        """What two stores of the same content have in common, flat: all but the place of the target's folder and the
        engine's release, which may be upgraded while a store is captured."""
        flat: dict[str, Any] = {}
        for key, value in self.model_dump().items():
            flat |= {f"{key}.{name}": part for name, part in value.items()} if isinstance(value, dict) else {key: value}
        del flat["target.path"], flat["engine.version"]
        return flat


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Manifest from the bytes of manifest.json.

    Raises: StoreError for another format or a newer version; CorruptStore where the content isn't what was written.
    """
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise CorruptStore(f"{where}: not JSON ({error})", cause="cut or edited", next=_REWRITE) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise StoreError(f"{where}: not the manifest of an Eyas store", expected=f'"format": "{FORMAT}"')
    if content.get("format_version") != FORMAT_VERSION:
        raise StoreError(
            f"{where}: format version {content.get('format_version')}",
            expected=f"version {FORMAT_VERSION}, the one that this Eyas reads",
            cause="written by another version of Eyas",
            next="pip install --upgrade eyas",
        )
    try:
        manifest = Manifest.model_validate(
            {key: value for key, value in content.items() if key not in ("format", "digest")}
        )
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise CorruptStore(f"{where}: `{key}`: {fault['msg']}", cause="edited by hand", next=_REWRITE) from None
    if manifest.to_json().encode() != raw:
        raise CorruptStore(
            f"{where}: digest {content.get('digest')} does not fit the content",
            expected="the file as Eyas wrote it, byte for byte",
            cause="edited by hand: what it says can't be proved any more",
            next=_REWRITE,
        )
    return manifest


_REWRITE = "restore manifest.json from a copy, or capture into a new folder: --set store.url=DIR"


def sample_id(token_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.bool_]) -> str:
    """Identity of a sample: the digest of its token ids (int32 LE) and loss mask (uint8)."""
    return fs.digest(
        np.ascontiguousarray(token_ids, "<i4").tobytes(), np.ascontiguousarray(loss_mask, np.uint8).tobytes()
    )


@dataclass(frozen=True)
class Tensor:
    """One tensor of every shard.

    Attributes:
        name: its name in the safetensors header.
        dtype: safetensors' code.
        inner: shape of one row.
        supervised: True: one row for each supervised token; False: one for every token.
    """

    name: str
    dtype: str
    inner: tuple[int, ...]
    supervised: bool

    @property
    def row_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype] * prod(self.inner)


_ITEM_BYTES = {"F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
_VALUE_DTYPES = {"bf16": "BF16", "fp8": "F8_E4M3"}


def tensors(manifest: Manifest) -> tuple[Tensor, ...]:
    """The tensors of every shard in file order: 4-byte types, then bf16, then 1-byte, so that each is aligned."""
    hidden = manifest.target.hidden_size
    aux, final = _VALUE_DTYPES[manifest.encoding], _VALUE_DTYPES[manifest.final_encoding]
    listed = [
        *([Tensor("aux_scales", "F32", (AUX_LAYERS,), False)] if manifest.encoding == "fp8" else []),
        *([Tensor("final_scales", "F32", (), True)] if manifest.final_encoding == "fp8" else []),
        Tensor("token_ids", "I32", (), False),
        Tensor("final_hidden_states", final, (hidden,), True),
        Tensor("aux_hidden_states", aux, (AUX_LAYERS, hidden), False),
        Tensor("loss_mask", "U8", (), False),
    ]
    return tuple(sorted(listed, key=lambda tensor: -_ITEM_BYTES[tensor.dtype]))


def sample_bytes(layout: Sequence[Tensor], tokens: int, supervised: int) -> int:
    """Bytes that a sample takes in its shard."""
    return sum(tensor.row_bytes * (supervised if tensor.supervised else tokens) for tensor in layout)


class ShardLayout:
    """Where everything lies in one shard file.

    Attributes:
        header: the file's first bytes: length (8 bytes, little endian) and JSON, padded with spaces.
        starts: tensor name -> offset of its first byte in the file.
        size: of the whole file, bytes.
    """

    def __init__(self, layout: Sequence[Tensor], shard: int, tokens: int, supervised: int) -> None:
        self.tokens, self.supervised = tokens, supervised
        entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, "shard": f"{shard:06d}"}}
        offset, offsets = 0, {}
        for tensor in layout:
            rows = supervised if tensor.supervised else tokens
            end = offset + rows * tensor.row_bytes
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": [rows, *tensor.inner],
                "data_offsets": [offset, end],
            }
            offsets[tensor.name], offset = offset, end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _HEADER_ALIGN)
        self.header = len(text).to_bytes(8, "little") + text
        self.starts = {name: len(self.header) + start for name, start in offsets.items()}
        self.size = len(self.header) + offset


def shard_name(shard: int) -> str:
    return f"{SHARDS}/{shard:06d}.safetensors"


def part_name(shard: int) -> str:
    """Name of the index part that is committed with a shard, until it is folded into index.parquet."""
    return f"{SHARDS}/{shard:06d}.parquet"
