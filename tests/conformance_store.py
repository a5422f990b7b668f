"""What every place of a store must do, whatever holds the bytes. Subclasses say where by a fixture named `place`.

Files are read, changed and listed by `place` itself, past the code under test.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers_store import make_manifest, make_samples, states, write_rows, write_store

from eyas.errors import CorruptStore, ManifestMismatch, StoreError, StoreFull
from eyas.store.reader import StoreReader
from eyas.store.verify import repair_store, verify_store
from eyas.store.writer import StoreWriter

torch.set_num_threads(1)


@dataclass(frozen=True)
class Place:
    """An empty place for a store, and the way to its files that doesn't go through the store."""

    url: str
    get: Callable[[str], bytes]
    put: Callable[[str, bytes], None]
    names: Callable[[], set[str]]


class StoreSuite:
    """Tests that every backend passes."""

    @pytest.fixture
    def digest(self, tmp_path: Path) -> str:
        """Digest of the 40 samples' store, written locally in one go."""
        url = str(tmp_path / "reference")
        write_store(url, make_samples(40))
        return StoreReader(url).digest

    @pytest.mark.parametrize("encoding", ["bf16", "fp8"])
    def test_what_is_written_is_read(self, place: Place, encoding: str) -> None:
        samples = make_samples(40)
        write_store(place.url, samples, make_manifest(encoding))
        reader = StoreReader(place.url)
        assert {ref.sample_id for ref in reader.samples()} == {sample.id for sample in samples}
        for sample in samples:
            stored, (aux, final) = reader.read(sample.id), states(sample)
            assert stored.token_ids.tolist() == sample.token_ids.tolist()
            assert stored.loss_mask.tolist() == sample.loss_mask.tolist()
            assert torch.equal(stored.final_hidden_states, final)
            if encoding == "bf16":
                assert torch.equal(stored.aux_hidden_states, aux)
            else:
                assert (stored.aux_hidden_states.float() - aux.float()).norm() < 0.05 * aux.float().norm()
        report = verify_store(place.url)
        assert (report.faults, report.written, report.pending) == ([], 40, 0)

    def test_threads_any_order_and_pieces_give_the_same_store(self, place: Place, digest: str) -> None:
        samples = make_samples(40)
        rows = [(sample, row) for row in range(11, -1, -1) for sample in samples if row < len(sample.token_ids)]
        with StoreWriter.open(place.url, make_manifest(), [sample.entry for sample in samples]) as writer:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda piece: write_rows(writer, piece[0], piece[1], piece[1] + 1), rows))
            assert writer.pending() == []
        assert StoreReader(place.url).digest == digest

    def test_resume_goes_on_with_the_uncommitted_shards(self, place: Place, digest: str) -> None:
        samples = make_samples(40)
        by_id, entries = {sample.id: sample for sample in samples}, [sample.entry for sample in samples]
        with StoreWriter.open(place.url, make_manifest(), entries) as writer:
            first, second, *rest = writer.pending()
            for name in [*first, *second[:-1]]:
                write_rows(writer, by_id[name], 0, len(by_id[name].token_ids))
        assert {ref.sample_id for ref in StoreReader(place.url).samples()} == set(first)
        with StoreWriter.open(place.url, make_manifest(), entries) as writer:
            assert writer.pending() == [second, *rest]
            for name in sum(writer.pending(), []):
                write_rows(writer, by_id[name], 0, len(by_id[name].token_ids))
        assert StoreReader(place.url).digest == digest

    def test_rejected_samples_are_accounted_for(self, place: Place) -> None:
        samples = make_samples(20)
        write_store(place.url, samples, rejected=[samples[3].id, samples[9].id])
        report = verify_store(place.url)
        assert (report.faults, report.written, report.rejected, report.pending) == ([], 18, {"NaN": 2}, 0)
        with pytest.raises(StoreError, match="it was rejected: NaN"):
            StoreReader(place.url).read(samples[3].id)

    def test_a_stream_over_many_shards_can_be_taken_up_anywhere(self, place: Place) -> None:
        write_store(place.url, make_samples(120))
        reader = StoreReader(place.url)
        assert len(set(reader.rows.shard.tolist())) > 20  # more than a reader keeps open or fetched
        whole = [sample.id for sample in reader.stream(None, seed=1, epoch=0)]
        assert sorted(whole) == sorted(ref.sample_id for ref in reader.samples())
        later = [sample.id for sample in StoreReader(place.url).stream(None, seed=1, epoch=0, start=90)]
        assert later == whole[90:]

    def test_any_changed_file_is_found_and_made_good(self, place: Place, digest: str) -> None:
        samples = make_samples(40)
        by_id, entries = {sample.id: sample for sample in samples}, [sample.entry for sample in samples]
        write_store(place.url, samples)
        names = ["plan.parquet", "index.parquet", "shards/000001.safetensors", "shards/000002.parquet"]
        for name in names:
            raw = bytearray(place.get(name))
            raw[len(raw) * 2 // 3] ^= 16
            place.put(name, bytes(raw))
            report = verify_store(place.url)
            assert name in {fault.file for fault in report.faults}
            repair_store(place.url, report)
            with StoreWriter.open(place.url, make_manifest(), entries) as writer:
                for sample in sum(writer.pending(), []):
                    write_rows(writer, by_id[sample], 0, len(by_id[sample].token_ids))
            assert verify_store(place.url).faults == []
            assert StoreReader(place.url).digest == digest
        place.put("manifest.json", place.get("manifest.json").replace(b"LlamaFor", b"QwenFor"))
        with pytest.raises(CorruptStore, match=r"manifest\.json: digest"):
            StoreReader(place.url)

    def test_another_manifest_is_refused_naming_both_values(self, place: Place) -> None:
        samples = make_samples(5)
        write_store(place.url, samples)
        with pytest.raises(ManifestMismatch, match="encoding is 'bf16' in the store\nexpected: 'fp8'"):
            StoreWriter.open(place.url, make_manifest("fp8"), [sample.entry for sample in samples])
        write_store(place.url, samples)  # the refused writer has let go of it

    def test_a_foreign_place_is_left_alone(self, place: Place) -> None:
        with pytest.raises(StoreError, match=r"(?s)no such folder|no manifest.json.*nothing"):
            StoreReader(place.url)
        place.put("thesis.doc", b"x")
        for use in (lambda: write_store(place.url, make_samples(3)), lambda: StoreReader(place.url)):
            with pytest.raises(StoreError, match=r"no manifest\.json in it, but thesis\.doc"):
                use()
        assert place.names() == {"thesis.doc"}

    def test_one_process_writes_at_a_time(self, place: Place) -> None:
        entries = [sample.entry for sample in make_samples(5)]
        with (
            StoreWriter.open(place.url, make_manifest(), entries),
            pytest.raises(StoreError, match="another process is writing this store"),
        ):
            StoreWriter.open(place.url, make_manifest(), entries)
        StoreWriter.open(place.url, make_manifest(), entries).close()

    def test_the_budget_holds(self, place: Place) -> None:
        entries = [sample.entry for sample in make_samples(40)]
        with pytest.raises(StoreFull, match="at most 5"):
            StoreWriter.open(place.url, make_manifest(), entries, max_bytes=5000)

    def test_nothing_but_the_formats_files_lies_there(self, place: Place) -> None:
        write_store(place.url, make_samples(20))
        shards = {name for name in place.names() if name.startswith("shards/")}
        assert place.names() - shards == {"manifest.json", "plan.parquet", "index.parquet"}
        assert {name.rpartition(".")[2] for name in shards} == {"safetensors", "parquet"}
