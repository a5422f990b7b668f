"""Parquet files that carry their own checksum, and digests of a table's content.

The checksum lies in the file's key-value metadata under `xxh3_128`: 32 hex digits of the xxh3-128 of the file with
those 32 bytes replaced by `@`. So one atomic rename commits a table and its proof.
"""

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from eyas import fs
from eyas.errors import CorruptStore

_KEY = "xxh3_128"
_PLACEHOLDER = b"@" * 32
_ROW_GROUP = 1 << 16


def table_bytes(table: pa.Table) -> bytes:
    """The table as a Parquet file (zstd, plain types, no pandas or Arrow metadata) with its checksum in it."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table, row_group_size=_ROW_GROUP)
        writer.add_key_value_metadata({_KEY: _PLACEHOLDER.decode()})
    raw = sink.getvalue()
    head, placeholder, tail = raw.rpartition(_PLACEHOLDER)
    assert placeholder
    return head + fs.digest(raw).encode() + tail


def parse_table(raw: bytes, where: str, schema: pa.Schema) -> pa.Table:
    """The table in a file that `table_bytes` made.

    Raises: CorruptStore where a single byte is another one, or the columns are not those of `schema`.
    """
    try:
        table = pq.read_table(pa.BufferReader(raw))
        claimed = pq.read_metadata(pa.BufferReader(raw)).metadata.get(_KEY.encode(), b"")
    except (pa.ArrowException, OSError, AttributeError) as error:
        raise CorruptStore(
            f"{where}: not a Parquet file ({str(error).splitlines()[0]})", cause=_CAUSE, next=_NEXT
        ) from None
    head, found, tail = raw.rpartition(claimed) if claimed else (b"", b"", b"")
    actual = fs.digest(head, _PLACEHOLDER, tail)
    if not found or actual != claimed.decode("ascii", "replace"):
        raise CorruptStore(
            f"{where}: checksum {actual}",
            expected=f"{claimed.decode('ascii', 'replace')}, as in the file's metadata",
            cause=_CAUSE,
            next=_NEXT,
        )
    if table.schema.names != schema.names:
        raise CorruptStore(
            f"{where}: columns {', '.join(table.schema.names)}",
            expected=", ".join(schema.names),
            cause=_CAUSE,
            next=_NEXT,
        )
    return table.cast(schema)


_CAUSE = "a damaged disk or copy, or an edit by hand"
_NEXT = "eyas verify RECIPE --repair, then eyas capture RECIPE: sound shards are kept"


def table_digest(table: pa.Table, columns: Sequence[str]) -> str:
    """xxh3-128 of the content of some columns, row by row in order, whatever the table's chunks."""
    state = xxhash.xxh3_128()
    for batch in table.select(list(columns)).combine_chunks().to_batches(max_chunksize=_ROW_GROUP):
        for column in batch.columns:
            state.update(_column_bytes(column))
    return state.hexdigest()


def _column_bytes(column: Any) -> bytes:
    if pa.types.is_integer(column.type):
        return bytes(column.to_numpy(zero_copy_only=False).astype("<i8").tobytes())
    if pa.types.is_fixed_size_binary(column.type):
        return b"".join(column.to_pylist())
    return "\0".join(column.cast(pa.string()).to_pylist()).encode() + b"\0"
