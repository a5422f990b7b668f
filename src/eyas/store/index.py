"""The index: one row for each sample of a committed shard, with its place, checksums and rejection.

A shard is committed by its own name, after its part of the index, `shards/000000.parquet`, is on disk. Opening and
closing a store for writing folds the parts into `index.parquet`, which spares a reader from opening thousands of them;
the parts stay as its second copy. Rows count only while their shard is there.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from eyas import fs
from eyas.store import plan
from eyas.store.files import Files, shard_number
from eyas.store.format import AUX_LAYERS, INDEX, Manifest, part_name, tensors
from eyas.store.tables import compact, parse_table, table_bytes, table_digest

CHECKSUM_BYTES = 16


def schema(manifest: Manifest) -> pa.Schema:
    """The plan's columns, `rejected` (the reason, "" for a written sample), and `xxh3_128.TENSOR` for each tensor.

    With fp8, `aux_error` [3] and `final_error` [1]: relative error of the sample, |decoded - given| / |given|.
    """
    checksums = [(checksum_column(tensor.name), pa.binary(CHECKSUM_BYTES)) for tensor in tensors(manifest)]
    errors = [
        *([("aux_error", pa.list_(pa.float32(), AUX_LAYERS))] if manifest.encoding == "fp8" else []),
        *([("final_error", pa.list_(pa.float32(), 1))] if manifest.final_encoding == "fp8" else []),
    ]
    return pa.schema([*plan.SCHEMA, ("rejected", pa.string()), *checksums, *errors])


def checksum_column(tensor: str) -> str:
    return f"xxh3_128.{tensor}"


def load(files: Files, manifest: Manifest, sizes: Mapping[str, int]) -> pa.Table:
    """The rows of all committed shards in plan order.

    Raises: CorruptStore where index.parquet, or a part that is not folded into it yet, is damaged.
    """
    return _load(files, manifest, sizes)[0]


def _load(files: Files, manifest: Manifest, sizes: Mapping[str, int]) -> tuple[pa.Table, int, int]:
    """The rows; of how many shards index.parquet lacks the rows; and of how many it has rows that count no more."""
    committed = committed_shards(sizes)
    layout = schema(manifest)
    folded = parse_table(files.read(INDEX), files.name(INDEX), layout) if INDEX in sizes else layout.empty_table()
    known = set(pc.unique(folded["shard"]).to_pylist())
    parts = [part_name(shard) for shard in sorted(committed - known) if part_name(shard) in sizes]
    rows = pa.concat_tables([folded, *(parse_table(files.read(name), files.name(name), layout) for name in parts)])
    del folded
    return only(rows, committed), len(parts), len(known - committed)


def committed_shards(sizes: Iterable[str]) -> set[int]:
    return {number for name in sizes if (number := shard_number(name)) is not None}


def fold(files: Files, manifest: Manifest) -> pa.Table:
    """Write index.parquet anew where it hasn't just the rows that `load` finds; returns them."""
    rows, lacking, stale = _load(files, manifest, files.sizes())
    if lacking or stale:
        # The parts have it all, so an old index may come back after a power cut; but not with rows of a shard that is
        # made anew, whose bytes may be others.
        files.write(INDEX, table_bytes(rows), durable=stale > 0)
    return rows


def write(files: Files, rows: pa.Table) -> None:
    """Write index.parquet, and the part of each shard where it is missing or another one."""
    sizes = files.sizes()
    for shard in pc.unique(rows["shard"]).to_pylist():
        raw = table_bytes(rows.filter(pc.equal(rows["shard"], shard)).combine_chunks())
        if part_name(shard) not in sizes or files.read(part_name(shard)) != raw:
            files.write(part_name(shard), raw)
    files.write(INDEX, table_bytes(rows))


def digest(manifest: Manifest, rows: pa.Table) -> str:
    """Equal for equal stores: over manifest, places, rejections and checksums, whatever the order of arrival."""
    columns = [name for name in schema(manifest).names if not name.endswith("_error")]
    return fs.digest_json([manifest.identity(), table_digest(rows, columns)])


def only(rows: pa.Table, shards: set[int]) -> pa.Table:
    """The rows of some shards, in plan order."""
    if set(pc.unique(rows["shard"]).to_pylist()) - shards:
        rows = rows.filter(pc.is_in(rows["shard"], value_set=pa.array(sorted(shards), pa.int32())))
    if (np.diff(rows["shard"].to_numpy()) < 0).any():
        rows = rows.take(pc.sort_indices(rows, [("shard", "ascending"), ("first_token", "ascending")]))
    return compact(rows)
