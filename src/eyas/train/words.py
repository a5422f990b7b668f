"""What processes that train together tell each other of their end, through the store that torchrun keeps for them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from eyas.errors import EyasError, Interrupted, TrainError

_TELL_S = 3  # for the others to say that they are alive, once one is missed
# torch raises gloo's errors as plain RuntimeErrors. Most begin with gloo's file and line; what the sums still under way
# say, once one of them has waited too long and closed the connection, does not (torch 2.13).
_OF_GLOO = ("gloo", "caused pair closure")


class Words:
    """Of one process, to and from the others.

    Args:
        store: torch.distributed's, shared by all; None for a process that is alone.
        timeout_s: how long the others are waited for, in words.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float) -> None:
        self._store, self._rank, self._world, self._timeout_s = store, rank, world, timeout_s

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Turn the loss of another process into words, and leave word of an own failure for the others."""
        try:
            yield
        except EyasError as error:
            if self._store is not None and not isinstance(error, _LostError | Interrupted):
                with suppress(dist.DistError):  # whoever carried the words is gone
                    self._store.set(f"fault {self._rank}", error.seen)
            raise
        except RuntimeError as error:
            of_others = isinstance(error, dist.DistError) or any(text in str(error) for text in _OF_GLOO)
            if self._world == 1 or not of_others:
                raise
            raise self.lost(str(error).split("] ", 1)[-1].split(". ")[0]) from error

    def lost(self, seen: str) -> TrainError:
        """The error for a process that ended or doesn't answer, with what it said last, if anything."""
        try:
            faults, silent = self._ask_others()
        except dist.DistError:
            faults, silent = {}, ["0, which carried the others' words"]
        told = [f"rank {each} stopped: {text}" for each, text in faults.items()]
        told += [f"no word from rank {', '.join(silent)}"] if silent else []
        return _LostError(
            f"rank {self._rank} lost the others ({seen})" + "".join(f"\n  {line}" for line in told),
            expected=f"every rank at each step, within train.timeout_s = {self._timeout_s:g} s",
            cause="" if faults else "a process was killed or hangs, or a host or its network is down",
            next="start the same command again: it goes on from the newest checkpoint",
        )

    def _ask_others(self) -> tuple[dict[int, str], list[str]]:
        """What the ranks that stopped said, and those that neither said so nor are still there."""
        self._store.set(f"alive {self._rank}", "")
        time.sleep(_TELL_S)
        ranks = range(self._world)
        faults = {each: self._store.get(f"fault {each}").decode() for each in ranks if self._has(f"fault {each}")}
        return faults, [str(each) for each in ranks if each not in faults and not self._has(f"alive {each}")]

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))


class _LostError(TrainError):
    """Another rank is gone: nothing that the others need to be told."""
