"""A store written from states that lie on a GPU, as the local engine hands them in there. Run by `make test-gpu`."""

from pathlib import Path

import pytest
import torch
from helpers_store import make_manifest, make_samples, states

from eyas.store.account import relative_error
from eyas.store.reader import StoreReader
from eyas.store.writer import StoreWriter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
def test_states_on_the_gpu_are_stored(encoding: str, tmp_path: Path) -> None:
    samples, url = make_samples(20, longest=60), str(tmp_path / "store")
    with StoreWriter.open(url, make_manifest(encoding, encoding), [sample.entry for sample in samples]) as writer:
        for sample in samples:
            writer.write(sample, 0, *(part.cuda() for part in states(sample)))
    store = StoreReader(url)
    tolerance = {"rtol": 0, "atol": 0} if encoding == "bf16" else {"rtol": 1 / 16, "atol": 0.02}
    for sample in samples:
        aux, final = states(sample)
        stored = store.read(sample.id)
        torch.testing.assert_close(stored.aux_hidden_states, aux, **tolerance)
        torch.testing.assert_close(stored.final_hidden_states, final, **tolerance)
    if encoding == "fp8":
        assert all(0.01 < value < 0.04 for part in relative_error(store).values() for value in part)
