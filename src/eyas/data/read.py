"""Files of records: JSONL, JSON, Parquet, Arrow, plain or compressed, in chunks that other processes can parse.

A chunk is cheap to cut (bytes between line ends, a record batch); its parsing is done where `records` is called.
Lines end at "\\n" only: U+2028 and its kin may stand inside a JSON string.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from eyas.errors import DataError

_CHUNK_BYTES = 512 << 10
_ROWS_PER_CHUNK = 512
_TABLES = (".parquet", ".arrow")
_TEXTS = (".jsonl", ".json", ".txt")
SUFFIXES = (*_TABLES, *(text + packed for text in _TEXTS for packed in ("", ".gz", ".zst")))
# A line of these alone parts the documents of a .txt file.
_RULE = re.compile(r"^\s*(?:=|-|\*){4,}\s*$", re.MULTILINE)

Raw = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """Some records of a file.

    Attributes:
        path: the file.
        first: number of the first record, from 1: line of a JSONL file, row of a table, element of a JSON array.
        data: whole lines, a record batch, or parsed records.
        share: how much of the file is read with it, 0 to 1.
    """

    path: str
    first: int
    data: bytes | pa.RecordBatch | list[Any]
    share: float

    def records(self) -> Iterator[tuple[int, Raw]]:
        """(number, record) pairs. Raises DataError with file and line where a record is no JSON object."""
        if isinstance(self.data, bytes):
            values = _parse_lines(self.path, self.first, self.data)
        else:
            rows = self.data if isinstance(self.data, list) else self.data.to_pylist()
            values = enumerate(rows, self.first)
        for number, value in values:
            # A bare list of turns is a conversation without further keys.
            record = {"messages": value} if isinstance(value, list) else value
            if not isinstance(record, dict):
                raise DataError(
                    f"{self.place(number)}: a JSON {type(value).__name__}", expected="a JSON object, or a list of turns"
                )
            yield number, record

    def count(self) -> int:
        """About how many records it holds (blank lines are counted too)."""
        return self.data.count(b"\n") + 1 if isinstance(self.data, bytes) else len(self.data)

    def place(self, number: int) -> str:
        """Words for where a record stands."""
        return f"{self.path}, {'line' if isinstance(self.data, bytes) else 'record'} {number}"


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
    for chunk in _chunks(path):
        empty = False
        yield chunk
    if empty:
        raise DataError(f"{path}: no records in this file", cause="the export that wrote it failed, or was cut short")


def _chunks(path: Path) -> Iterator[Chunk]:
    if path.name.endswith(_TABLES):
        return _table_chunks(path)
    kind = path.name.removesuffix(".gz").removesuffix(".zst").rpartition(".")[2]
    return {"jsonl": _line_chunks, "json": _json_chunks, "txt": _text_chunks}[kind](path)


def _line_chunks(path: Path) -> Iterator[Chunk]:
    with path.open("rb") as file:
        handle, size = _unpacked(path, file), max(path.stat().st_size, 1)
        rest, line = b"", 1
        while block := _read(handle, path, line):
            if line == 1 and not rest:
                block = _check_start(path, block)
            lines, newline, rest = (rest + block).rpartition(b"\n")
            if lines.strip():
                yield Chunk(str(path), line, lines, file.tell() / size)
            line += lines.count(b"\n") + len(newline)
        if rest.strip():
            yield Chunk(str(path), line, rest, 1.0)


def _unpacked(path: Path, file: IO[bytes]) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if path.suffix == ".zst":
        return cast(IO[bytes], pa.CompressedInputStream(pa.PythonFile(file), "zstd"))
    return file


def _read(handle: IO[bytes], path: Path, line: int, size: int = 0) -> bytes:
    try:
        return handle.read(size or _CHUNK_BYTES)
    except (EOFError, zlib.error, pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"{path}, after line {line}: the compressed file can't be read on: {error}",
            cause="the download or copy was cut short, or the file is of another kind than its name says",
            next="fetch the file again; nothing was written",
        ) from None


def _read_all(path: Path) -> str:
    with path.open("rb") as file:
        raw = _check_start(path, _read(_unpacked(path, file), path, 1, -1))
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{path}, line {raw.count(bytes([10]), 0, error.start) + 1}", raw, error) from None


def _json_chunks(path: Path) -> Iterator[Chunk]:
    """A .json file: an array of records, one record, or, as often found, JSONL. It is held in memory whole."""
    text = _read_all(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        first, _, rest = text.partition("\n")
        if rest.strip() and _is_json(first):
            yield from _line_chunks(path)
            return
        raise DataError(
            f"{path}: not valid JSON: {error}",
            expected="an array of records",
            cause="a cut or hand-edited file",
            next="mend it; nothing was written",
        ) from None
    records = value if isinstance(value, list) else [value]
    yield from _slices(path, records)


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _text_chunks(path: Path) -> Iterator[Chunk]:
    """A .txt file: documents parted by lines of ====, ---- or ****."""
    documents = [document for document in _RULE.split(_read_all(path)) if document.strip()]
    yield from _slices(path, [{"text": text} for text in documents])


def _slices(path: Path, records: list[Any]) -> Iterator[Chunk]:
    for start in range(0, len(records), _ROWS_PER_CHUNK):
        end = start + _ROWS_PER_CHUNK
        yield Chunk(str(path), start + 1, records[start:end], min(end / len(records), 1.0))


def _check_start(path: Path, block: bytes) -> bytes:
    """Drop UTF-8's byte order mark; refuse UTF-16, which JSONL never is."""
    if block.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(
            f"{path}, line 1: starts with a UTF-16 byte order mark",
            expected="UTF-8",
            next=f"iconv -f UTF-16 -t UTF-8 {path}",
        )
    return block.removeprefix(b"\xef\xbb\xbf")


def _parse_lines(path: str, first: int, data: bytes) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(data.split(b"\n"), first):
        if not line or line.isspace():
            continue
        try:
            yield number, json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _not_utf8(f"{path}, line {number}", line, error) from None
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}, line {number}: not valid JSON: {error}",
                expected="one JSON object a line",
                cause="a cut or hand-edited line",
                next="mend or remove that line; nothing was written",
            ) from None


def _not_utf8(where: str, raw: bytes, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{where}: byte {raw[error.start]:#04x} is not UTF-8",
        expected="UTF-8",
        cause="written in another encoding, such as Latin-1 or GBK",
        next="iconv -f ENCODING -t UTF-8 FILE > NEW_FILE",
    )


def _table_chunks(path: Path) -> Iterator[Chunk]:
    row = 1
    try:
        for batch, share in _parquet_batches(path) if path.suffix == ".parquet" else _arrow_batches(path):
            for start in range(0, batch.num_rows, _ROWS_PER_CHUNK):
                yield Chunk(str(path), row + start, batch.slice(start, _ROWS_PER_CHUNK), share)
            row += batch.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"{path}, after row {row - 1}: not a whole {path.suffix[1:]} file: {error}",
            cause="the download or copy was cut short",
            next="fetch the file again; nothing was written",
        ) from None


def _parquet_batches(path: Path) -> Iterator[tuple[pa.RecordBatch, float]]:
    with pq.ParquetFile(path) as file:
        rows = 0
        for batch in file.iter_batches(batch_size=_ROWS_PER_CHUNK):
            rows += batch.num_rows
            yield batch, rows / file.metadata.num_rows


def _arrow_batches(path: Path) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Arrow files come in two forms: `datasets` writes streams, others the file form with its magic bytes."""
    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            file = pa.ipc.open_file(source)
            for i in range(file.num_record_batches):
                yield file.get_batch(i), (i + 1) / file.num_record_batches
        else:
            source.seek(0)
            for batch in pa.ipc.open_stream(source):
                yield batch, source.tell() / source.size()
