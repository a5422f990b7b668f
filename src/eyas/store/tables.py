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
_MARK = b"\x08xxh3_128\x18\x20"  # what stands before the value in the footer: lengths and field types of thrift
_ROW_GROUP = 1 << 16


def table_bytes(table: pa.Table) -> bytes:
    """The table as a Parquet file (zstd, plain types, no pandas or Arrow metadata) with its checksum in it."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table, row_group_size=_ROW_GROUP)
        writer.add_key_value_metadata({_KEY: _PLACEHOLDER.decode()})
    raw = sink.getvalue()
    head, found, tail = raw.rpartition(_MARK + _PLACEHOLDER)
    assert found, "Parquet's footer is not laid out as expected"
    return head + _MARK + fs.digest(raw).encode() + tail


def parse_table(raw: bytes, where: str, schema: pa.Schema) -> pa.Table:
    """The table in a file that `table_bytes` made.

    The checksum is compared before the Parquet library sees a byte: it need not cope with damage.
    Raises: CorruptStore where a single byte is another one, or the columns are not those of `schema`.
    """
    head, found, tail = raw.rpartition(_MARK)
    claimed, tail = tail[: len(_PLACEHOLDER)], tail[len(_PLACEHOLDER) :]
    seen = fs.digest(head, _MARK, _PLACEHOLDER, tail) if found else "none"
    if seen.encode() != claimed:
        raise CorruptStore(
            f"{where}: checksum {seen}", expected=f"{claimed!r}, as the file says itself", cause=_CAUSE, next=_NEXT
        )
    table = pq.read_table(pa.BufferReader(raw))
    if table.schema.names != schema.names:
        raise CorruptStore(
            f"{where}: columns {', '.join(table.schema.names)}",
            expected=", ".join(schema.names),
            cause="the file of another store, of another encoding",
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
