"""Parquet files that carry their own checksum, and digests of a table's content.

The checksum lies in the file's key-value metadata under `xxh3_128`: 32 hex digits of the xxh3-128 of the file with
those 32 bytes replaced by `@`. So one atomic rename commits a table and its proof.
"""

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
_FOOTER_END = 4096  # bytes at the end of a file that surely hold the key-value metadata
_ROW_GROUP = 1 << 16


def table_bytes(table: pa.Table) -> bytes:
    """The table as a Parquet file (zstd, plain types, no pandas or Arrow metadata) with its checksum in it."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", store_schema=False) as writer:
        writer.write_table(table, row_group_size=_ROW_GROUP)
        writer.add_key_value_metadata({_KEY: _PLACEHOLDER.decode()})
    raw = memoryview(sink.getvalue())
    last = max(0, len(raw) - _FOOTER_END)
    place = last + bytes(raw[last:]).rindex(_MARK + _PLACEHOLDER) + len(_MARK)
    return b"".join([raw[:place], fs.digest(raw).encode(), raw[place + len(_PLACEHOLDER) :]])


def parse_table(raw: bytes, where: str, schema: pa.Schema) -> pa.Table:
    """The table in a file that `table_bytes` made.

    The checksum is compared before the Parquet library sees a byte: it need not cope with damage.
    Raises: CorruptStore where a single byte is another one, or the columns are not those of `schema`.
    """
    place = raw.rfind(_MARK) + len(_MARK)
    end, whole = place + len(_PLACEHOLDER), memoryview(raw)
    claimed = raw[place:end]
    seen = fs.digest(whole[:place], _PLACEHOLDER, whole[end:]) if _MARK in raw else "none"
    if seen.encode() != claimed:
        raise CorruptStore(
            f"{where}: checksum {seen}", expected=f"{claimed!r}, as the file says itself", cause=_CAUSE, next=_NEXT
        )
    # In this thread alone: read_table's own threads may still hold `raw` when Python ends, and then the process aborts
    # (pyarrow 26.0.1, "terminate called without an active exception"; LOG.md, 2026-11-30).
    with pq.ParquetFile(pa.BufferReader(raw)) as file:
        table = file.read(use_threads=False)
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
    for first in range(0, len(table), _ROW_GROUP):
        piece = table.select(list(columns)).slice(first, _ROW_GROUP)
        for column in piece.columns:
            state.update(_column_bytes(column.combine_chunks()))
    return state.hexdigest()


def compact(table: pa.Table) -> pa.Table:
    """The table with one chunk a column, made column by column: two copies of a large table at once are too many.

    The caller gives up its own reference first.
    """
    columns, schema = [], table.schema
    while table.num_columns:
        columns.append(table.column(0).combine_chunks())
        table = table.remove_column(0)
    return pa.table(columns, schema=schema)


def _column_bytes(column: Any) -> bytes:
    if pa.types.is_integer(column.type):
        return bytes(column.to_numpy(zero_copy_only=False).astype("<i8").tobytes())
    if pa.types.is_fixed_size_binary(column.type):
        return b"".join(column.to_pylist())
    return "\0".join(column.cast(pa.string()).to_pylist()).encode() + b"\0"
