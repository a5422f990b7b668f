"""Which of several processes this one is, as torchrun tells them. Without torch, for commands must answer at once."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from eyas import progress
from eyas.errors import EyasError, RecipeError


def rank() -> int:
    """Of this process; 0 where it is alone."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """Number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched(command: str) -> str:
    """`eyas ...` as torchrun starts it on this host."""
    return f"torchrun --nproc-per-node {os.environ.get('LOCAL_WORLD_SIZE', world())} -m {command}"


def refuse_ranks(command: str) -> None:
    """Raises: RecipeError where torchrun started more than one process for a command that knows nothing of others."""
    if world() > 1:
        raise RecipeError(
            f"eyas {command} was started as {world()} processes",
            expected="one process; only `eyas train` works with more",
            next=f"eyas {command} RECIPE   # then: torchrun --nproc-per-node {world()} -m eyas train RECIPE",
        )


@contextmanager
def following() -> Iterator[None]:
    """For a process that does not lead: silent, but for one line on an error; rank 0 explains what all of them meet."""
    progress.hush()
    try:
        yield
    except EyasError as error:
        sys.stderr.write(f"rank {rank()} stopped: {error.seen}\n")  # see eyas.cli
        sys.exit(error.exit_code)
