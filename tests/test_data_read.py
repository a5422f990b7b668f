"""Files of records: every kind read alike, and one clear error with file and line for each fault."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data import read
from eyas.data.read import read_chunks, source_files
from eyas.errors import DataError

RECORDS = [
    {"messages": [{"role": "user", "content": "one\u2028line\u0085still"}]},
    {"messages": [{"role": "user", "content": 'quote " and \\ and\nnewline'}]},
    {"messages": [{"role": "user", "content": "文字 🎉"}]},
]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def records(path):
    return [pair for chunk in read_chunks(path) for pair in chunk.records()]


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACKED = {
    "a.jsonl": LINES,
    "no_last_newline.jsonl": LINES[:-1],
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "a.jsonl.gz": gzip.compress(LINES),
    "members.jsonl.gz": gzip.compress(LINES[:40]) + gzip.compress(LINES[40:]),
    "a.jsonl.zst": zstd(LINES),
    "array.json": json.dumps(RECORDS, indent=2).encode(),
    "lines.json": LINES,
    "array.json.gz": gzip.compress(json.dumps(RECORDS).encode()),
}


@pytest.mark.parametrize("name", PACKED)
def test_every_text_form(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(PACKED[name])
    assert records(path) == [(1, RECORDS[0]), (2, RECORDS[1]), (3, RECORDS[2])]
    assert source_files(str(path)) == [path]


def test_tables(tmp_path):
    table = pa.Table.from_pylist(RECORDS * 400)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "stream.arrow", "file.arrow"):
        got = records(tmp_path / name)
        assert [number for number, _ in got] == list(range(1, 1201))
        assert [record for _, record in got] == RECORDS * 400


def test_text_documents_and_bare_lists(tmp_path):
    (tmp_path / "a.txt").write_text("\n======\nfirst\n\nstill first\n=====\nsecond ==== x\n====\n \n")
    texts = [record["text"].strip() for _, record in records(tmp_path / "a.txt")]
    assert texts == ["first\n\nstill first", "second ==== x"]
    (tmp_path / "bare.jsonl").write_text('[{"role": "user", "content": "x"}]\n\n[]\n')
    assert records(tmp_path / "bare.jsonl") == [
        (1, {"messages": [{"role": "user", "content": "x"}]}),
        (3, {"messages": []}),
    ]


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=40), min_size=1, max_size=30), size=st.integers(1, 60))
def test_chunks_never_split_a_line(tmp_path_factory, texts, size):
    """Whatever the size of a chunk, lines and their numbers are those of a naive reader."""
    path = tmp_path_factory.mktemp("read") / "a.jsonl"
    path.write_bytes("".join(json.dumps({"t": text}, ensure_ascii=True) + "\n" for text in texts).encode())
    kept, read._CHUNK_BYTES = read._CHUNK_BYTES, size
    try:
        got = records(path)
    finally:
        read._CHUNK_BYTES = kept
    assert got == [(number, {"t": text}) for number, text in enumerate(texts, 1)]


FAULTS = [
    ("bad.jsonl", LINES + b'{"messages": [\n' + LINES, "bad.jsonl, line 4: not valid JSON"),
    ("latin.jsonl", LINES + '{"a": "Zürich"}\n'.encode("latin-1"), r"latin.jsonl, line 4: byte 0xfc is not UTF-8"),
    ("utf16.jsonl", LINES.decode().encode("utf-16"), "utf16.jsonl, line 1: starts with a UTF-16"),
    ("number.jsonl", LINES + b"42\n", "number.jsonl, line 4: a JSON int"),
    ("empty.jsonl", b"", "empty.jsonl: no records"),
    ("blank.jsonl", b"\n\n  \n", "blank.jsonl: no records"),
    ("empty.json", b"[]", "empty.json: no records"),
    ("cut.json", b'[{"a": 1}, {"a"', "cut.json: not valid JSON"),
    ("latin.json", b'[{"a":\n "\xfc"}]', r"latin.json, line 2: byte 0xfc is not UTF-8"),
    ("cut.jsonl.gz", gzip.compress(LINES * 50)[:-30], "cut.jsonl.gz, after line .*: the compressed file can't be read"),
    ("plain.jsonl.gz", LINES, "plain.jsonl.gz, after line 1: the compressed file can't be read"),
    ("cut.jsonl.zst", zstd(LINES * 50)[:-9], "cut.jsonl.zst, after line .*: the compressed file can't be read"),
    ("cut.parquet", b"PAR1 nothing more", "cut.parquet, after row 0: not a whole parquet file"),
    ("cut.arrow", b"ARROW1 nothing", "cut.arrow, after row 0: not a whole arrow file"),
]


@pytest.mark.parametrize(("name", "data", "message"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_faults_name_file_and_line(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        records(tmp_path / name)


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        source_files(str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="no such file"):
        source_files(str(tmp_path / "*.jsonl"))
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(DataError, match="not a known kind of file"):
        source_files(str(tmp_path / "a.csv"))


def test_folders_and_globs_are_sorted(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "sub/c.parquet", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert [path.name for path in source_files(str(tmp_path))] == ["a.jsonl", "b.jsonl", "c.parquet"]
    assert [path.name for path in source_files(str(tmp_path / "*.jsonl"))] == ["a.jsonl", "b.jsonl"]
