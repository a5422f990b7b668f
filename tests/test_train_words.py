"""What is said of processes that train together and were lost; with real ones in test_train_parallel.py."""

import pytest
import torch.distributed as dist

from eyas.errors import TrainError
from eyas.train import words as words_module
from eyas.train.words import Words

# As torch 2.13 said them of a stopped process: the sum that waited too long, and those behind it.
OF_GLOO = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation",
    "Application timeout caused pair closure",
]


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Words:
    """Those of rank 0 of two; rank 1 is silent."""
    monkeypatch.setattr(words_module, "_TELL_S", 0)
    return Words(dist.HashStore(), 0, 2, 3)


@pytest.mark.parametrize("text", OF_GLOO)
def test_every_error_of_gloo_tells_of_the_others(words: Words, text: str) -> None:
    with pytest.raises(TrainError) as caught, words.telling():
        raise RuntimeError(text)
    assert "no word from rank 1" in str(caught.value) and "train.timeout_s = 3 s" in str(caught.value)


def test_an_own_error_is_not_blamed_on_the_others(words: Words) -> None:
    with pytest.raises(RuntimeError, match="out of memory"), words.telling():
        raise RuntimeError("CUDA out of memory")
