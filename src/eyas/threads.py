"""How many threads torch computes with, for a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(most: int) -> Iterator[None]:
    """At most so many in the calling thread and in those that are begun within, each of which has its own; torch takes
    one for each core, and those that wait spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, most))
    try:
        yield
    finally:
        torch.set_num_threads(before)
