"""Watching a run: what is logged, TensorBoard, rates, and the stop at states that are finite but far too large."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_capture import make_run, random_samples
from helpers_drafter import make_drafter, make_samples
from helpers_train import SETTINGS, capture_run, copy_of, weights
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.drafter.pack import pack_samples
from eyas.drafter.saved import newest
from eyas.errors import TrainError
from eyas.progress import Progress
from eyas.record import load_record, save_record
from eyas.run import Run, open_run
from eyas.settings import Train
from eyas.stages import run_stage
from eyas.store.reader import StoreReader
from eyas.store.writer import StoreWriter
from eyas.train import trainer as trainer_module
from eyas.train.flops import peak_flops, step_flops
from eyas.train.log import read_log, scalars
from eyas.train.optim import make_optimizer, step_unless
from eyas.train.step import Learner
from eyas.train.watch import Watch

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def captured(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture_run(tmp_path_factory.mktemp("captured"), tiny_target, count=20)


def test_each_line_says_rates_memory_and_every_step_k(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path, "train.epochs=6")
    record = run_stage(run, "train")
    lines = read_log(run.logs_dir / "train.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [*range(10, record.counts["steps"], 10), record.counts["steps"]]
    for line in steps:
        assert len(line["loss_per_step"]) == len(line["acceptance"]) == 3
        weighted = sum(loss * 0.8**k for k, loss in enumerate(line["loss_per_step"]))
        assert line["loss"] == pytest.approx(weighted, abs=1e-3)
        assert line["tokens_per_s"] > 0 and 0.05 < line["memory_gib"] < 64 and 0 <= line["data_wait"] <= 1
        assert "mfu" not in line  # a CPU's peak isn't known
    measured = [line["heldout"] for line in lines if "heldout" in line]
    assert [line["step"] for line in lines if "heldout" in line][:2] == [8, 16]
    assert all(len(each["acceptance_per_position"]) == 3 and each["verifications"] > 0 for each in measured)
    assert measured[-1] == record.counts["heldout"]


def test_the_progress_line_says_what_is_known(captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: dict[str, list[str]] = {}
    monkeypatch.setattr(
        Progress, "advance", lambda self, amount, note="": notes.setdefault(self.stage, []).append(note)
    )
    run_stage(copy_of(captured, tmp_path, "train.epochs=6", "train.eval_every=4"), "train")
    told = notes["train"]
    assert told[:3] == ["", "", ""]
    assert all(re.fullmatch(r"held-out 1\.\d+", note) for note in told[3:9])
    assert re.fullmatch(r"loss [\d.]+, [\d,]+ tokens/s, data wait [\d.]+%, held-out 1\.\d+", told[-1])


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads from a log folder."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {name: [(e.step, e.value) for e in accumulator.Scalars(name)] for name in accumulator.Tags()["scalars"]}


class Stopped(Exception):
    """Stands for a kill right after a step."""


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done = 0
    original = trainer_module.Trainer._step

    def counted(self: object, *arguments: object) -> object:
        nonlocal done
        if done == step:
            raise Stopped
        done += 1
        return original(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer_module.Trainer, "_step", counted)


def test_tensorboard_shows_what_the_log_says_also_after_a_kill(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "LOG_EVERY", 1)
    run = copy_of(captured, tmp_path, "train.tensorboard=true", "train.checkpoint_every=3")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(5, patch)  # steps 4 and 5 are done again
        run_stage(run, "train")
    run_stage(run, "train")
    expected: dict[str, list[tuple[int, float]]] = {}
    for line in read_log(run.logs_dir / "train.jsonl"):
        for name, value in scalars(line):
            expected.setdefault(name, []).append((line["step"], pytest.approx(value, rel=1e-5)))
    assert events(run.logs_dir / "tensorboard") == expected
    assert {"train/loss", "train/loss_per_step/2", "train/tokens_per_s", "heldout/acceptance_length"} <= expected.keys()
    run_stage(run, "train", redo=True)
    assert len(list((run.logs_dir / "tensorboard").iterdir())) == 1


def test_without_tensorboard_the_error_says_what_to_install(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(TrainError) as error:
        run_stage(copy_of(captured, tmp_path, "train.tensorboard=true"), "train")
    assert "pip install 'eyas[tensorboard]'" in error.value.next


class NoReads(TorchDispatchMode):
    """Fails where the host asks for a tensor's value: on a GPU it would wait there for all work so far."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a step read a value"
        return func(*args, **(kwargs or {}))


def test_a_step_reads_nothing_back(captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Learner.step
    watched = 0

    def step(self: Learner, *arguments: Any) -> Any:
        nonlocal watched
        watched += 1
        with NoReads():
            return original(self, *arguments)

    monkeypatch.setattr(Learner, "step", step)
    run_stage(copy_of(captured, tmp_path), "train")
    assert watched > 10
    with NoReads(), pytest.raises(AssertionError, match="a step read a value"):
        float(torch.ones(1))


@pytest.fixture(scope="module")
def poisoned(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A captured run with one training sample whose states are finite and huge: store and verify have no objection."""
    folder = tmp_path_factory.mktemp("poisoned")
    samples = random_samples([20 + 3 * i % 41 for i in range(20)])
    victim = samples[7]
    run = make_run(folder, tiny_target, samples, overrides=SETTINGS)
    original = StoreWriter.write

    def write(self: StoreWriter, sample: Any, start: int, aux: torch.Tensor, final: torch.Tensor) -> None:
        if sample.id == victim.id:
            aux = torch.sign(aux) * 3e38
        original(self, sample, start, aux, final)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreWriter, "write", write)
        run_stage(run, "capture")
    run_stage(run, "verify")
    return folder, victim.id


def bad_step(run: Run, victim: str) -> int:
    """Number of finished steps when the sample comes first."""
    from eyas.train.batch import Schedule

    reader = StoreReader(run.store_url)
    row = reader.rows.find(victim)
    for plan in Schedule(reader, run.recipe.train).from_step(0):
        if any(row in rows for rows in plan.rows):
            return plan.number
    raise AssertionError("the sample is in no step")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_huge_states_stop_training_with_the_weights_before_them(
    optimizer: str, precision: str, poisoned: tuple[Path, str], tmp_path: Path
) -> None:
    folder, victim = poisoned
    settings = [f"train.optimizer={optimizer}", f"train.precision={precision}", "train.checkpoint_every=1000"]
    run = copy_of(folder, tmp_path / "run", *settings)
    step = bad_step(run, victim)
    assert step > 0, "choose a sample that comes later"
    with pytest.raises(TrainError) as error:
        run_stage(run, "train")
    told = str(error.value)
    assert re.search(rf"step {step + 1}: loss \S+, gradient norm (nan|inf); samples {victim} ", told), told
    assert "(largest state 3e+38)" in told and told.count("largest state") == 1
    assert f"step-{step}" in error.value.next and "--redo capture" in error.value.next
    assert newest(run.train_dir) == run.train_dir / f"step-{step}"
    # Exactly what a run has that stops there.
    other = copy_of(folder, tmp_path / "other", *settings[:2], "train.checkpoint_every=1")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(step, patch)
        run_stage(other, "train")
    assert newest(other.train_dir) == other.train_dir / f"step-{step}"
    for name, tensor in weights(other).items():
        assert torch.equal(tensor, weights(run)[name]), name
    assert (run.train_dir / f"step-{step}" / "optimizer.safetensors").read_bytes() == (
        other.train_dir / f"step-{step}" / "optimizer.safetensors"
    ).read_bytes()
    assert load_record(run.dir, "train") is None


def test_a_learning_rate_that_is_too_high_names_all_samples_of_the_step(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path, "train.lr=1e30", "train.warmup=0")
    with pytest.raises(TrainError) as error:
        run_stage(run, "train")
    told = re.search(r"step (\d+): loss (\S+), gradient norm (\S+); samples (.+)", str(error.value))
    assert "after lowering train.lr" in error.value.next
    assert told and int(told[1]) > 1 and len(re.findall(r"[0-9a-f]{32} \(largest state", told[4])) > 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_held_back_changes_nothing(optimizer: str) -> None:
    """Neither weights nor moments nor counts; afterwards it goes on as if the step had never been."""
    table = Train(optimizer=optimizer, weight_decay=0.1)
    drafters = [make_drafter().float() for _ in range(2)]
    optimizers = [make_optimizer(drafter, table) for drafter in drafters]
    for number, scale in enumerate([1.0, np.nan, 2.0]):
        for drafter, which, takes in zip(drafters, optimizers, ("all", "good"), strict=True):
            watch = Watch(CPU)
            for i, parameter in enumerate(drafter.parameters()):
                generator = torch.Generator().manual_seed(100 * number + i)
                parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in drafter.parameters()])
            if takes == "all":
                step_unless(watch.guard(number, torch.zeros(()), norm, ["x"]), which)
            elif np.isfinite(scale):
                which.step()
    for (name, one), two in zip(drafters[0].named_parameters(), drafters[1].parameters(), strict=True):
        assert torch.equal(one, two), name
        for key, value in optimizers[0].state[one].items():
            assert torch.equal(value, optimizers[1].state[two][key]), (name, key)


def test_the_first_bad_step_is_told_and_holds_back_all_after_it() -> None:
    watch = Watch(CPU)
    losses = [1.0, 2.0, float("inf"), 3.0, float("nan")]
    held = [float(watch.guard(i, torch.tensor(loss), torch.tensor(1.0), [f"s{i}"])) for i, loss in enumerate(losses)]
    assert held == [0, 0, 1, 1, 1]
    found = watch.check()
    assert found is not None and (found.step, found.loss, found.sample_ids) == (2, float("inf"), ["s2"])
    assert Watch(CPU).check() is None


def naive_flops(drafter: Any, pack: Any, steps: int) -> float:
    """Row by row: each product that the maths asks for, as 2mkn, and its gradients."""
    c = drafter.config
    hidden, query, kv = c.hidden_size, c.num_attention_heads * c.head_dim, 2 * c.num_key_value_heads * c.head_dim
    a = pack.alignment
    forward = with_two = 0.0  # products whose input needs no gradient, and those where both factors do
    trained = [set(a.rows[step.row].tolist()) for step in a.steps]
    for _ in range(len(pack.token_ids)):
        forward += 2 * 3 * hidden * hidden + 2 * hidden * (query + kv)  # fc, embedding's half of q, k, v
        with_two += 2 * hidden * kv  # the feature's half of k, v at step 0
    head = 0.0
    for k in range(steps):
        for row in set().union(*trained[k:]):
            seen = min(row - int(a.start[row]) + 1 + k, c.sliding_window or row + steps)
            with_two += 2 * hidden * query + 2 * query * hidden + 3 * 2 * hidden * c.intermediate_size
            with_two += 2 * 2 * seen * query  # scores and their use
            with_two += 2 * hidden * kv if k else 0
        head += len(trained[k]) * 2 * hidden * c.draft_vocab_size
    teacher = len(a.teachers) * 2 * hidden * c.draft_vocab_size
    return 2 * forward + 3 * with_two + 3 * head + teacher


def test_flops_are_those_of_the_maths() -> None:
    drafter = make_drafter()
    masks = [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1]]
    pack = pack_samples(make_samples(masks), 3, torch.float64, CPU)
    whole = step_flops(drafter.config, pack, trained_head=True)
    assert whole == pytest.approx(naive_flops(drafter, pack, 3))
    windowed = make_drafter(sliding_window=4)
    less = step_flops(windowed.config, pack, trained_head=True)
    assert less == pytest.approx(naive_flops(windowed, pack, 3)) and less < whole
    assert step_flops(drafter.config, pack, trained_head=False) < whole


def test_peaks_are_known_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, names = torch.device("cuda"), iter(["NVIDIA H200", "NVIDIA H100 PCIe", "Some GPU"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: next(names))
    assert [peak_flops(cuda, torch.bfloat16) for _ in range(3)] == [9.89e14, 7.56e14, None]
    assert peak_flops(CPU, torch.bfloat16) is None and peak_flops(cuda, torch.float32) is None


def test_early_stop_keeps_the_best_which_is_what_is_exported(captured: Path, tmp_path: Path) -> None:
    """A learning rate that wrecks the drafter: the first measurement stays the best."""
    settings = [
        "train.epochs=30",
        "train.lr=0.05",
        "train.eval_every=4",
        "train.patience=3",
        "train.keep_checkpoints=1",
    ]
    run = copy_of(captured, tmp_path / "straight", *settings)
    record = run_stage(run, "train")
    lines = read_log(run.logs_dir / "train.jsonl")
    lengths = {line["step"]: line["heldout"]["acceptance_length"] for line in lines if "heldout" in line}
    best = max(lengths, key=lambda step: (lengths[step], -step))
    stopped = max(lengths)
    assert stopped - best == 12 and stopped < 60, "three measurements without a better one"
    assert record.counts["steps"] == stopped and record.counts["checkpoint"] == f"step-{best}"
    assert record.counts["early_stop"]["best_step"] == best
    assert record.counts["heldout"]["acceptance_length"] == lengths[best]
    assert {path.name for path in run.train_dir.glob("step-*")} == {f"step-{best}", f"step-{stopped}"}
    run_stage(run, "evaluate")
    exported = run_stage(run, "export")
    assert exported.counts["checkpoint"] == f"step-{best}"
    # A kill before the best, after it, and after the stop: the same end.
    killed = copy_of(captured, tmp_path / "killed", *settings, "train.checkpoint_every=1")
    for steps in (3, best, stopped - best - 4):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
            stop_after(steps, patch)
            run_stage(killed, "train")
    again = run_stage(killed, "train")
    assert again.output == record.output
    assert again.counts["early_stop"] == record.counts["early_stop"]


def test_lengths_of_unlike_chains_decide_nothing(captured: Path, tmp_path: Path) -> None:
    """With patience the best so far would be compared with walks of more drafts, which are longer."""
    patient = ["train.patience=3", "train.eval_every=4"]
    run = copy_of(captured, tmp_path / "patient", *patient)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        stop_after(5, patch)
        run_stage(run, "train")
    changed = open_run(tmp_path / "patient" / "recipe.toml", [*SETTINGS, *patient, "evaluate.drafts=5"])
    with pytest.raises(TrainError, match="evaluate.drafts was 3 and is now 5"):
        run_stage(changed, "train")
    # Without, they decide nothing, and a finished drafter does not depend on them.
    record = run_stage(copy_of(captured, tmp_path / "plain"), "train")
    assert run_stage(open_run(tmp_path / "plain" / "recipe.toml", [*SETTINGS, "evaluate.drafts=5"]), "train") == record


def test_patience_needs_held_out_samples(tiny_target: Path, tmp_path: Path) -> None:
    samples = [replace(sample, split="train") for sample in random_samples([20, 30, 40])]
    run = make_run(tmp_path, tiny_target, samples, overrides=[*SETTINGS, "train.patience=2"])
    for stage in ("capture", "verify"):
        run_stage(run, stage)
    with pytest.raises(TrainError, match="train.patience = 2"):
        run_stage(run, "train")


def test_a_run_starts_from_the_export_of_another(captured: Path, tmp_path: Path) -> None:
    """Trained, exported in both forms, taken over: its held-out acceptance is the exported drafter's."""
    first = copy_of(captured, tmp_path / "first", "train.epochs=6", "evaluate.decode_prompts=0", "export.dtype=float32")
    for stage in ("train", "evaluate", "export"):
        run_stage(first, stage)
    measured = json.loads((first.dir / "eval.json").read_text())["replay"]
    for form in ("flat", "speculators"):
        if form == "speculators":
            first = open_run(
                tmp_path / "first" / "recipe.toml",
                [
                    *SETTINGS,
                    "train.epochs=6",
                    "evaluate.decode_prompts=0",
                    "export.dtype=float32",
                    "export.form=speculators",
                ],
            )
            run_stage(first, "export", redo=True)
        start = f"train.start={first.export_dir}"
        # So small a rate moves nothing that fp32 would show.
        run = copy_of(captured, tmp_path / form, start, "train.lr=1e-30", "train.epochs=1", "evaluate.decode_prompts=0")
        record = run_stage(run, "train")
        left = {} if form == "flat" else {"embed_tokens.weight": "the target's is used"}
        assert record.counts["start"]["form"] == form and record.counts["start"]["left"] == left
        for name, tensor in weights(first).items():
            torch.testing.assert_close(weights(run)[name], tensor, rtol=0, atol=1e-20)
        run_stage(run, "evaluate")
        assert json.loads((run.dir / "eval.json").read_text())["replay"] == measured
        # With no epoch at all it is taken as it is, bit for bit, and exported again.
        as_it_is = copy_of(captured, tmp_path / f"{form}-0", start, "train.epochs=0", "export.dtype=float32")
        record = run_stage(as_it_is, "train")
        assert record.counts["steps"] == 0 and record.counts["checkpoint"] == "step-0"
        assert record.counts["heldout"]["verifications"] > 0
        for name, tensor in weights(first).items():
            assert torch.equal(weights(as_it_is)[name], tensor), name
        # Killed before its record was written, it goes on from the checkpoint that is there.
        (as_it_is.dir / "records" / "train.json").unlink()
        assert run_stage(as_it_is, "train").counts == record.counts
        save_record(as_it_is.dir, replace(record, stage="evaluate"))
        assert run_stage(as_it_is, "export").counts["checkpoint"] == "step-0"
    # Another drafter in that folder is another input.
    run_stage(first, "train", redo=True)
    assert record.inputs["start drafter"]
    with pytest.raises(TrainError, match=r"draft_vocab_size is 200; this run has 150"):
        run_stage(copy_of(captured, tmp_path / "other", start, "train.draft_vocab_size=150"), "train")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_stop_alike_at_huge_states(parallel: str, poisoned: tuple[Path, str], tmp_path: Path) -> None:
    """Only one of them has the bad sample; both hold the step back, and the weights before it are saved once."""
    folder, victim = poisoned
    more = ["train.accumulation=2", f"train.parallel={parallel}", "train.checkpoint_every=1000"]
    run = copy_of(folder, tmp_path, *more)
    step = bad_step(run, victim)
    assert step > 0
    options = [part for text in [*SETTINGS, *more] for part in ("--set", text)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    words += ["-m", "eyas", "train", str(tmp_path / "recipe.toml"), *options]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ran.returncode != 0
    assert re.search(rf"step {step + 1}: loss \S+, gradient norm (nan|inf); samples {victim} \(largest", ran.stderr)
    assert newest(run.train_dir) == run.train_dir / f"step-{step}"
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(run).values() if tensor.is_floating_point())
