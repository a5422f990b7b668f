"""Files of records: JSONL, JSON, Parquet, Arrow, plain or compressed, in chunks that other processes can parse.

A chunk is cheap to cut (bytes between line ends, a record batch); its parsing is done where `records` is called.
Lines end at "\\n" only: U+2028 and its kin may stand inside a JSON string.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.errors import DataError

CHUNK_BYTES = 512 << 10
_ROWS_PER_CHUNK = 512
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class Chunk:
    """Some records of a file.

    Attributes:
        path: the file.
        first: number of the first record: line of a JSONL file, row of a table, element of an array; from 1.
        data: whole lines, or a record batch.
    """

    path: str
    first: int
    data: bytes | pa.RecordBatch

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(number, record) pairs. Raises DataError with file and line where a line is no JSON object."""
        if isinstance(self.data, bytes):
            yield from _parse_lines(self.path, self.first, self.data)
        else:
            yield from enumerate(self.data.to_pylist(), self.first)


def source_files(pattern: str) -> list[Path]:
    """The files that a source's path or glob names, sorted.

    Raises: DataError where there are none, or a file's ending is not known.
    """
    path = Path(pattern)
    if any(char in pattern for char in "*?["):
        found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    elif path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES))
    else:
        found = [path] if path.is_file() else []
    if not found:
        raise DataError(
            f"{pattern}: no such file",
            expected=f"a file, folder or glob of {', '.join(SUFFIXES)}",
            cause="a typing error, or the recipe was moved: a relative path counts from the recipe file",
            next="mend `path` in that [[data.sources]] table",
        )
    for file in found:
        if not file.name.endswith(SUFFIXES):
            raise DataError(f"{file}: not a known kind of file", expected=f"a name ending in {', '.join(SUFFIXES)}")
    return found


def read_chunks(path: Path) -> Iterator[Chunk]:
    """A file's records in order.

    Raises: DataError where the file is empty, cut short, or not what its name says.
    """
    empty = True
    chunks = _table_chunks(path) if path.name.endswith(".parquet") else _line_chunks(path)
    for chunk in chunks:
        empty = False
        yield chunk
    if empty:
        raise DataError(f"{path}: no records in this file", cause="the export that wrote it failed, or was cut short")


def _line_chunks(path: Path) -> Iterator[Chunk]:
    with _open(path) as handle:
        rest, line = b"", 1
        while block := _read(handle, path, line):
            if line == 1 and not rest:
                block = _check_start(path, block)
            lines, newline, rest = (rest + block).rpartition(b"\n")
            if lines.strip():
                yield Chunk(str(path), line, lines)
            line += lines.count(b"\n") + len(newline)
        if rest.strip():
            yield Chunk(str(path), line, rest)


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _read(handle: IO[bytes], path: Path, line: int) -> bytes:
    try:
        return handle.read(CHUNK_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}, after line {line}: the compressed file can't be read on: {error}",
            cause="the download or copy was cut short, or the file is not gzip",
            next="fetch the file again; nothing was written",
        ) from None


def _check_start(path: Path, block: bytes) -> bytes:
    """Drop UTF-8's byte order mark; refuse UTF-16, which JSONL never is."""
    if block.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"{path}, line 1: starts with a UTF-16 byte order mark",
            expected="UTF-8",
            next=f"iconv -f UTF-16 -t UTF-8 {path}",
        )
    return block.removeprefix(b"\xef\xbb\xbf")


def _parse_lines(path: str, first: int, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(data.split(b"\n"), first):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}, line {number}: byte {line[error.start]:#04x} at column {error.start + 1} is not UTF-8",
                expected="UTF-8",
                cause="written in another encoding, such as Latin-1 or GBK",
                next=f"iconv -f ENCODING -t UTF-8 {path}",
            ) from None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}, line {number}: not valid JSON: {error}",
                expected="one JSON object a line",
                cause="a cut or hand-edited line",
                next="mend or remove that line; nothing was written",
            ) from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, line {number}: a JSON {type(record).__name__}", expected="one JSON object a line")
        yield number, record


def _table_chunks(path: Path) -> Iterator[Chunk]:
    row = 1
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_ROWS_PER_CHUNK):
                yield Chunk(str(path), row, batch)
                row += batch.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"{path}, after row {row - 1}: not a whole Parquet file: {error}",
            cause="the download or copy was cut short",
            next="fetch the file again; nothing was written",
        ) from None
