"""Shuffled streaming: every sample once an epoch, split over ranks, resumed exactly, in bounded memory."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_store import make_manifest, make_samples, scratch_folder, states, write_store
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.store.reader import StoreReader

torch.set_num_threads(1)
SAMPLES = make_samples(120)


@pytest.fixture(scope="module")
def store() -> Iterator[StoreReader]:
    with scratch_folder() as folder:
        write_store(str(folder / "store"), SAMPLES, make_manifest(shard_bytes=3000), rejected=[SAMPLES[0].id])
        yield StoreReader(str(folder / "store"))


def ids(store: StoreReader, **where: int) -> list[str]:
    return [sample.id for sample in store.stream("train", **({"seed": 0, "epoch": 0} | where))]


def test_an_epoch_has_every_sample_once_in_another_order(store: StoreReader) -> None:
    train = {sample.id for sample in SAMPLES[1:] if sample.split == "train"}
    first, second, other = ids(store), ids(store, epoch=1), ids(store, seed=1)
    for order in (first, second, other):
        assert len(order) == len(train) and set(order) == train
    assert first == ids(store)
    assert len({tuple(order) for order in (first, second, other)}) == 3
    heldout = [sample.id for sample in store.stream("heldout", seed=0, epoch=0)]
    assert set(heldout) == {sample.id for sample in SAMPLES[1:] if sample.split == "heldout"}
    assert len(list(store.stream(None, seed=0, epoch=0))) == len(SAMPLES) - 1


def test_the_order_stays_the_same_from_release_to_release(store: StoreReader) -> None:
    order = store.order("train", seed=3, epoch=5)
    assert order[:8].tolist() == [22, 94, 55, 50, 90, 73, 91, 93]


def test_neighbours_come_from_several_shards(store: StoreReader) -> None:
    shard = {ref.sample_id: ref.shard for ref in store.samples()}
    order = [shard[name] for name in ids(store)]
    same = np.mean([one == other for one, other in zip(order, order[1:], strict=False)])
    assert same < 0.5
    assert max(len(set(order[place : place + 20])) for place in range(0, 100, 20)) <= 8


@settings(max_examples=60, deadline=None)
@given(world=st.integers(1, 5), consumed=st.integers(0, 25), resumed_world=st.integers(1, 5))
def test_ranks_share_an_epoch_and_resume_exactly(
    store: StoreReader, world: int, consumed: int, resumed_world: int
) -> None:
    whole = ids(store)
    shares = [ids(store, rank=rank, world=world) for rank in range(world)]
    assert sorted(sum(shares, [])) == sorted(whole)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for rank in range(world):
        assert ids(store, rank=rank, world=world, start=consumed) == shares[rank][consumed:]
    done = consumed * world * resumed_world  # a place that both worlds can stand at
    first = [
        name for share in (ids(store, rank=r, world=world) for r in range(world)) for name in share[: done // world]
    ]
    rest = [
        name
        for r in range(resumed_world)
        for name in ids(store, rank=r, world=resumed_world, start=done // resumed_world)
    ]
    assert sorted(first + rest) == sorted(whole)


def test_streamed_samples_are_what_was_written(store: StoreReader) -> None:
    by_id = {sample.id: sample for sample in SAMPLES}
    for stored in store.stream("train", seed=0, epoch=0):
        aux, final = states(by_id[stored.id])
        assert torch.equal(stored.aux_hidden_states, aux) and torch.equal(stored.final_hidden_states, final)
        assert stored.source == by_id[stored.id].source


def test_bf16_tensors_are_views_into_the_shard(store: StoreReader) -> None:
    ref = next(ref for ref in store.samples() if ref.supervised)
    one, other = store.read(ref.sample_id), store.read(ref.sample_id)
    assert one.aux_hidden_states.data_ptr() == other.aux_hidden_states.data_ptr()
    assert one.final_hidden_states.data_ptr() == other.final_hidden_states.data_ptr()


def test_streaming_a_large_store_takes_little_memory(tmp_path: Path) -> None:
    """250 MB of states in an address space without the room for them: 8 shards of 8 MB are mapped at most."""
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import resource, torch
from helpers_store import make_manifest, make_samples, write_store
from eyas.store.reader import StoreReader
torch.set_num_threads(1)
samples = make_samples(160, longest=128)
hidden = 4096
write_store({str(tmp_path / "store")!r}, samples, make_manifest(shard_bytes=8_000_000, hidden=hidden), hidden=hidden)
store = StoreReader({str(tmp_path / "store")!r})
total = sum(size for name, size in store.files.sizes().items())
next(store.stream("train", seed=0, epoch=0))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
room = used + 140_000_000
assert total > 220_000_000, total
resource.setrlimit(resource.RLIMIT_AS, (room, room))
print(sum(sample.aux_hidden_states[0, 0, 0].item() != 9 for sample in store.stream(None, seed=0, epoch=0)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "160"
