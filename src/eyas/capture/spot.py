"""Spot checks while capturing: do a sample's final states give the log-probabilities that the server itself gives?"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.data.tokens import Sample
from eyas.engine.compare import LOGPROB_LIMIT, Head, logprob_error
from eyas.engine.partial import Unchecked
from eyas.errors import EngineError
from eyas.progress import say
from eyas.target import Target

ROWS = 32  # last positions of a sample; a 128k vocabulary takes 0.1 to 0.3 s of CPU for them


@dataclass(frozen=True)
class SpotFigures:
    """What the checks of one capture came to.

    Attributes:
        samples: how many were checked.
        worst: the largest mean |difference| of log-probabilities of a sample.
        unchecked: why none could be checked; "" where they could.
    """

    samples: int
    worst: float
    unchecked: str


class SpotChecks:
    """Checks in a thread of its own, behind the capture. Use as a context manager; `check` now and then.

    Args:
        dtype: number type the server runs in.
        encoding: of the final states.
        unchecked: why checks are in vain (the server runs random weights), or "".
    """

    def __init__(self, target: Target, dtype: str, encoding: str, unchecked: str) -> None:
        self._target, self._dtype, self._limit = target, dtype, LOGPROB_LIMIT[encoding]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="eyas-spot")
        self._head: Head | None = None
        self._pending: list[Future[None]] = []
        self._samples, self._worst, self._unchecked = 0, 0.0, unchecked

    def __enter__(self) -> "SpotChecks":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def first_row(self, sample: Sample) -> int | None:
        """Position from which on final states and log-probabilities of a sample are needed; None: it isn't checked."""
        count = len(sample.token_ids)
        return None if self._unchecked or count < 2 else max(0, count - ROWS - 1)

    def submit(self, sample: Sample, final: Tensor, logprobs: Tensor) -> None:
        """Check a sample's last rows.

        Args:
            final: float32 [m + 1, H], its last states.
            logprobs: float32 [m], the server's log-probabilities of its last m tokens.
        """
        self._pending.append(self._pool.submit(self._compare, sample, final[:-1], logprobs))

    def check(self) -> None:
        """Raises EngineError where a check that is done has failed."""
        for done in [each for each in self._pending if each.done()]:
            self._pending.remove(done)
            done.result()

    def finish(self) -> SpotFigures:
        """Wait for all checks. Raises EngineError where one fails."""
        for pending in self._pending:
            pending.result()
        return SpotFigures(self._samples, self._worst, self._unchecked)

    def _compare(self, sample: Sample, final: Tensor, theirs: Tensor) -> None:
        if self._unchecked:
            return
        try:
            self._head = self._head or Head(self._target, self._dtype)
        except Unchecked as reason:
            self._unchecked = str(reason)
            say(f"capture: spot checks: unchecked: {reason}")
            return
        ours = self._head.logprobs(final, torch.from_numpy(sample.token_ids[-len(theirs) :]))
        error = logprob_error(ours, theirs)
        self._samples, self._worst = self._samples + 1, max(self._worst, error)
        if not error <= self._limit:
            told = ", ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(ours[-4:], theirs[-4:], strict=True))
            raise EngineError(
                f"sample {sample.id}: final states through the checkpoint's lm_head are off by {error:.4f} (mean of "
                f"{len(theirs)} tokens) from the server's log-probabilities, such as {told}",
                expected=f"at most {self._limit}, as at the server's self-test",
                cause="the server's states changed after its start: a kernel that fails under load, or faulty memory",
                next="eyas run RECIPE --redo capture   # what was captured since the start is doubtful",
            )
