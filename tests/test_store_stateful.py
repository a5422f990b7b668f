"""The store against a plain dict: any sequence of writes, rejections, kills, damage, repairs and resumes."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers_store import Sample, make_manifest, make_samples, scratch_folder, states, write_rows, write_store
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from eyas.store.reader import StoreReader
from eyas.store.verify import repair_store, verify_store
from eyas.store.writer import StoreWriter

torch.set_num_threads(1)
SAMPLES = make_samples(14)
MANIFEST = make_manifest(shard_bytes=1500)


class StoreMachine(RuleBasedStateMachine):
    """The model: `rows`, which rows of a sample were written; `rejected`, why; both forgotten for the samples of an
    uncommitted shard when the writer ends. `shards`: the ids of each shard, as planned."""

    @initialize()
    def begin(self) -> None:
        self.scratch = scratch_folder()
        self.url = str(self.scratch.__enter__() / "store")
        self.by_id = {sample.id: sample for sample in SAMPLES}
        self.rows: dict[str, set[int]] = {sample.id: set() for sample in SAMPLES}
        self.rejected: dict[str, str] = {}
        self._open()
        self.shards = self.writer.pending()

    def _open(self) -> None:
        self.writer = StoreWriter.open(self.url, MANIFEST, [sample.entry for sample in SAMPLES])

    def _settled(self, name: str) -> bool:
        return name in self.rejected or len(self.rows[name]) == len(self.by_id[name].token_ids)

    def _committed(self) -> list[list[str]]:
        return [ids for ids in self.shards if all(self._settled(name) for name in ids)]

    def _forget_uncommitted(self) -> None:
        committed = {name for ids in self._committed() for name in ids}
        for name in self.by_id.keys() - committed:
            self.rows[name] = set()
            self.rejected.pop(name, None)

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        sample: Sample = data.draw(st.sampled_from(SAMPLES))
        start = data.draw(st.integers(0, len(sample.token_ids) - 1))
        end = data.draw(st.integers(start + 1, len(sample.token_ids)))
        settled = self._settled(sample.id)
        write_rows(self.writer, sample, start, end)
        if not settled:
            self.rows[sample.id] |= set(range(start, end))

    @rule(shard=st.integers(0, 30))
    def write_a_shard(self, shard: int) -> None:
        for name in self.shards[shard % len(self.shards)]:
            if not self._settled(name):
                write_rows(self.writer, self.by_id[name], 0, len(self.by_id[name].token_ids))
                self.rows[name] = set(range(len(self.by_id[name].token_ids)))

    @rule(data=st.data(), reason=st.sampled_from(["NaN", "too late"]))
    def reject(self, data: st.DataObject, reason: str) -> None:
        committed = {name for ids in self._committed() for name in ids}
        name = data.draw(st.sampled_from(sorted(self.by_id)))
        if name not in committed:
            self.writer.reject(name, reason)
            self.rejected[name] = reason

    @rule()
    def close_and_resume(self) -> None:
        self.writer.close()
        self._forget_uncommitted()
        self._open()

    @rule()
    def be_killed_and_resume(self) -> None:
        self.writer.files.unlock()  # what the end of a process does; nothing else is
        self._forget_uncommitted()
        self._open()

    @precondition(lambda self: self._committed())
    @rule(data=st.data())
    def be_damaged_and_repaired(self, data: st.DataObject) -> None:
        self.writer.close()
        self._forget_uncommitted()
        ids = data.draw(st.sampled_from(self._committed()))
        path = Path(self.url) / f"shards/{self.shards.index(ids):06d}.safetensors"
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        report = verify_store(self.url)
        assert report.recapture == ids
        repair_store(self.url, report)
        for name in ids:
            self.rows[name] = set()
            self.rejected.pop(name, None)
        self._open()

    @invariant()
    def the_store_holds_what_the_dict_holds(self) -> None:
        if not hasattr(self, "shards"):
            return
        committed = self._committed()
        assert self.writer.pending() == [
            [name for name in ids if not self._settled(name)] for ids in self.shards if ids not in committed
        ]
        reader = StoreReader(self.url)
        held = {name for ids in committed for name in ids} - self.rejected.keys()
        assert {ref.sample_id for ref in reader.samples()} == held
        for name in held:
            stored, (aux, final) = reader.read(name), states(self.by_id[name])
            np.testing.assert_array_equal(stored.token_ids.numpy(), self.by_id[name].token_ids)
            np.testing.assert_array_equal(stored.loss_mask.numpy(), self.by_id[name].loss_mask)
            assert torch.equal(stored.aux_hidden_states, aux) and torch.equal(stored.final_hidden_states, final)

    def teardown(self) -> None:
        if not hasattr(self, "writer"):
            return
        self.writer.close()
        self._forget_uncommitted()
        self._open()
        for name in sum(self.writer.pending(), []):
            write_rows(self.writer, self.by_id[name], 0, len(self.by_id[name].token_ids))
        self.writer.close()
        report = verify_store(self.url)
        assert (report.faults, report.pending, sum(report.rejected.values())) == ([], 0, len(self.rejected))
        if not self.rejected:
            assert report.digest == undisturbed_digest()
        self.scratch.__exit__(None, None, None)


def undisturbed_digest(_known: list[str] = []) -> str:  # noqa: B006
    if not _known:
        folder = tempfile.mkdtemp()
        write_store(f"{folder}/store", SAMPLES, MANIFEST)
        _known.append(StoreReader(f"{folder}/store").digest)
        shutil.rmtree(folder)
    return _known[0]


StoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestStoreAgainstADict: Any = StoreMachine.TestCase
