"""What is written is what is read: every encoding, any order, any pieces, any number of threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_store import VOCAB, make_manifest, make_samples, states, write_rows, write_store
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import ManifestMismatch, StoreError
from eyas.store.plan import deal
from eyas.store.reader import StoreReader
from eyas.store.verify import verify_store
from eyas.store.writer import BadStates, StoreWriter

torch.set_num_threads(1)


@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
@pytest.mark.parametrize("final_encoding", ["bf16", "fp8"])
def test_round_trip(tmp_path: Path, encoding: str, final_encoding: str) -> None:
    samples = make_samples(40)
    write_store(str(tmp_path / "store"), samples, make_manifest(encoding, final_encoding))
    reader = StoreReader(str(tmp_path / "store"))
    assert [ref.sample_id for ref in reader.samples()] == sorted(
        (sample.id for sample in samples), key=lambda name: (next(s.split for s in samples if s.id == name), name)
    )
    for sample in samples:
        stored, (aux, final) = reader.read(sample.id), states(sample)
        assert (stored.source, stored.split) == (sample.source, sample.split)
        np.testing.assert_array_equal(stored.token_ids.numpy(), sample.token_ids)
        np.testing.assert_array_equal(stored.loss_mask.numpy(), sample.loss_mask)
        for name, got, given_ in (("aux", stored.aux_hidden_states, aux), ("final", stored.final_hidden_states, final)):
            assert got.dtype == torch.bfloat16 and got.shape == given_.shape
            if (encoding if name == "aux" else final_encoding) == "bf16":
                assert torch.equal(got, given_)
            else:  # e4m3 has 3 bits of mantissa: at most 1/16 of the value, or of the smallest normal
                largest = given_.float().abs().amax(-1, keepdim=True)
                assert ((got.float() - given_.float()).abs() <= given_.float().abs() / 15 + largest / 448 / 64).all()
    report = verify_store(str(tmp_path / "store"))
    assert (report.faults, report.written, report.pending) == ([], 40, 0)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_order_and_pieces_give_the_same_store(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    samples = make_samples(8)
    folder = tmp_path_factory.mktemp("store")
    write_store(str(folder / "whole"), samples)
    pieces = []
    for sample in samples:
        total = len(sample.token_ids)
        cuts = sorted(data.draw(st.sets(st.integers(1, max(total - 1, 1)), max_size=3)) - {total})
        ranges = list(zip([0, *cuts], [*cuts, total], strict=True))
        again = data.draw(st.lists(st.sampled_from([(0, total), *ranges]), max_size=1))  # a retracted request
        pieces += [(sample, *part) for part in ranges + again]
    writer = StoreWriter.open(str(folder / "pieces"), make_manifest(), [s.entry for s in reversed(samples)])
    for sample, start, end in data.draw(st.permutations(pieces)):
        write_rows(writer, sample, start, end)
    assert writer.pending() == []
    writer.close()
    assert _files(folder / "whole") == _files(folder / "pieces")


def test_threads_may_share_a_writer(tmp_path: Path) -> None:
    samples = make_samples(60)
    write_store(str(tmp_path / "one"), samples)
    writer = StoreWriter.open(str(tmp_path / "many"), make_manifest(), [sample.entry for sample in samples])
    rows = [(sample, row) for row in range(12) for sample in samples if row < len(sample.token_ids)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda piece: write_rows(writer, piece[0], piece[1], piece[1] + 1), rows))
    writer.close()
    assert _files(tmp_path / "one") == _files(tmp_path / "many")


def test_resume_goes_on_with_the_uncommitted_shards(tmp_path: Path) -> None:
    samples, url = make_samples(30), str(tmp_path / "store")
    by_id = {sample.id: sample for sample in samples}
    writer = StoreWriter.open(url, make_manifest(), [sample.entry for sample in samples])
    first, second, *rest = writer.pending()
    for name in [*first, *second[:-1]]:
        write_rows(writer, by_id[name], 0, len(by_id[name].token_ids))
    assert writer.pending() == [second[-1:], *rest]
    writer.close()
    writer = StoreWriter.open(url, make_manifest(), [sample.entry for sample in samples])
    assert writer.pending() == [second, *rest]
    for name in sum(writer.pending(), []):
        write_rows(writer, by_id[name], 0, len(by_id[name].token_ids))
    writer.close()
    write_store(str(tmp_path / "whole"), samples)
    assert _files(tmp_path / "store") == _files(tmp_path / "whole")


def test_rejected_samples_are_zeroed_and_accounted_for(tmp_path: Path) -> None:
    samples, url = make_samples(20), str(tmp_path / "store")
    write_store(url, samples, rejected=[samples[3].id, samples[9].id])
    reader, report = StoreReader(url), verify_store(url)
    assert (report.faults, report.written, report.rejected, report.pending) == ([], 18, {"NaN": 2}, 0)
    assert len(reader.samples()) == 18
    with pytest.raises(StoreError, match="it was rejected: NaN"):
        reader.read(samples[3].id)


@pytest.mark.parametrize("value, fault", [(float("nan"), "NaN"), (float("inf"), "Inf"), (0.0, "only zeros")])
@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
def test_bad_states_are_refused_and_named(tmp_path: Path, encoding: str, value: float, fault: str) -> None:
    sample = next(s for s in make_samples(20) if s.loss_mask[2:].any() and len(s.token_ids) > 4)
    writer = StoreWriter.open(str(tmp_path / "store"), make_manifest(encoding, encoding), [sample.entry])
    aux, final = states(sample)
    aux[3, 1] = value
    with pytest.raises(BadStates, match=rf"sample {sample.id}, position 3: aux_hidden_states\[1\] has {fault}"):
        writer.write(sample, 0, aux, final)
    aux, final = states(sample)
    final[-1] = value
    last = int(np.flatnonzero(sample.loss_mask)[-1])
    with pytest.raises(BadStates, match=f"position {last}: final_hidden_states has {fault}"):
        writer.write(sample, 0, aux, final)
    writer.reject(sample.id, fault)
    writer.close()
    assert verify_store(str(tmp_path / "store")).rejected == {fault: 1}


def test_another_manifest_or_plan_is_refused_naming_both_values(tmp_path: Path) -> None:
    samples, url = make_samples(10), str(tmp_path / "store")
    write_store(url, samples)
    entries = [sample.entry for sample in samples]
    with pytest.raises(ManifestMismatch, match=r"aux_layer_ids is \[2, 4, 5\] in the store\nexpected: \[1, 4, 5\]"):
        StoreWriter.open(url, make_manifest(aux_layer_ids=[1, 4, 5]), entries)
    with pytest.raises(ManifestMismatch, match="encoding is 'bf16' in the store\nexpected: 'fp8'"):
        StoreWriter.open(url, make_manifest("fp8"), entries)
    with pytest.raises(ManifestMismatch, match="plan.samples is 10 in the store\nexpected: 9"):
        StoreWriter.open(url, make_manifest(), entries[:9])


def test_token_counts(tmp_path: Path) -> None:
    samples = make_samples(50)
    write_store(str(tmp_path / "store"), samples)
    reader = StoreReader(str(tmp_path / "store"))
    train = [sample for sample in samples if sample.split == "train"]
    naive = np.bincount(np.concatenate([s.token_ids[s.loss_mask] for s in train]), minlength=VOCAB)
    np.testing.assert_array_equal(reader.token_counts("train"), naive)


def test_the_plan_does_not_depend_on_the_order_of_samples() -> None:
    samples = make_samples(50)
    one, other = (deal([s.entry for s in order], make_manifest()) for order in (samples, samples[::-1]))
    assert one.table.equals(other.table)
    for shard in range(one.shards):
        assert len(set(one.table["split"].to_pylist()[one.rows(shard).start : one.rows(shard).stop])) == 1
    sizes = [one.layout(shard).size for shard in range(one.shards)]
    assert max(sizes) < 2048 + 1024 and np.mean(sizes) > 1024


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
