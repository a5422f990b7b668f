"""200 kills of the writer in the test run; tests/crash_store.py says how, `make crash` does more of them."""

import torch
from crash_store import crash


def test_200_kills_lose_and_double_nothing() -> None:
    torch.set_num_threads(1)
    found = crash(200)
    assert found["kills"] >= 200
    assert (found["lost"], found["doubled"]) == (0, 0)
