"""The training loop, survivable at every step.

One loop for every device. Order of samples, packs and learning rate follow from the recipe and the store alone, so a
resumed run goes on exactly where its checkpoint stands, bit for bit on the CPU with the same number of threads.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from eyas import fs
from eyas.data.tokens import Tokens
from eyas.drafter import fusing
from eyas.drafter.pack import Pack, Stored, fill_packs, pack_samples
from eyas.drafter.target import load_target_head
from eyas.drafter.walk import Acceptance, replay
from eyas.engine.local import find_device
from eyas.errors import Interrupted, TrainError
from eyas.progress import Progress, say
from eyas.record import Inputs, Record, changed_input
from eyas.run import Run
from eyas.signals import Stop, stop_on_signals
from eyas.stages import Result
from eyas.store.reader import StoreReader
from eyas.target import load_target
from eyas.train.argmax import load_or_make
from eyas.train.batch import make_schedule, stream_from
from eyas.train.beginning import begin, describe_head
from eyas.train.checkpoint import latest, load_checkpoint, save_checkpoint
from eyas.train.flops import peak_flops, step_flops
from eyas.train.log import LOG_EVERY, TrainLog
from eyas.train.loss import PackLoss, pack_loss, row_losses
from eyas.train.optim import learning_rate, make_optimizer, step_unless
from eyas.train.patience import Patience
from eyas.train.watch import Anomaly, Meter, StepSums, Watch, find_guilty


class Trainer:
    """Everything that a run of training holds; made from the run's files alone."""

    def __init__(self, run: Run, inputs: Inputs) -> None:
        self.run, self.table = run, run.recipe.train
        self.device = find_device(self.table.device)
        fusing.enable(self.table.compile)
        self.dtype = torch.bfloat16 if self.table.precision == "bf16" else torch.float32
        target = load_target(run.recipe.target)
        self.reader = StoreReader(run.store_url)
        self.reader.check_target(
            target,
            target.aux_layer_ids(run.recipe.drafter.aux_layer_ids),
            target.tokenizer_digest,
            Tokens(run.tokens_dir).manifest["template_digest"],
        )
        self.inputs = inputs | {"store": self.reader.digest}
        if not self.reader.samples("train"):
            raise TrainError(f"{run.store_url}: no training samples", cause="every sample is held out or was rejected")
        self.head = load_target_head(target, torch.float32, self.device)
        self.beginning = begin(run.recipe, target, self.reader, self.head)
        self.drafter = self.beginning.drafter.to(self.device)
        self.drafter.lm_head.weight.requires_grad_(not self.table.freeze_lm_head)
        self.optimizer = make_optimizer(self.drafter, self.table)
        self.watch, self.patience = Watch(self.device), Patience(self.table.patience)
        self.lm_head_draft = self.head.lm_head[self.drafter.draft_ids].to(self.dtype)
        self.embedding = self.head.embedding.to(self.dtype)
        self.schedule = make_schedule(
            self.reader,
            seed=self.table.seed,
            epochs=self.table.epochs,
            batch_tokens=self.table.batch_tokens,
            accumulation=self.table.accumulation,
        )

    def train(self) -> Result:
        """All steps; saves on a signal, at every checkpoint_every-th step and at the end."""
        first, steps = self._resume(), self.schedule.steps
        cache = self.run.train_dir / "target_argmax.safetensors"
        self.argmax = load_or_make(cache, self.reader, self.head, self.run.logs_dir)
        heldout = self._heldout_packs()
        if self.table.patience and not heldout:
            raise TrainError(
                f"train.patience = {self.table.patience}, but {self.run.store_url} has none held out",
                next="--set train.patience=0, or prepare again with data.heldout_fraction > 0",
            )
        samples = stream_from(self.reader, seed=self.table.seed, consumed=self.schedule.samples_before(first))
        acceptance = Acceptance.none(self.run.recipe.evaluate.drafts)
        meter = Meter(self.device, peak_flops(self.device, self.dtype))
        with (
            TrainLog(self.run.logs_dir, first, tensorboard=self.table.tensorboard) as log,
            Progress("train", steps, "steps", self.run.logs_dir, done=first) as progress,
            stop_on_signals("this step") as stop,
        ):
            done, shown = first, ""
            while done < steps and not self.patience.exhausted:
                sums = self._step(done, samples)
                done += 1
                meter.add(sums)
                logs, measures = (done % every == 0 or done == steps for every in (LOG_EVERY, self.table.eval_every))
                saves = done % self.table.checkpoint_every == 0 or done == steps or stop.signum is not None
                pauses = logs or measures or saves
                if pauses:
                    meter.settle()
                    self._refuse_anomaly(self.watch.check())
                if logs:
                    figures = sums.read()
                    log.write({"step": done} | meter.as_json() | figures.as_json())
                    shown = f"loss {figures.loss:.3f}, {meter.tokens_per_s:,.0f} tokens/s, "
                if measures:
                    acceptance = self._measure(heldout)
                    log.write({"step": done, "heldout": acceptance.as_json()})
                    saves = self.patience.saw(done, acceptance) or self.patience.exhausted or saves
                progress.advance(1, f"{shown}held-out {acceptance.length:.3f}")
                if saves:
                    log.sync()
                    self._save(done)
                self._maybe_stop(stop, done)
                if pauses:
                    meter.go()
        return self._result(meter, acceptance)

    def _resume(self) -> int:
        """Load the newest checkpoint; returns the number of finished steps."""
        fs.sweep_partials(self.run.train_dir)
        folder = latest(self.run.train_dir)
        if folder is None:
            return 0
        state = load_checkpoint(folder, self.drafter, self.optimizer)
        change = changed_input(Record("train", state["inputs"], "", {}, 0), self.inputs)
        if change:
            raise TrainError(
                f"{folder} was trained with other inputs: {change}",
                cause="the recipe, the target or the store changed while training was unfinished",
                next=f"{self.run.command('train', '--redo')}   # starts again; or undo the change to go on",
            )
        self.patience = Patience(self.table.patience, **state.get("patience", {}))
        say(f"train: going on from {folder.name} of {self.schedule.steps}")
        return int(state["step"])

    def _step(self, step: int, samples: Iterator[Stored]) -> StepSums:
        """One optimizer step over its packs."""
        taken = [self._pack(list(islice(samples, count))) for count in self.schedule.step(step)]
        tokens = sum(len(pack.token_ids) for pack in taken)
        lr = learning_rate(step, self.schedule.steps, self.table)
        # Samples with fewer than two supervised tokens in a row train nothing; a step of such alone moves nothing.
        packs = [pack for pack in taken if pack.sequences]
        if not packs:
            return StepSums.of_nothing(self.table.ttt_steps, lr, tokens)
        sequences = sum(pack.sequences for pack in packs)
        losses = []
        for pack in packs:
            losses.append(self._loss(pack))
            (losses[-1].total / sequences).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.table.clip)
        loss, per_step, hits, rows = (
            torch.stack([getattr(each, name).detach() for each in losses]).sum(0)
            for name in ("total", "per_step", "hits", "rows")
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        held = self.watch.guard(step, loss, norm, [sample_id for pack in packs for sample_id in pack.ids])
        step_unless(held, self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        trained_head = not self.table.freeze_lm_head
        flops = sum(step_flops(self.drafter.config, pack, trained_head=trained_head) for pack in packs)
        return StepSums(loss / sequences, per_step / sequences, hits, rows, norm, lr, tokens, flops)

    def _refuse_anomaly(self, anomaly: Anomaly | None) -> None:
        """Save the weights as they were before the bad step, and name the samples that made it."""
        if anomaly is None:
            return
        kept = self.run.train_dir / f"step-{anomaly.step}"
        if anomaly.step and not kept.exists():
            self._save(anomaly.step)
        guilty = find_guilty(self.reader, anomaly.sample_ids, self._is_finite)
        raise TrainError(
            f"step {anomaly.step + 1}: loss {anomaly.loss}, gradient norm {anomaly.grad_norm}; samples "
            + ", ".join(guilty),
            expected="finite numbers",
            cause="states that are finite but far too large for these samples, or a learning rate that is too high",
            next=f"{self.run.command('verify', '--redo')}   # then lower train.lr"
            + (f"; the weights before that step are in {kept} (train.start takes them)" if anomaly.step else ""),
        )

    def _is_finite(self, sample: Stored) -> bool:
        """Whether one sample alone gives a finite loss and gradient with the weights as they are."""
        pack = self._pack([sample])
        if not pack.sequences:
            return True
        loss = self._loss(pack).total
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.drafter.parameters() if p.grad is not None])
        self.optimizer.zero_grad(set_to_none=True)
        return bool(torch.isfinite(loss + norm))

    def _pack(self, samples: list[Stored]) -> Pack:
        return pack_samples(samples, self.table.ttt_steps, self.dtype, self.device)

    def _loss(self, pack: Pack) -> PackLoss:
        supervised = torch.cat([self.argmax.of(sample_id) for sample_id in pack.ids])
        at_teachers = supervised[torch.from_numpy(pack.alignment.final_rows)].to(self.device)
        steps, decay = self.table.ttt_steps, self.table.ttt_decay
        return pack_loss(
            self.drafter,
            self.embedding,
            self.lm_head_draft,
            pack,
            at_teachers,
            steps=steps,
            decay=decay,
            losses=row_losses(self.table),
        )

    def _heldout_packs(self) -> list[list[str]]:
        """Ids of the held-out samples measured while training, in packs."""
        refs = self.reader.samples("heldout")[: self.table.eval_samples]
        sizes = fill_packs([ref.tokens for ref in refs], self.table.batch_tokens)
        ids = iter([ref.sample_id for ref in refs])
        return [list(islice(ids, count)) for count in sizes]

    def _measure(self, packs: list[list[str]]) -> Acceptance:
        """The walk over held-out samples with the drafter as it is now."""
        drafts = self.run.recipe.evaluate.drafts
        total = Acceptance.none(drafts)
        for ids in packs:
            pack = pack_samples([self.reader.read(each) for each in ids], drafts, self.dtype, self.device)
            for acceptance in replay(self.drafter, self.embedding, pack, drafts):
                total.merge(acceptance)
        return total

    def _save(self, step: int) -> None:
        state = {"step": step, "samples": self.schedule.samples_before(step), "inputs": self.inputs}
        state["patience"] = self.patience.as_json()
        spare = self.run.train_dir / f"step-{self.patience.best_step}"
        keep = self.table.keep_checkpoints
        save_checkpoint(self.run.train_dir, self.drafter, self.optimizer, state, keep=keep, spare=spare)

    def _maybe_stop(self, stop: Stop, done: int) -> None:
        if stop.signum is not None and done < self.schedule.steps:
            raise Interrupted(
                stop.signum,
                f"train stopped after step {done} of {self.schedule.steps}, saved in {self.run.train_dir}/step-{done}",
                next=f"{self.run.command('run')}   # goes on from there",
            )

    def _result(self, meter: Meter, acceptance: Acceptance) -> Result:
        folder = latest(self.run.train_dir)
        assert folder is not None, "the last step always saves"
        last_step = int(folder.name[5:])
        if self.patience.best_step:
            folder = folder.with_name(f"step-{self.patience.best_step}")
        parameters = sum(parameter.numel() for parameter in self.drafter.parameters())
        counts: dict[str, Any] = {"steps": last_step, "tokens": meter.tokens, "parameters": parameters}
        if meter.busy_s:
            counts |= meter.as_json()
        if self.patience.limit:
            counts["early_stop"] = {"best_step": self.patience.best_step, "steps_planned": self.schedule.steps}
        counts |= {"draft_vocab_size": len(self.drafter.d2t), "draft_vocab_coverage": round(self.beginning.coverage, 5)}
        if self.beginning.started is not None:
            counts["start"] = self.beginning.started.as_json()
        if self.table.freeze_lm_head:
            counts["lm_head"] = describe_head(self.drafter, self.lm_head_draft, self.table)
        counts |= {"checkpoint": folder.name, "heldout": self.patience.best or acceptance.as_json()}
        return Result(fs.digest_file(folder / "model.safetensors"), counts)
