"""docs/format.md is enough to read a store: this reader uses safetensors, pyarrow and xxhash only, and no eyas."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from helpers_store import Sample, make_manifest, make_samples, states, write_rows, write_store
from safetensors import safe_open

from eyas.store.format import tensors
from eyas.store.reader import StoreReader
from eyas.store.writer import StoreWriter

torch.set_num_threads(1)
DOC = Path(__file__).parent.parent / "docs/format.md"


def read_by_the_page(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """The manifest, and sample id -> tensor name -> decoded rows, of all written samples."""
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["format_version"]) == ("eyas-store", 1)
    digest = manifest.pop("digest")
    compact = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert xxhash.xxh3_128_hexdigest(compact.encode()) == digest

    rows = []
    if (folder / "index.parquet").exists():
        rows = read_table(folder / "index.parquet").to_pylist()
    folded = {row["shard"] for row in rows}
    for part in sorted((folder / "shards").glob("[0-9]*.parquet")):
        if int(part.stem) not in folded:
            rows += read_table(part).to_pylist()

    samples = {}
    for row in rows:
        shard = folder / f"shards/{row['shard']:06d}.safetensors"
        if row["rejected"] or not shard.exists():
            continue
        with safe_open(shard, "pt") as file:
            assert file.metadata() == {"format": "eyas-store", "shard": f"{row['shard']:06d}"}
            sample = {}
            for name in file.keys():  # noqa: SIM118
                final = name.startswith("final_")
                first, count = (row["first_final"], row["supervised"]) if final else (row["first_token"], row["tokens"])
                rows_of = file.get_slice(name)[first : first + count]
                raw = rows_of.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if count else b""
                assert xxhash.xxh3_128_digest(raw) == row[f"xxh3_128.{name}"]
                sample[name] = rows_of
        for kind in ("aux", "final"):
            if (scales := sample.pop(f"{kind}_scales", None)) is not None:
                sample[f"{kind}_hidden_states"] = sample[f"{kind}_hidden_states"].float() * scales.unsqueeze(-1)
        identity = sample["token_ids"].numpy().astype("<i4").tobytes() + sample["loss_mask"].numpy().tobytes()
        assert xxhash.xxh3_128_hexdigest(identity) == row["sample_id"]
        samples[row["sample_id"]] = sample
    return manifest, samples


def read_table(path: Path) -> pa.Table:
    raw = path.read_bytes()
    head, mark, tail = raw.rpartition(b"\x08xxh3_128\x18\x20")
    assert xxhash.xxh3_128_hexdigest(head + mark + b"@" * 32 + tail[32:]).encode() == tail[:32]
    assert pq.read_metadata(path).metadata[b"xxh3_128"] == tail[:32]
    return pq.read_table(path)


def check(folder: Path, samples: list[Sample], exact: bool) -> None:
    found = read_by_the_page(folder)[1]
    assert found.keys() == {sample.id for sample in samples}
    ours = StoreReader(str(folder))
    for sample in samples:
        aux, final = states(sample)
        read, stored = found[sample.id], ours.read(sample.id)
        np.testing.assert_array_equal(read["token_ids"], sample.token_ids)
        np.testing.assert_array_equal(read["loss_mask"], sample.loss_mask)
        assert torch.equal(read["aux_hidden_states"].bfloat16(), stored.aux_hidden_states)
        assert torch.equal(read["final_hidden_states"].bfloat16(), stored.final_hidden_states)
        if exact:
            assert torch.equal(read["aux_hidden_states"], aux) and torch.equal(read["final_hidden_states"], final)


@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
@pytest.mark.parametrize("final_encoding", ["bf16", "fp8"])
def test_a_reader_by_the_page_reads_a_store(tmp_path: Path, encoding: str, final_encoding: str) -> None:
    samples = make_samples(20)
    write_store(str(tmp_path / "store"), samples, make_manifest(encoding, final_encoding), rejected=[samples[4].id])
    exact = encoding == final_encoding == "bf16"
    check(tmp_path / "store", [sample for sample in samples if sample is not samples[4]], exact)


def test_a_reader_by_the_page_reads_a_store_that_is_being_written(tmp_path: Path) -> None:
    samples, url = make_samples(20), str(tmp_path / "store")
    by_id = {sample.id: sample for sample in samples}
    done: list[Sample] = []
    for shards in (2, 1):  # the second writer leaves a part that is not folded
        writer = StoreWriter.open(url, make_manifest(), [sample.entry for sample in samples])
        for name in sum(writer.pending()[:shards], []):
            write_rows(writer, by_id[name], 0, len(by_id[name].token_ids))
            done.append(by_id[name])
        writer.files.unlock() if shards == 1 else writer.close()
    assert len(done) < len(samples)
    check(tmp_path / "store", done, exact=True)


def test_the_page_names_every_tensor_column_and_key(tmp_path: Path) -> None:
    page = DOC.read_text()
    write_store(str(tmp_path / "store"), make_samples(3), make_manifest("fp8", "fp8"))
    manifest, _ = read_by_the_page(tmp_path / "store")
    columns = pq.read_schema(tmp_path / "store/index.parquet").names
    names = [tensor.name for tensor in tensors(make_manifest("fp8", "fp8"))]
    for word in [*manifest, *manifest["target"], *manifest["engine"], *names, *columns, "digest"]:
        assert f"`{word}`" in page or word.startswith("xxh3_128."), word
    table = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(table) == sorted(names)
    assert len(page.splitlines()) <= 110


def test_the_plan_says_what_the_index_will(tmp_path: Path) -> None:
    write_store(str(tmp_path / "store"), make_samples(20))
    plan, index = (read_table(tmp_path / f"store/{name}.parquet") for name in ("plan", "index"))
    assert index.select(plan.schema.names).equals(plan)
    assert plan.take(pc.sort_indices(plan, [("split", "ascending"), ("sample_id", "ascending")])).equals(plan)
