"""The store on S3: the conformance suite against a real server, and what happens when the wire or the keys fail."""

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
import s3fs
import typer
from botocore.config import Config
from conformance_store import Place, StoreSuite
from helpers_s3 import Wire, s3_server
from helpers_store import make_manifest, make_samples, states, write_rows, write_store
from typer.testing import CliRunner

from eyas.cli import commands
from eyas.errors import StoreError
from eyas.store.reader import StoreReader
from eyas.store.remote import RemoteFiles, _own_folder
from eyas.store.verify import verify_store
from eyas.store.writer import StoreWriter

KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
ROOT = Path(__file__).resolve().parent
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("moto") / "server.log") as url:
        yield url


@pytest.fixture
def s3(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A plain S3 client, past fsspec; the environment has the server's address and keys."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = KEYS | {"AWS_ENDPOINT_URL": server, "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1"}
    settings |= {"EYAS_STAGING": str(tmp_path / "staging"), "AWS_CONFIG_FILE": str(tmp_path / "none")}
    for name, value in (settings | {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    client = boto3.client("s3", endpoint_url=server, config=Config(s3={"addressing_style": "path"}))
    yield client
    client.close()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def place(s3: Any) -> Place:
    bucket = f"bucket-{next(_numbers)}"
    s3.create_bucket(Bucket=bucket)

    def names() -> set[str]:
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return {entry["Key"].removeprefix("a/store/") for page in pages for entry in page.get("Contents", [])}

    return Place(
        f"s3://{bucket}/a/store",
        lambda name: s3.get_object(Bucket=bucket, Key=f"a/store/{name}")["Body"].read(),
        lambda name, raw: s3.put_object(Bucket=bucket, Key=f"a/store/{name}", Body=raw),
        names,
    )


class TestS3(StoreSuite):
    pass


def test_an_interrupted_upload_loses_nothing(
    place: Place, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of 80 kB; the wire is cut in the middle of the second one's upload."""
    samples, manifest = make_samples(60, longest=60), make_manifest(shard_bytes=80_000, hidden=256)
    entries, by_id = [sample.entry for sample in samples], {sample.id: sample for sample in samples}
    wire = Wire(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", wire.url)
    writer = StoreWriter.open(place.url, manifest, entries)
    first, second, *_ = writer.pending()
    for name in first:
        write_rows(writer, by_id[name], 0, len(by_id[name].token_ids), 256)
    committed = place.names()
    wire.cut_after = 20_000
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError) as told:
        for name in second:
            write_rows(writer, by_id[name], 0, len(by_id[name].token_ids), 256)
    print(told.value)
    assert wire.cuts and "uploading shards/000001.safetensors" in told.value.seen
    assert "the finished shard waits in" in told.value.next and "is sent first" in told.value.next
    assert {name for name in place.names() if name.endswith(".safetensors")} == {"shards/000000.safetensors"}
    assert committed <= place.names() | {".partial-writer-lock"}
    wire.cut_after = None
    writer.close()
    report = verify_store(place.url)
    assert (report.faults, report.written, report.pending) == ([], len(first), 60 - len(first))

    with StoreWriter.open(place.url, manifest, entries) as writer:
        assert not {name for names in writer.pending() for name in names} & set(second)  # sent, not captured again
        for name in sum(writer.pending(), []):
            write_rows(writer, by_id[name], 0, len(by_id[name].token_ids), 256)
    write_store(str(tmp_path / "undisturbed"), samples, manifest, hidden=256)
    assert StoreReader(place.url).digest == StoreReader(str(tmp_path / "undisturbed")).digest
    assert list((tmp_path / "staging").rglob("*.safetensors")) == []
    wire.close()


def test_shards_of_another_store_that_was_there_are_not_sent(
    place: Place, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_samples(30)
    write_store(place.url, samples)
    (outbox,) = (tmp_path / "staging").glob("*/outbox/*")
    (outbox / "000003.safetensors").write_bytes(b"of another time")
    bucket = place.url.split("/")[2]
    for name in place.names():
        s3.delete_object(Bucket=bucket, Key=f"a/store/{name}")
    write_store(place.url, samples, make_manifest(aux_layer_ids=[1, 4, 5]))
    assert verify_store(place.url).faults == []
    assert not outbox.exists()


def test_a_killed_writer_is_taken_over_on_its_machine_and_named_from_another(place: Place) -> None:
    script = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from helpers_store import *
samples = make_samples(40)
writer = StoreWriter.open({place.url!r}, make_manifest(), [sample.entry for sample in samples])
by_id = {{sample.id: sample for sample in samples}}
for name in sum(writer.pending()[:3], []):
    write_rows(writer, by_id[name], 0, len(by_id[name].token_ids))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 9
    assert ".partial-writer-lock" in place.names()
    samples = make_samples(40)
    writer = StoreWriter.open(place.url, make_manifest(), [sample.entry for sample in samples])
    assert sum(map(len, writer.pending())) < 40
    writer.close()
    assert ".partial-writer-lock" not in place.names()
    with subprocess.Popen(["sleep", "60"]) as other:  # the staging folder of another user, say: no lock tells of it
        claim = {"host": socket.gethostname(), "pid": other.pid, "since": "today"}
        for created in (psutil.Process(other.pid).create_time() - 100, psutil.Process(other.pid).create_time()):
            place.put(".partial-writer-lock", json.dumps(claim | {"created": created}).encode())
            if created < psutil.Process(other.pid).create_time():  # the pid is another process's by now
                StoreWriter.open(place.url, make_manifest(), [sample.entry for sample in samples]).close()
                continue
            with pytest.raises(StoreError, match=f"process {other.pid} on .* writes it since today"):
                StoreWriter.open(place.url, make_manifest(), [sample.entry for sample in samples])
        other.kill()
    StoreWriter.open(place.url, make_manifest(), [sample.entry for sample in samples]).close()
    place.put(".partial-writer-lock", b'{"host": "gpu7", "pid": 12, "since": "2026-01-01 10:00:00 +0000"}')
    with pytest.raises(StoreError, match="process 12 on gpu7 writes it since 2026-01-01") as told:
        StoreWriter.open(place.url, make_manifest(), [sample.entry for sample in samples])
    assert f"remove {place.url}/.partial-writer-lock" in told.value.next


def test_a_fetched_shard_goes_with_its_reader(place: Place, tmp_path: Path) -> None:
    samples = make_samples(120)
    write_store(place.url, samples)
    reader = StoreReader(place.url)
    for ref in reader.samples():
        assert reader.read(ref.sample_id).id == ref.sample_id
    fetched = list((tmp_path / "staging").rglob("read-*/*"))
    assert 0 < len(fetched) <= 16 < len(set(reader.rows.shard.tolist()))
    aux, _ = states(samples[0])
    kept = reader.read(samples[0].id).aux_hidden_states
    del reader
    assert kept.equal(aux)  # the mapping outlives the file's name
    assert list((tmp_path / "staging").rglob("read-*")) == []


def test_missing_credentials_are_one_clear_error(place: Place) -> None:
    write_store(place.url, make_samples(3))
    before = place.names()
    environment = {key: value for key, value in os.environ.items() if key not in KEYS}
    done = subprocess.run(
        [sys.executable, "-m", "eyas", "verify", place.url], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {place.url}: listing: Unable to locate credentials\n")
    assert "next: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in done.stderr
    assert "Traceback" not in done.stderr and place.names() == before


def test_a_server_that_is_down_is_one_clear_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    write_store(place.url, make_samples(3))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError, match=r"listing: Could not connect.*\n.*can't be reached") as told:
        StoreReader(place.url)
    assert "AWS_ENDPOINT_URL" in told.value.next and "committed shards are kept" in told.value.next


def test_a_bucket_that_is_not_there_and_a_scheme_that_nobody_knows(s3: Any) -> None:
    with pytest.raises(StoreError, match="no such bucket"):
        write_store("s3://nobody/store", make_samples(3))
    with pytest.raises(StoreError, match="Protocol not known: floppy"):
        StoreReader("floppy://a/store")
    with pytest.raises(StoreError, match="no support for `gs://` is installed"):
        StoreReader("gs://a/store")


def test_the_command_line_takes_a_url(place: Place) -> None:
    write_store(place.url, make_samples(10))
    cli = typer.Typer()
    commands.register(cli)
    for command, said in (("verify", "no fault: 10 samples read"), ("store info", "10 in = 10 written")):
        done = CliRunner().invoke(cli, [*command.split(), place.url], catch_exceptions=False)
        assert done.exit_code == 0 and said in done.stdout, done.output


def test_readers_that_begin_together_sweep_what_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_STAGING", str(tmp_path))
    readers = [RemoteFiles("memory://store") for _ in range(8)]
    root = readers[0].root
    for number in range(300):
        (root / f"read-new-{number}").mkdir(parents=True)
        (root / f"read-new-{number}" / "000000.safetensors").write_bytes(b"left by a killed process")
    for name in ("new-old", "new-young"):
        (root / name).mkdir()
    os.utime(root / "new-old", (0, 0))
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(_own_folder, readers))
    assert sorted(root.iterdir()) == sorted([*folders, root / "new-young"]) and len(set(folders)) == 8
