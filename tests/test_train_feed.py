"""What a step is made of: the schedule beside a naive one, rows beside the plain form, and a feed that keeps ahead."""

import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_drafter import make_drafter
from helpers_drafter import make_samples as make_masked
from helpers_store import VOCAB, make_manifest, make_samples, write_store
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafter.align import IntArray
from eyas.drafter.pack import fill_packs, pack_samples
from eyas.errors import CorruptStore
from eyas.settings import Train
from eyas.store.reader import StoreReader
from eyas.train.argmax import TargetArgmax, load_or_make
from eyas.train.batch import Schedule
from eyas.train.feed import AHEAD, Feed, Row, RowMaker, tensors_of
from eyas.train.loss import pack_loss
from eyas.train.parallel import Parallel

CPU = torch.device("cpu")


def stub_reader(lengths: list[int], supervised: list[int]) -> Any:
    """Lengths in an order of its own for each epoch, as StoreReader gives them."""

    def order(split: str, seed: int, epoch: int) -> IntArray:
        return np.random.default_rng([seed, epoch]).permutation(len(lengths))

    return SimpleNamespace(rows=SimpleNamespace(tokens=np.array(lengths), supervised=np.array(supervised)), order=order)


def alone() -> Parallel:
    return Parallel(Train(device="cpu"), CPU, None)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    budget=st.integers(8, 128),
    accumulation=st.integers(1, 5),
    epochs=st.sampled_from([0.3, 1.0, 2.0, 3.5]),
    data=st.data(),
)
def test_steps_take_the_samples_that_a_naive_schedule_gives_them(
    lengths: list[int], budget: int, accumulation: int, epochs: float, data: st.DataObject
) -> None:
    reader = stub_reader(lengths, [data.draw(st.integers(0, length)) for length in lengths])
    table = Train(batch_tokens=budget, accumulation=accumulation, epochs=epochs, seed=3)
    schedule = Schedule(reader, table)

    wanted = max(1, round(len(lengths) * epochs))
    order = np.concatenate([reader.order("train", 3, epoch) for epoch in range(4)])[:wanted]
    ends = np.cumsum(fill_packs([lengths[row] for row in order], budget))
    packs = np.split(order, ends[:-1])
    naive = [np.concatenate(packs[at : at + accumulation]) for at in range(0, len(packs), accumulation)]

    steps = list(schedule.from_step(0))
    assert schedule.steps == len(steps) == len(naive)
    for step, rows in zip(steps, naive, strict=True):
        assert sorted(np.concatenate(step.rows)) == sorted(rows)
        assert step.tokens == sum(lengths[row] for row in rows)
        assert step.samples == len(rows)
        assert step.first_sample == sum(map(len, naive[: step.number])) == schedule.samples_before(step.number)
        assert schedule.tokens_before(step.number) == sum(each.tokens for each in steps[: step.number])
        longest = max(lengths[row] for row in rows)
        assert all(sum(lengths[row] for row in each) <= max(budget, longest) for each in step.rows)
    later = data.draw(st.integers(0, len(steps) - 1))
    for one, other in zip(steps[later:], schedule.from_step(later), strict=True):
        assert all(np.array_equal(*pair) for pair in zip(one.rows, other.rows, strict=True))


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), world=st.integers(1, 5), rows=st.integers(1, 7))
def test_processes_share_a_step_and_take_part_equally_often(lengths: list[int], world: int, rows: int) -> None:
    table = Train(batch_tokens=64, accumulation=rows, epochs=1)
    for step in Schedule(stub_reader(lengths, lengths), table).from_step(0):
        shares = [step.share(rank, world) for rank in range(world)]
        assert {len(share) for share in shares} == {step.count(world)}
        together = [row for share in shares for row in share if row is not None]
        assert sorted(map(tuple, together)) == sorted(map(tuple, step.rows))


def test_rows_of_a_step_are_of_equal_work() -> None:
    """Lengths as chats have them, 8 rows of 8,192 tokens: the slowest row's work against the mean one's."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(4096, rng.lognormal(6.6, 0.9, 20_000)).astype(int)
    supervised = (lengths * rng.random(len(lengths))).astype(int)
    reader = stub_reader(lengths.tolist(), supervised.tolist())

    def excess(rows: list[IntArray]) -> float:
        work = [int((lengths + 28 * supervised)[row].sum()) for row in rows]
        return float(max(work) / np.mean(work))

    table = Train(batch_tokens=8192, accumulation=8, epochs=1)
    dealt = [excess(step.rows) for step in Schedule(reader, table).from_step(0)]
    single = Schedule(reader, table.model_copy(update={"accumulation": 1}))
    rows = [step.rows[0] for step in single.from_step(0)]
    in_order = [excess(rows[at : at + 8]) for at in range(0, len(rows), 8)]
    assert np.mean(in_order[:-1]) > 1.4
    assert np.mean(dealt[:-1]) < 1.05


def test_a_schedule_of_many_epochs_needs_the_memory_of_one() -> None:
    reader = stub_reader([100] * 50_000, [50] * 50_000)

    def peak(epochs: int) -> int:
        tracemalloc.start()
        schedule = Schedule(reader, Train(epochs=epochs))
        assert sum(step.samples for step in schedule.from_step(0)) == epochs * 50_000
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(12) < 1.1 * peak(2)


@pytest.fixture(params=["bf16", "fp8"])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> StoreReader:
    manifest = make_manifest(request.param, request.param)
    write_store(str(tmp_path / "store"), make_samples(30), manifest)
    return StoreReader(str(tmp_path / "store"))


def argmax_of(reader: StoreReader, tmp_path: Path) -> tuple[TargetArgmax, torch.Tensor]:
    lm_head = torch.randn(VOCAB, reader.manifest.target.hidden_size, generator=torch.Generator().manual_seed(1))
    return load_or_make(tmp_path / "argmax.safetensors", reader, lambda: lm_head, alone(), tmp_path), lm_head


def test_rows_are_what_packing_the_decoded_samples_gives(reader: StoreReader, tmp_path: Path) -> None:
    argmax, lm_head = argmax_of(reader, tmp_path)
    rows = reader.written()[[4, 1, 7, 20]]
    made = RowMaker(reader, argmax, 3, torch.float32, CPU).row(rows)
    samples = [reader.read(reader.rows.id(row)) for row in rows]
    plain = pack_samples(samples, 3, torch.float32, CPU)
    assert made.pack.ids == plain.ids
    assert all(torch.equal(*pair) for pair in zip(tensors_of(made.pack), tensors_of(plain), strict=True))
    expected = (plain.final[torch.from_numpy(plain.alignment.final_rows)] @ lm_head.T).argmax(-1)
    assert torch.equal(made.target_argmax, expected)


def test_the_argmax_is_read_back_for_its_store_only(reader: StoreReader, tmp_path: Path) -> None:
    made, _ = argmax_of(reader, tmp_path)
    rows = reader.written()
    assert all(len(made.of(row)) == reader.rows.supervised[row] for row in rows)

    def never() -> torch.Tensor:
        raise AssertionError("of no use where the cache is")

    cached = load_or_make(tmp_path / "argmax.safetensors", reader, never, alone(), tmp_path)
    assert all(torch.equal(cached.of(row), made.of(row)) for row in rows)
    write_store(str(tmp_path / "other"), make_samples(9, seed=5))
    with pytest.raises(AssertionError, match="of no use"):
        load_or_make(tmp_path / "argmax.safetensors", StoreReader(str(tmp_path / "other")), never, alone(), tmp_path)


def test_the_argmax_of_a_bf16_head_is_that_of_fp32_products(reader: StoreReader, tmp_path: Path) -> None:
    """Logits rounded to bf16 tie, and the first of the tied would be taken."""
    hidden = reader.manifest.target.hidden_size
    lm_head = torch.randn(20_000, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    made = load_or_make(tmp_path / "argmax.safetensors", reader, lambda: lm_head, alone(), tmp_path)
    rounded = 0
    for row in reader.written():
        final = reader.read(reader.rows.id(row)).final_hidden_states
        assert torch.equal(made.of(row), (final.float() @ lm_head.float().T).argmax(-1))
        rounded += int((made.of(row) != (final.bfloat16() @ lm_head.T).argmax(-1)).sum())
    assert rounded > 0


class Maker:
    """Makes rows slowly, and counts them."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.made = seconds, 0

    def row(self, samples: IntArray) -> Row:
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(self.seconds)
        self.made += 1
        row: Any = SimpleNamespace(samples=samples)
        return row


def run_feed(maker: Maker, step_s: float, steps: int) -> tuple[float, int, list[IntArray]]:
    """Seconds waited, rows made too far ahead at most, and what was given, over steps of two rows."""
    schedule = Schedule(
        stub_reader([10] * 2 * steps, [5] * 2 * steps), Train(batch_tokens=10, accumulation=2, epochs=1)
    )
    given, ahead = [], 0
    with Feed(schedule, 0, maker.row, alone()) as feed:
        for plan, rows in feed.steps():
            for row, expected in zip(rows, plan.rows, strict=True):
                time.sleep(step_s)
                assert row is not None
                assert np.array_equal(row.samples, expected)  # type: ignore[attr-defined]
                given.append(expected)
                ahead = max(ahead, maker.made - len(given))
        return feed.waited_s, ahead, given


def test_a_feed_keeps_ahead_by_so_much_and_no_more() -> None:
    waited, ahead, given = run_feed(Maker(0.0), 0.01, 10)
    assert len(given) == 20
    assert 0 < ahead <= AHEAD
    assert waited < 0.05


def test_waiting_for_data_is_measured() -> None:
    waited, _, _ = run_feed(Maker(0.05), 0.0, 6)
    assert 0.8 * 11 * 0.05 < waited < 2 * 12 * 0.05


def test_what_goes_wrong_in_the_thread_is_raised_where_the_row_is_taken(tmp_path: Path) -> None:
    write_store(str(tmp_path / "store"), make_samples(30))
    reader = StoreReader(str(tmp_path / "store"))
    argmax, _ = argmax_of(reader, tmp_path)
    shard = tmp_path / f"store/shards/{reader.rows.shard[reader.written('train')[0]]:06d}.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1  # its last sample's mask
    shard.write_bytes(raw)
    reader = StoreReader(str(tmp_path / "store"))
    schedule = Schedule(reader, Train(batch_tokens=16, epochs=1))
    maker = RowMaker(reader, argmax, 3, torch.float32, CPU)
    with Feed(schedule, 0, maker.row, alone()) as feed, pytest.raises(CorruptStore, match="has checksum"):
        for _, rows in feed.steps():
            list(rows)


def loss_of(recompute: bool) -> tuple[float, list[torch.Tensor], int]:
    """Loss, gradients, and bytes that the forward keeps for the backward."""
    drafter = make_drafter()
    drafter.recompute = recompute
    pack = pack_samples(make_masked([[0] * 5 + [1] * 60, [1] * 40]), 4, torch.float64, CPU)
    embedding, lm_head = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    argmax = torch.zeros(len(pack.alignment.teachers), dtype=torch.int64)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = pack_loss(drafter, embedding, lm_head[drafter.draft_ids], pack, argmax, steps=4, decay=0.8).total
    size = sum(kept.values())
    loss.backward()
    gradients = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
    return float(loss.detach()), gradients, size


def test_recomputing_keeps_less_and_changes_no_bit() -> None:
    (loss, gradients, size), (again, recomputed, smaller) = loss_of(False), loss_of(True)
    assert again == loss
    assert all(torch.equal(*pair) for pair in zip(gradients, recomputed, strict=True))
    rows, steps, intermediate, bytes_each = 63 + 38, 4, 32, 8
    assert size - smaller >= rows * steps * 3 * intermediate * bytes_each  # gate, up, and their product
