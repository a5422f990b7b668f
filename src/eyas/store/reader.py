"""Reading a store: by sample, or as a shuffled stream that can be taken up again at any place."""

import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import xxhash

from eyas.errors import CorruptStore, ManifestMismatch, StoreError
from eyas.store import index
from eyas.store.files import open_files, refuse_foreign
from eyas.store.format import MANIFEST, PLAN, Manifest, ShardLayout, parse_manifest, shard_name, tensors
from eyas.store.plan import SCHEMA, Plan, Rows
from eyas.store.tables import parse_table, table_digest
from eyas.tap.encode import DTYPES, decode

WINDOW_SHARDS = 4  # a stream mixes the samples of this many shards
_OPEN_SHARDS = 2 * WINDOW_SHARDS  # memory maps kept; pages of others are given back
_TOKEN_TENSORS = (("token_ids", "<i4"), ("loss_mask", "?"))


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A stored sample, without its states."""

    sample_id: str
    source: str
    split: str
    tokens: int
    supervised: int
    shard: int


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One sample.

    Attributes:
        token_ids: int32 [T].
        loss_mask: bool [T], True where the assistant wrote token i.
        aux_hidden_states: bfloat16 [T, 3, H].
        final_hidden_states: bfloat16 [F, H], what lm_head consumes, at the F positions where loss_mask is set.
    """

    id: str
    source: str
    split: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux_hidden_states: torch.Tensor
    final_hidden_states: torch.Tensor


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """One sample as its shard holds it: `eyas.tap.encode.decode` makes bfloat16 of values and scales, on any device.

    Attributes:
        token_ids: int32 [T].
        loss_mask: bool [T].
        aux: values [T, 3, H], bfloat16 or float8_e4m3fn; scales float32 [T, 3], None for bf16.
        final: values [F, H]; scales float32 [F] or None.
    """

    id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: tuple[torch.Tensor, torch.Tensor | None]
    final: tuple[torch.Tensor, torch.Tensor | None]


class StoreReader:
    """A store, open for reading, as it was when it was opened: shards committed later are not seen.

    Args:
        url: a folder, or an fsspec URL.
    Raises: StoreError for a foreign folder or newer format; CorruptStore for a damaged manifest or index.
    """

    def __init__(self, url: str) -> None:
        self.files = open_files(url)
        refuse_foreign(self.files)
        self.manifest: Manifest = parse_manifest(self.files.read(MANIFEST), self.files.name(MANIFEST))
        self.tensors = tensors(self.manifest)
        self.rows = Rows(index.load(self.files, self.manifest, self.files.sizes()))
        self._written = self.rows.equal("rejected", "")
        self._checked = np.zeros(len(self.rows), bool)
        self._maps: dict[int, tuple[ShardLayout, memoryview]] = {}
        self._lock = threading.Lock()

    @cached_property
    def plan(self) -> Plan:
        """What the store is to hold.

        Raises: CorruptStore where the file isn't the one that the manifest names.
        """
        return load_plan(self.files, self.manifest)

    @cached_property
    def digest(self) -> str:
        """Over manifest, places, rejections and checksums: equal stores have equal digests."""
        return index.digest(self.manifest, self.rows.table)

    def samples(self, split: str | None = None) -> list[SampleRef]:
        """The written samples in plan order."""
        rows = self.written(split)
        names = ("sample_id", "source", "split", "tokens", "supervised", "shard")
        columns = self.rows.table.select(names).take(pa.array(rows)).to_pydict()
        return [SampleRef(*values) for values in zip(*(columns[name] for name in names), strict=True)]

    def read(self, sample_id: str) -> StoredSample:
        """One sample; its tensors are views into the shard where they are bf16.

        Its checksums are compared once per process.
        Raises: StoreError where it isn't there or was rejected; CorruptStore where its bytes have changed.
        """
        row = self.rows.find(sample_id)
        if row is None or not self._written[row]:
            reason = "it is not committed" if row is None else f"it was rejected: {self.rows.table['rejected'][row]}"
            raise StoreError(f"{self.files.where}: no sample {sample_id}", cause=reason, next="eyas store ls STORE")
        return self._sample(row)

    def encoded(self, row: int) -> EncodedSample:
        """A written sample by its row of the index (see `order`); its tensors are views into the shard.

        Its checksums are compared once per process.
        Raises: CorruptStore where its bytes have changed.
        """
        raw = self._raw(row, [tensor.name for tensor in self.tensors])
        if not self._checked[row]:
            self._check(row, raw)
            self._checked[row] = True
        hidden = self.manifest.target.hidden_size
        states = {}
        for kind, encoding, shape in (
            ("aux", self.manifest.encoding, (-1, len(self.manifest.aux_layer_ids), hidden)),
            ("final", self.manifest.final_encoding, (-1, hidden)),
        ):
            values = _tensor(raw[f"{kind}_hidden_states"], DTYPES[encoding]).view(shape)
            scales = raw.get(f"{kind}_scales")
            states[kind] = values, None if scales is None else _tensor(scales, torch.float32).view(shape[:-1])
        return EncodedSample(
            id=self.rows.id(row),
            token_ids=_tensor(raw["token_ids"], torch.int32),
            loss_mask=_tensor(raw["loss_mask"], torch.bool),
            aux=states["aux"],
            final=states["final"],
        )

    def stream(
        self, split: str | None, *, seed: int, epoch: int, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[StoredSample]:
        """The split's samples in an order that `seed` and `epoch` fix, this rank's share of them.

        Shards are shuffled, then the samples within each window of 4 shards. Of that order rank r takes places r,
        r + world and so on, so what all ranks have consumed is a prefix of it: `start` (samples that this rank has
        consumed already) takes a stream up exactly where it was, also with another `world`. The last round may be
        short.
        """
        for row in self.order(split, seed, epoch)[rank::world][start:].tolist():
            yield self._sample(row)

    def order(self, split: str | None, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """Rows of a split as `stream` visits them, all ranks together."""
        rows = self.written(split)
        shards, of_row = np.unique(self.rows.shard[rows], return_inverse=True)
        # Raw words of a bit generator, which numpy keeps the same from version to version, unlike its permutations.
        words = np.random.PCG64([seed, epoch])
        place = np.argsort(np.argsort(words.random_raw(len(shards)), kind="stable"))
        return rows[np.lexsort((words.random_raw(len(rows)), place[of_row] // WINDOW_SHARDS))]

    def token_counts(self, split: str | None) -> npt.NDArray[np.int64]:
        """How often each token id occurs in a split: int64 [vocab], where the assistant wrote it."""
        vocab_size = self.manifest.target.vocab_size
        counts = np.zeros(vocab_size, np.int64)
        for shard in np.unique(self.rows.shard[self.written(split)]).tolist():  # a shard has samples of one split
            ids, mask = (np.frombuffer(self._whole(shard, name), kind) for name, kind in _TOKEN_TENSORS)
            counts += np.bincount(ids[mask], minlength=vocab_size)[:vocab_size]  # rejected samples' masks are zeros
        return counts

    def check_target(
        self, target: Any, aux_layer_ids: Sequence[int], tokenizer_digest: str, template_digest: str | None
    ) -> None:
        """Refuse a store that doesn't belong to the recipe's target (an eyas.target.Target).

        Args:
            template_digest: None where the recipe renders nothing itself.

        Raises: ManifestMismatch naming the first value that differs, both ways.
        """
        ours = self.manifest.target
        pairs = [
            ("target.architecture", ours.architecture, target.architecture),
            ("target.hidden_size", ours.hidden_size, target.hidden_size),
            ("target.num_layers", ours.num_layers, target.num_layers),
            ("target.vocab_size", ours.vocab_size, target.vocab_size),
            ("target.model_digest", ours.model_digest, target.model_digest),
            ("tokenizer_digest", self.manifest.tokenizer_digest, tokenizer_digest),
            *([] if template_digest is None else [("template_digest", self.manifest.template_digest, template_digest)]),
            ("aux_layer_ids", self.manifest.aux_layer_ids, list(aux_layer_ids)),
        ]
        for name, stored, wanted in pairs:
            if stored != wanted:
                raise ManifestMismatch(
                    f"{self.files.where}: {name} is {stored!r} in the store",
                    expected=f"{wanted!r}, from the recipe (target {target.path})",
                    cause="the store was captured with another target, tokenizer, template or layers",
                    next="name the right store (--set store.url=DIR), or capture anew: eyas run RECIPE --redo capture"
                    if name != "aux_layer_ids"
                    else f"--set drafter.aux_layer_ids='{stored}' to train on these, or capture anew",
                )

    def written(self, split: str | None = None) -> npt.NDArray[np.int64]:
        """Rows of the index that have a written sample, of one split or all, in plan order."""
        if split is None:
            return np.flatnonzero(self._written)
        return np.flatnonzero(self._written & self.rows.equal("split", split))

    def _sample(self, row: int) -> StoredSample:
        sample, table = self.encoded(row), self.rows.table
        return StoredSample(
            id=sample.id,
            source=table["source"][row].as_py(),
            split=table["split"][row].as_py(),
            token_ids=sample.token_ids,
            loss_mask=sample.loss_mask,
            aux_hidden_states=decode(*sample.aux),
            final_hidden_states=decode(*sample.final),
        )

    def _check(self, row: int, raw: dict[str, memoryview]) -> None:
        for name, view in raw.items():
            stored = self.rows.table[index.checksum_column(name)][row].as_py()
            seen = xxhash.xxh3_128_digest(view)
            if seen != stored:
                where = self.files.name(shard_name(int(self.rows.shard[row])))
                raise CorruptStore(
                    f"{where}: {name} of sample {self.rows.id(row)} has checksum {seen.hex()}",
                    expected=f"{stored.hex()}, as the index says",
                    cause="a damaged disk or copy",
                    next="eyas verify RECIPE --repair, then eyas capture RECIPE: sound shards are kept",
                )

    def _raw(self, row: int, names: Sequence[str]) -> dict[str, memoryview]:
        """Tensor name -> bytes of a sample, as views into its shard."""
        layout, content = self._map(int(self.rows.shard[row]))
        views = {}
        for tensor in self.tensors:
            if tensor.name in names:
                first, count = (
                    (self.rows.first_final[row], self.rows.supervised[row])
                    if tensor.supervised
                    else (self.rows.first_token[row], self.rows.tokens[row])
                )
                start = layout.starts[tensor.name] + int(first) * tensor.row_bytes
                views[tensor.name] = content[start : start + int(count) * tensor.row_bytes]
        return views

    def _whole(self, shard: int, name: str) -> memoryview:
        """All bytes of one of a shard's tensors that have a row for every token."""
        layout, content = self._map(shard)
        row_bytes = next(tensor.row_bytes for tensor in self.tensors if tensor.name == name)
        return content[layout.starts[name] : layout.starts[name] + layout.tokens * row_bytes]

    def _map(self, shard: int) -> tuple[ShardLayout, memoryview]:
        with self._lock:
            found = self._maps.pop(shard, None) or self._open(shard)
            self._maps[shard] = found  # last in the dict = used last
            while len(self._maps) > _OPEN_SHARDS:
                del self._maps[next(iter(self._maps))]
            return found

    def _open(self, shard: int) -> tuple[ShardLayout, memoryview]:
        first, last = np.searchsorted(self.rows.shard, [shard, shard + 1])
        tokens, supervised = (int(counts[first:last].sum()) for counts in (self.rows.tokens, self.rows.supervised))
        layout = ShardLayout(self.tensors, shard, tokens, supervised)
        path = self.files.local(shard_name(shard))
        with path.open("rb") as handle:
            # A private copy-on-write map: torch warns about memory that it must not write to.
            content = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        if len(content) != layout.size or content[: len(layout.header)] != layout.header:
            raise CorruptStore(
                f"{path}: {len(content):,} bytes, or a header, that the index doesn't have",
                expected=f"{layout.size:,} bytes: {tokens} tokens, {supervised} supervised, {self.manifest.encoding}",
                cause="the file was cut, or belongs to another store or encoding",
                next="eyas verify RECIPE --repair, then eyas capture RECIPE: sound shards are kept",
            )
        return layout, memoryview(content)


def load_plan(files: Any, manifest: Manifest) -> Plan:
    """The plan of a store.

    Raises: CorruptStore where the file isn't the one that the manifest names.
    """
    table = parse_table(files.read(PLAN), files.name(PLAN), SCHEMA)
    seen, expected = table_digest(table, SCHEMA.names), manifest.plan.digest if manifest.plan else ""
    if seen != expected:
        raise CorruptStore(
            f"{files.name(PLAN)}: digest {seen}",
            expected=f"{expected}, as the manifest says",
            cause="the plan of another store",
            next="eyas capture RECIPE   # writes it anew from the tokens",
        )
    return Plan(table, manifest)


def _tensor(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(view, dtype=dtype) if len(view) else torch.empty(0, dtype=dtype)
