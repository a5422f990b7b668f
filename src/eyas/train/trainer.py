"""The training loop, survivable at every step.

One loop for every device and any number of processes. Order of samples, packs and learning rate follow from the recipe
and the store alone, so a resumed run goes on exactly where its checkpoint stands: bit for bit on the CPU with the same
number of threads and processes, and at the same samples with any other.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas import checkpoint, fs
from eyas.cpu import number_type
from eyas.data.tokens import Tokens
from eyas.drafter.eagle3 import Drafter
from eyas.drafter.pack import group
from eyas.drafter.saved import newest, read_shape, step_of
from eyas.drafter.target import load_target_head
from eyas.drafter.walk import Acceptance, replay
from eyas.errors import Interrupted, TrainError
from eyas.progress import Progress, say
from eyas.record import Inputs, Record, changed_input
from eyas.run import Run
from eyas.signals import SIGNALS, Stop, stop_on_signals
from eyas.stages import Result
from eyas.store.reader import StoreReader
from eyas.target import load_target
from eyas.train import fusing
from eyas.train.anomaly import anomaly_told, memory_in_words
from eyas.train.argmax import cache_path, load_or_make
from eyas.train.batch import Schedule, StepPlan
from eyas.train.beginning import begin, describe_head
from eyas.train.checkpoint import load_checkpoint, read_state, save_checkpoint, sweep
from eyas.train.feed import Feed, Row, RowMaker
from eyas.train.flops import peak_flops
from eyas.train.log import LOG_EVERY, TrainLog
from eyas.train.loss import PackLoss, pack_loss, row_losses
from eyas.train.optim import learning_rate, make_optimizer
from eyas.train.parallel import Parallel
from eyas.train.patience import Patience
from eyas.train.ranks import launched
from eyas.train.step import Learner
from eyas.train.watch import Anomaly, Meter, StepSums, Watch


class Trainer:
    """Everything that a run of training holds; made from the run's files alone."""

    def __init__(self, run: Run, inputs: Inputs, parallel: Parallel) -> None:
        self.run, self.table, self.parallel, self.device = run, run.recipe.train, parallel, parallel.device
        parallel.refuse_idle(self.table.accumulation, run.command("train"))
        fusing.enable(self.table.compile)
        make_deterministic(self.table.deterministic)
        asked = torch.bfloat16 if self.table.precision == "bf16" else torch.float32
        self.dtype = number_type(asked, self.device)
        if self.dtype != asked and parallel.leads:
            say("train: float32 in the place of train.precision bf16, in which this CPU is slow")
        target = load_target(run.recipe.target)
        self.reader = StoreReader(run.store_url)
        self.reader.check_target(
            target,
            target.aux_layer_ids(run.recipe.drafter.aux_layer_ids),
            target.tokenizer_digest,
            Tokens(run.tokens_dir).manifest["template_digest"] if run.has_own_store else None,
        )
        self.inputs = inputs | {"store": self.reader.digest}
        parallel.same("recipe, target or store", fs.digest_json(self.inputs))
        if not self.reader.samples("train"):
            raise TrainError(f"{run.store_url}: no training samples", cause="every sample is held out or was rejected")
        # Of the target's V x H matrices none but the embedding stays: 2.3 GB each in bf16 at Kimi's shape.
        self.load_lm_head = lambda: checkpoint.read_float(target, "lm_head").to(self.device)
        head = load_target_head(target, None, self.device)
        self.beginning = begin(run.recipe, target, self.reader, head)
        self.drafter = self.beginning.drafter.to(self.device)
        self.drafter.lm_head.weight.requires_grad_(not self.table.freeze_lm_head)
        self.drafter.recompute = self.table.recompute
        parallel.place(self.drafter)
        self.optimizer = make_optimizer(self.drafter, self.table)
        self._refuse_long()
        self.learner = Learner(parallel, self.drafter, self._loss, self.optimizer, self.table)
        self.watch, self.patience = Watch(self.device), Patience(self.table.patience)
        self.lm_head_draft = head.lm_head[self.drafter.draft_ids].to(self.dtype)
        self.embedding = head.embedding.to(self.dtype)
        self.schedule = Schedule(self.reader, self.table)

    def _refuse_long(self) -> None:
        """Raises: TrainError where samples reach beyond the drafter's positions."""
        limit = self.drafter.config.max_position_embeddings
        lengths = self.reader.rows.tokens[self.reader.written()]
        long = lengths[lengths > limit]
        if len(long):
            anew = f"{self.run.command('run', '--redo', 'prepare')} --set data.max_tokens={limit}"
            raise TrainError(
                f"{self.run.store_url}: {len(long):,} of {len(lengths):,} samples are longer than {limit:,} tokens; "
                f"the longest has {long.max():,}",
                expected=f"at most the drafter's max_position_embeddings, {limit:,}",
                cause="an engine with a longer context than config.json says has captured them",
                next=anew if self.run.has_own_store else "import the store again without them, or mend config.json",
            )

    def train(self) -> Result:
        """All steps; saves on a signal, at every checkpoint_every-th step and at the end."""
        found, steps, world = self._resume(), self.schedule.steps, self.parallel.world
        first = found or 0
        cache = cache_path(self.run, self.reader)
        argmax = load_or_make(cache, self.reader, self.load_lm_head, self.parallel, self.run.logs_dir)
        self.rows = RowMaker(self.reader, argmax, self.table.ttt_steps, self.dtype, self.device)
        if self.table.patience and not self.reader.samples("heldout"):
            raise TrainError(
                f"train.patience = {self.table.patience}, but {self.run.store_url} has none held out",
                next="--set train.patience=0, or prepare again with data.heldout_fraction > 0",
            )
        acceptance, shown = Acceptance.none(self.run.recipe.evaluate.drafts), list[str]()
        peak = peak_flops(self.device, self.dtype)
        with (
            memory_in_words(self.device, self.table, self.run),
            Feed(self.schedule, first, self.rows.row, self.parallel) as feed,
            self._open_log(first) as log,
            Progress("train", steps, "steps", self.run.logs_dir, done=first) as progress,
            stop_on_signals("this step", forwarded=world > 1) as stop,
        ):
            meter = Meter(self.device, peak and peak * world)
            for plan, rows in feed.steps():
                if self.patience.exhausted:
                    break
                sums, signum = self._step(plan, rows, stop)
                done = plan.number + 1
                meter.add(sums)
                if plan.number == first and steps - first > 1:
                    self.parallel.settle()
                    meter.set_apart()
                    feed.waited_s = 0.0
                logs, measures = (done % every == 0 or done == steps for every in (LOG_EVERY, self.table.eval_every))
                saves = done % self.table.checkpoint_every == 0 or done == steps or signum is not None
                pauses = logs or measures or saves
                if pauses:
                    self.parallel.settle()
                    meter.settle()
                    self._refuse_anomaly(self.watch.check())
                if logs:
                    figures, waited = sums.read(), self.parallel.most(meter.share(feed.waited_s))
                    log({"step": done} | meter.as_json() | {"data_wait": round(waited, 4)} | figures.as_json())
                    shown = [f"loss {figures.loss:.3f}, {meter.tokens_per_s:,.0f} tokens/s, data wait {waited:.1%}"]
                if measures:
                    acceptance = self._measure()
                    log({"step": done, "heldout": acceptance.as_json()})
                    saves = self.patience.saw(done, acceptance) or self.patience.exhausted or saves
                heldout = [f"held-out {acceptance.length:.3f}"] if acceptance.verifications else []
                progress.advance(1, ", ".join([*shown, *heldout]))
                if saves:
                    self._save(done, plan.first_sample + plan.samples)
                self._maybe_stop(stop, signum, done)
                if pauses:
                    meter.go()
            if not acceptance.verifications:  # no step was left to do
                acceptance = self._measure()
            if not steps and found is None:  # train.epochs = 0: an existing drafter as it is
                self._save(0, 0)
        return self._result(meter, feed, acceptance)

    @contextmanager
    def _open_log(self, first: int) -> Iterator[Callable[[dict[str, Any]], None]]:
        """What takes lines for the log; nothing does on a process that does not lead."""
        if not self.parallel.leads:
            yield lambda line: None
            return
        with TrainLog(self.run.logs_dir, first, tensorboard=self.table.tensorboard) as self.log:
            yield self.log.write

    def _resume(self) -> int | None:
        """Load the newest checkpoint; returns the number of finished steps, None where there is no checkpoint."""
        if self.parallel.leads:
            sweep(self.run.train_dir)
        folder = newest(self.run.train_dir)
        self.parallel.same("newest checkpoint", folder.name if folder else "")
        if folder is None:
            return None
        state = read_state(folder)
        change = changed_input(Record("train", state["inputs"], "", {}, 0), self.inputs)
        if not change:  # another version of Eyas may have made another shape of the same inputs
            begun = Record("train", asdict(read_shape(folder)), "", {}, 0)
            change = changed_input(begun, asdict(self.drafter.config))
        step = int(state["step"])
        if not change and state["samples"] != self.schedule.samples_before(step):
            change = f"{state['samples']:,} samples in {step} steps are now {self.schedule.samples_before(step):,}"
        if change:
            raise TrainError(
                f"{folder} was trained with other inputs: {change}",
                cause="the recipe, the target or the store changed while training was unfinished",
                next=f"{self.run.command('train', '--redo')}   # starts again; or undo the change to go on",
            )
        load_checkpoint(folder, self.drafter, self.optimizer, self.parallel)
        self.patience = Patience(self.table.patience, **state.get("patience", {}))
        say(f"train: going on from {folder.name} of {self.schedule.steps}, after {state['samples']:,} samples")
        return step

    def _step(self, plan: StepPlan, rows: Iterator[Row | None], stop: Stop) -> tuple[StepSums, int | None]:
        """One optimizer step, and the signal that any process got until then."""
        ids = [self.reader.rows.id(row) for samples in plan.rows for row in samples]
        lr = learning_rate(plan.number, self.schedule.steps, self.table)
        said = [int(stop.signum == number) for number in SIGNALS]
        count = plan.count(self.parallel.world)

        def guard(loss: Tensor, norm: Tensor) -> Tensor:
            return self.watch.guard(plan.number, loss, norm, ids)

        done = self.learner.step(rows, count, lr, plan.tokens, guard, said)
        return done.sums, next((number for number, times in zip(SIGNALS, done.said, strict=True) if times), None)

    def _refuse_anomaly(self, anomaly: Anomaly | None) -> None:
        """Save the weights as they were before the bad step, and name the samples that made it."""
        if anomaly is None:
            return
        kept = self.run.train_dir / f"step-{anomaly.step}"
        # Rank 0's look decides for all: it may be done saving before another looks.
        (there,) = self.parallel.add([int(self.parallel.leads and kept.exists())])
        if anomaly.step and not there:
            self._save(anomaly.step, self.schedule.samples_before(anomaly.step))
        raise anomaly_told(anomaly, self.run, self.reader, self.rows, self.learner)

    def _loss(self, drafter: Drafter, row: Row) -> PackLoss:
        return pack_loss(
            drafter,
            self.embedding,
            self.lm_head_draft,
            row.pack,
            row.target_argmax,
            steps=self.table.ttt_steps,
            decay=self.table.ttt_decay,
            losses=row_losses(self.table),
        )

    def _measure(self) -> Acceptance:
        """The walk over held-out samples with the drafter as it is now, each process with a share of them."""
        drafts = self.run.recipe.evaluate.drafts
        refs = self.reader.samples("heldout")[: self.table.eval_samples]
        mine = group(refs, [ref.tokens for ref in refs], self.table.batch_tokens)[
            self.parallel.rank :: self.parallel.world
        ]
        packs = ([self.reader.read(ref.sample_id) for ref in chosen] for chosen in mine)
        total = Acceptance.none(drafts)
        with self.parallel.whole():
            for walked in replay(self.drafter, self.embedding, packs, drafts):
                total.merge(walked.acceptance)
        verifications, *accepted_at = self.parallel.add([total.verifications, *total.accepted_at.tolist()])
        return Acceptance(verifications, np.array(accepted_at))

    def _save(self, step: int, samples: int) -> None:
        state = {"step": step, "samples": samples, "inputs": self.inputs, "patience": self.patience.as_json()}
        spare = self.run.train_dir / f"step-{self.patience.best_step}"
        if self.parallel.leads:
            self.log.sync()
        save_checkpoint(
            self.run.train_dir,
            self.drafter,
            self.optimizer,
            state,
            self.parallel,
            keep=self.table.keep_checkpoints,
            spare=spare,
        )

    def _maybe_stop(self, stop: Stop, signum: int | None, done: int) -> None:
        """Leave after the save that a signal asked for, all processes with the same exit code."""
        if signum is not None and done < self.schedule.steps:
            stop.signum = signum
            again = self.run.command("run") if self.parallel.world == 1 else launched(self.run.command("train"))
            raise Interrupted(
                signum,
                f"train stopped after step {done} of {self.schedule.steps}, saved in {self.run.train_dir}/step-{done}",
                next=f"{again}   # goes on from there",
            )

    def _result(self, meter: Meter, feed: Feed, acceptance: Acceptance) -> Result:
        folder = newest(self.run.train_dir)
        assert folder is not None, "the last step always saves"
        last_step = step_of(folder)
        if self.patience.best_step:
            folder = folder.with_name(f"step-{self.patience.best_step}")
        parameters = sum(parameter.numel() for parameter in self.drafter.parameters())
        tokens = self.schedule.tokens_before(last_step)
        counts: dict[str, Any] = {"steps": last_step, "tokens": tokens, "parameters": parameters}
        if meter.busy_s:
            counts |= meter.as_json() | {"data_wait": round(meter.share(feed.waited_s), 4)}
        counts["processes"] = self.parallel.world
        if self.patience.limit:
            counts["early_stop"] = {"best_step": self.patience.best_step, "steps_planned": self.schedule.steps}
        counts |= {"draft_vocab_size": len(self.drafter.d2t), "draft_vocab_coverage": round(self.beginning.coverage, 5)}
        if self.beginning.started is not None:
            counts["start"] = self.beginning.started.as_json()
        if self.table.freeze_lm_head:
            with self.parallel.whole():
                counts["lm_head"] = describe_head(self.drafter, self.lm_head_draft, self.table)
        counts |= {"checkpoint": folder.name, "heldout": self.patience.best or acceptance.as_json()}
        return Result(fs.digest_file(folder / "model.safetensors"), counts)


def make_deterministic(on: bool) -> None:
    """Choose kernels whose sums always have one order (`train.deterministic`), for this process."""
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
    torch.use_deterministic_algorithms(on)
    # Filling new memory costs a pass over each tensor and helps only to find reads of what was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
