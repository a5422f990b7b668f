"""What ends training before its time, in words: a step that is not finite, and a device that is too small."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from eyas.errors import TrainError
from eyas.run import Run
from eyas.settings import Train
from eyas.store.reader import StoredSample, StoreReader
from eyas.train.feed import RowMaker
from eyas.train.step import Learner
from eyas.train.watch import Anomaly

# No model's states are near this: the largest known, of single outlier channels, are about 1e5.
_TOO_LARGE = 1e10


@dataclass(frozen=True)
class Guilty:
    """The samples of a bad step that are bad by themselves.

    Attributes:
        named: each with its largest state; all of the step, without it, where none is bad alone.
        too_large: whether those states explain it.
    """

    named: list[str]
    too_large: bool


def find_guilty(reader: StoreReader, sample_ids: Sequence[str], is_finite: Callable[[StoredSample], bool]) -> Guilty:
    """Look at each sample of a bad step alone."""
    named, most = [], 0.0
    for sample_id in sample_ids:
        sample = reader.read(sample_id)
        if not is_finite(sample):
            largest = max(float(each.abs().max()) for each in (sample.aux_hidden_states, sample.final_hidden_states))
            named.append(f"{sample_id} (largest state {largest:.3g})")
            most = max(most, largest)
    return Guilty(named or list(sample_ids), most > _TOO_LARGE)


def anomaly_told(anomaly: Anomaly, run: Run, reader: StoreReader, rows: RowMaker, learner: Learner) -> TrainError:
    """The error that names the samples of a bad step, looked at one by one with the weights as they are before it."""

    def is_finite(sample: StoredSample) -> bool:
        """Whether the sample alone gives a finite loss and gradient."""
        row = rows.row(np.array([reader.rows.find(sample.id)]))
        if not row.pack.trained_at_0:
            return True
        sums = learner.parallel.backward(partial(learner.loss_and_sums, row), last=True)
        assert sums is not None
        norm = learner.parallel.clip(learner.table.clip)
        learner.optimizer.zero_grad(set_to_none=True)
        return bool(torch.isfinite(sums[0] + norm))

    guilty = find_guilty(reader, anomaly.sample_ids, is_finite)
    kept = run.train_dir / f"step-{anomaly.step}"
    before = f"; the weights before that step are in {kept} (train.start takes them)" if anomaly.step else ""
    if guilty.too_large:
        cause = "states that are finite, so that nothing refused them, but far too large"
        remedy = f"{run.command('run', '--redo', 'capture')}   # or leave their source out"
    else:
        cause = "a learning rate that is too high"
        remedy = f"{run.command('train', '--redo')}   # after lowering train.lr"
    return TrainError(
        f"step {anomaly.step + 1}: loss {anomaly.loss}, gradient norm {anomaly.grad_norm}; samples "
        + ", ".join(guilty.named),
        expected="finite numbers",
        cause=cause,
        next=remedy + before,
    )


@contextmanager
def memory_in_words(device: torch.device, table: Train, run: Run) -> Iterator[None]:
    """Raises: TrainError with the keys that memory goes by, where the device's is too small."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        smaller = f"--redo --set train.batch_tokens={table.batch_tokens // 2}"
        keeps = [] if table.recompute else ["--set train.recompute=true"]
        keeps += [] if table.parallel == "fsdp" else ["on several GPUs --set train.parallel=fsdp"]
        ways = [f"{', '.join(keeps)} (goes on from the newest checkpoint)"] if keeps else []
        raise TrainError(
            f"{device}: out of memory with packed rows of {table.batch_tokens:,} tokens ({str(error).splitlines()[0]})",
            cause="rows that are too long for this card, by train.batch_tokens or by one long sample",
            next=f"{run.command('train')} with one of: {'; '.join([*ways, f'{smaller} (starts again)'])}",
        ) from None
