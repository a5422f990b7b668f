"""The token set: what is written is read, in order, by id, or not at all."""

import json
import struct
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data import tokens
from eyas.data.choose import Chooser
from eyas.data.make import Draft
from eyas.data.spill import Spill
from eyas.data.tokens import Sample, Tokens, TokensWriter, sample_id
from eyas.errors import DataError
from eyas.settings import Data, Source


def make_sample(ids, mask, split="train", source="s"):
    token_ids, loss_mask = np.array(ids, np.int32), np.array(mask, np.bool_)
    return Sample(sample_id(token_ids, loss_mask), source, split, token_ids, loss_mask)


samples = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=20).map(
        lambda pairs: make_sample(*zip(*pairs, strict=True))
    ),
    max_size=30,
    unique_by=lambda sample: sample.id,
)


def write(folder, items, facts=None):
    with TokensWriter(folder) as writer:
        for item in items:
            writer.add(item)
        return writer.finish(facts or {})


def equal(a, b):
    return (
        (a.id, a.source, a.split) == (b.id, b.source, b.split)
        and np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.loss_mask, b.loss_mask)
    )


@settings(max_examples=40, deadline=None)
@given(items=samples, group=st.integers(1, 7), data=st.data())
def test_round_trip(tmp_path_factory, items, group, data):
    folder = tmp_path_factory.mktemp("tokens") / "tokens"
    rows_per_group, tokens.ROWS_PER_GROUP = tokens.ROWS_PER_GROUP, group
    try:
        manifest = write(folder, items)
    finally:
        tokens.ROWS_PER_GROUP = rows_per_group
    held = Tokens(folder)
    assert len(held) == len(items) == manifest["samples"]
    assert manifest["tokens"] == sum(len(item.token_ids) for item in items)
    assert manifest["supervised_tokens"] == sum(int(item.loss_mask.sum()) for item in items)
    assert all(equal(a, b) for a, b in zip(held, items, strict=True))
    wanted = data.draw(st.lists(st.sampled_from(items), max_size=10)) if items else []
    assert all(equal(a, b) for a, b in zip(held.fetch([w.id for w in wanted]), wanted, strict=True))
    light = held.table(["sample_id", "tokens", "supervised"]).to_pydict()
    assert light["sample_id"] == [item.id for item in items]
    assert light["tokens"] == [len(item.token_ids) for item in items]
    assert light["supervised"] == [int(item.loss_mask.sum()) for item in items]


def test_a_scattered_sample_costs_little_reading(tmp_path):
    """Shards are planned by id, the set lies in its seeded order: each sample of a shard costs a row group."""
    items = [make_sample(np.arange(700) + number, np.ones(700)) for number in range(300)]
    write(tmp_path / "tokens", items)
    groups = pq.ParquetFile(tmp_path / "tokens/samples.parquet").metadata
    most = max(groups.row_group(index).num_rows for index in range(groups.num_row_groups))
    assert 700 * (most - 1) < 64 << 10
    assert all(
        equal(a, b) for a, b in zip(Tokens(tmp_path / "tokens").fetch([i.id for i in items]), items, strict=True)
    )


def test_sample_id_is_the_digest_of_ids_and_mask():
    ids, mask = [1, 70000, 3], [0, 1, 1]
    naive = xxhash.xxh3_128(struct.pack("<3i", *ids) + bytes(mask)).hexdigest()
    assert make_sample(ids, mask).id == naive
    assert make_sample(ids, [0, 1, 0]).id != naive


def test_digest_follows_order_split_and_source(tmp_path):
    a, b = make_sample([1, 2], [0, 1]), make_sample([3, 4], [0, 1])
    moved = make_sample([1, 2], [0, 1], split="heldout")
    digests = [write(tmp_path / "t", items)["digest"] for items in ([a, b], [a, b], [b, a], [moved, b])]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_nothing_is_visible_before_it_is_finished(tmp_path):
    folder = tmp_path / "tokens"
    write(folder, [make_sample([1, 2], [0, 1])])
    with pytest.raises(KeyboardInterrupt), TokensWriter(folder) as writer:
        writer.add(make_sample([5, 6], [0, 1]))
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    assert [sample.token_ids.tolist() for sample in Tokens(folder)] == [[1, 2]]


def test_arrays_can_be_written_to(tmp_path):
    write(tmp_path / "tokens", [make_sample([1, 2], [0, 1])])
    (sample,) = Tokens(tmp_path / "tokens")
    assert sample.token_ids.flags.writeable
    assert sample.loss_mask.flags.writeable


def test_missing_cut_and_foreign_sets(tmp_path):
    with pytest.raises(DataError, match="no token set here"):
        Tokens(tmp_path / "absent")
    folder = tmp_path / "tokens"
    write(folder, [make_sample([1, 2], [0, 1])])
    with pytest.raises(DataError, match="no sample ffff"):
        Tokens(folder).fetch(["f" * 32])
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"samples": 2}))
    with pytest.raises(DataError, match="format 1, 1 rows"):
        Tokens(folder)
    whole = (folder / "samples.parquet").read_bytes()
    (folder / "samples.parquet").write_bytes(whole[:-20])
    with pytest.raises(DataError, match="not a whole token set"):
        Tokens(folder)


def test_doubles_take_little_memory(tmp_path):
    """30,000 records that repeat one: some bytes each until the end, for only then is known whose lines are due."""
    sample = make_sample([1, 2], [0, 1])
    account = SimpleNamespace(records=30_000, labels=["s"], source_of=lambda label: 0)
    data = Data(sources=[Source(path="a.jsonl")], heldout_fraction=0)
    with Spill(tmp_path / "spill", 1, seed=0) as spill, TokensWriter(tmp_path / "tokens") as writer:
        for record in range(account.records):
            draft = Draft(record, record + 1, sample.id, "", 0, sample.token_ids, sample.loss_mask)
            spill.add(draft, record=record, turn=0, file=0, label=0)
        spill.close()
        chooser = Chooser(data, spill, account, ["a.jsonl"], np.zeros(account.records, np.uint8))
        tracemalloc.start()
        try:
            chooser.write(writer)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        writer.finish({})
    lines = [json.loads(line) for line in (tmp_path / "tokens/rejected.jsonl").read_text().splitlines()]
    assert [line["line"] for line in lines] == list(range(2, account.records + 1))
    assert {(line["reason"], line["detail"]) for line in lines} == {("duplicate", f"the same sample as {sample.id}")}
    assert most < 9_000_000, most  # the light columns' share is some 5 MB
