"""The plan: which sample goes to which rows of which shard, decided before the first row arrives.

The samples are sorted by split, then id, and filled into shards one after another. An id is a digest, so this order
is a shuffle that depends on nothing but the set of samples, and each shard is a random draw from one split: what
training needs that reads shard after shard.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from eyas.errors import StoreError
from eyas.store.format import Manifest, PlanInfo, ShardLayout, tensors
from eyas.store.tables import compact, table_digest

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("tokens", pa.int32()),
        ("supervised", pa.int32()),
        ("shard", pa.int32()),
        ("first_token", pa.int64()),
        ("first_final", pa.int64()),
    ]
)
_BATCH = 1 << 16
_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One sample to be captured: `tokens` in all, `supervised` of them with the loss mask set."""

    sample_id: str
    source: str
    split: str
    tokens: int
    supervised: int


class Rows:
    """Columns of a plan or an index as arrays, with a search by sample id that needs 40 bytes a sample."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.ids = _ids(table)
        self.tokens = table["tokens"].to_numpy().astype(np.int64)
        self.supervised = table["supervised"].to_numpy().astype(np.int64)
        self.shard = table["shard"].to_numpy()
        self.first_token = table["first_token"].to_numpy()
        self.first_final = table["first_final"].to_numpy()
        self._order = np.argsort(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, sample_id: str) -> int | None:
        """Row of a sample, or None."""
        key = np.bytes_(sample_id.encode())
        place = int(np.searchsorted(self.ids, key, sorter=self._order))
        row = int(self._order[place]) if place < len(self) else -1
        return row if row >= 0 and self.ids[row] == key else None

    def id(self, row: int) -> str:
        return self.ids[row].decode()

    def equal(self, column: str, value: str) -> npt.NDArray[np.bool_]:
        """Which rows have a value in a column."""
        return np.asarray(pc.equal(self.table[column], value).to_numpy(), dtype=bool)


class Plan(Rows):
    """A plan in memory. `bounds[s]` to `bounds[s + 1]` are the rows of shard s."""

    def __init__(self, table: pa.Table, manifest: Manifest) -> None:
        super().__init__(table)
        self.shards = int(self.shard[-1]) + 1 if len(self) else 0
        self.bounds = np.searchsorted(self.shard, np.arange(self.shards + 1))
        self._tensors = tensors(manifest)

    def rows(self, shard: int) -> range:
        return range(int(self.bounds[shard]), int(self.bounds[shard + 1]))

    def layout(self, shard: int) -> ShardLayout:
        rows = slice(*self.bounds[shard : shard + 2])
        return ShardLayout(self._tensors, shard, int(self.tokens[rows].sum()), int(self.supervised[rows].sum()))

    def info(self) -> PlanInfo:
        return PlanInfo(
            samples=len(self),
            tokens=int(self.tokens.sum()),
            supervised=int(self.supervised.sum()),
            shards=self.shards,
            digest=table_digest(self.table, SCHEMA.names),
        )


def deal(entries: Iterable[PlanEntry], manifest: Manifest) -> Plan:
    """Plan the shards: samples in sorted order until the next one would pass `manifest.shard_bytes`.

    A shard holds samples of one split; a sample larger than a shard gets one of its own.
    Raises: StoreError where there is no sample, one is there twice, or a count is impossible.
    """
    table = pa.concat_tables(_tables(iter(entries)))
    if not len(table):
        raise StoreError(
            "no samples to store", cause="prepare kept none", next="see tokens/rejected.jsonl for the reasons"
        )
    table = table.take(pc.sort_indices(table, [("split", "ascending"), ("sample_id", "ascending")]))
    table = compact(table)
    tokens, supervised = (table[name].to_numpy().astype(np.int64) for name in ("tokens", "supervised"))
    _check(_ids(table), tokens, supervised)
    per_token, per_final = (
        sum(t.row_bytes for t in tensors(manifest) if t.supervised == kind) for kind in (False, True)
    )
    splits = table["split"].combine_chunks().dictionary_encode().indices.to_numpy()
    shard = _shards(tokens * per_token + supervised * per_final, splits, manifest.shard_bytes)
    columns = {"shard": shard, "first_token": _firsts(tokens, shard), "first_final": _firsts(supervised, shard)}
    for name, values in columns.items():
        table = table.append_column(SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type))
    return Plan(table, manifest)


def _tables(entries: Iterator[PlanEntry]) -> Iterator[pa.Table]:
    """The entries as tables of 65,536 rows: a million entries as Python objects would take 0.5 GB."""
    names = SCHEMA.names[:5]
    schema = pa.schema([SCHEMA.field(name) for name in names])
    yield schema.empty_table()
    while batch := list(islice(entries, _BATCH)):
        columns = [[getattr(entry, name) for entry in batch] for name in names]
        yield pa.table(columns, schema=schema)


def _ids(table: pa.Table) -> npt.NDArray[np.bytes_]:
    """The sample ids as 32-byte strings: a view into the table.

    Raises: StoreError where one is not 32 characters long.
    """
    column = table["sample_id"].combine_chunks()
    odd = table.filter(pc.not_equal(pc.binary_length(column), _ID_BYTES))
    if len(odd):
        raise StoreError(
            f"sample id {odd['sample_id'][0]}", expected="32 hex digits, the digest of token ids and loss mask"
        )
    if not len(column):
        return np.empty(0, f"S{_ID_BYTES}")
    return np.frombuffer(column.buffers()[2], f"S{_ID_BYTES}", len(column), column.offset * _ID_BYTES)


def _check(ids: npt.NDArray[np.bytes_], tokens: npt.NDArray[np.int64], supervised: npt.NDArray[np.int64]) -> None:
    ordered = np.sort(ids)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise StoreError(
            f"sample {ordered[twice[0]].decode()} is planned twice",
            expected="each sample once: prepare drops duplicates",
        )
    odd = np.flatnonzero((tokens < 1) | (supervised < 0) | (supervised > tokens))
    if len(odd):
        raise StoreError(
            f"sample {ids[odd[0]].decode()}: {tokens[odd[0]]} tokens, {supervised[odd[0]]} supervised",
            expected="at least one token, and no more supervised tokens than tokens",
        )


def _shards(sizes: npt.NDArray[np.int64], splits: npt.NDArray[np.int32], limit: int) -> npt.NDArray[np.int32]:
    shard, filled = 0, 0
    out = np.empty(len(sizes), np.int32)
    last = splits[0]
    for row, (size, split) in enumerate(zip(sizes.tolist(), splits.tolist(), strict=True)):
        if filled and (filled + size > limit or split != last):
            shard, filled = shard + 1, 0
        out[row], filled, last = shard, filled + size, split
    return out


def _firsts(counts: npt.NDArray[np.int64], shard: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """First row of each sample within its shard's tensors."""
    before = np.cumsum(counts) - counts
    starts = np.flatnonzero(np.diff(shard, prepend=-1))
    return before - np.repeat(before[starts], np.diff(np.append(starts, len(shard))))
