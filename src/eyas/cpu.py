"""What torch is good at on this CPU, and how many threads it computes with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# torch's names for CPUs without instructions for products in bfloat16, such as AVX2 ones. Two cores of an AVX2-only
# EPYC, torch 2.13: 16 GFLOP/s where float32 makes 134, and Muon's products 3; the demo's capture made 29 to 73 and
# 440 to 530 tokens/s.
_SLOW = ("DEFAULT", "NO AVX", "AVX2")


def number_type(asked: torch.dtype, device: torch.device) -> torch.dtype:
    """What to make matrix products in: as asked, but float32, which is more exact, for bfloat16 on a CPU slow in it."""
    slow = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in _SLOW
    return torch.float32 if slow and asked == torch.bfloat16 else asked


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
