"""The train stage on GPUs: `make test-gpu`. What needs two of them is skipped where there is one."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from helpers_capture import make_run, random_samples
from helpers_ranks import copy_of, farthest, farthest_norm, finish, losses, torchrun
from helpers_store import VOCAB, make_manifest, make_samples, write_store
from helpers_tiny import make_tiny_target

from eyas.record import load_record
from eyas.run import Run
from eyas.settings import Train
from eyas.stages import run_stage
from eyas.store.reader import StoreReader
from eyas.train import loop
from eyas.train import trainer as trainer_module
from eyas.train.argmax import TargetArgmax, load_or_make
from eyas.train.feed import Feed, RowMaker, tensors_of
from eyas.train.parallel import Parallel, join
from eyas.train.trainer import Trainer

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS is used: equal workspaces, equal kernels
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
# 512 states, 8 heads of 64: what FlashAttention and the kernels take.
ON_GPU = {"device": "cuda", "precision": "bf16", "batch_tokens": "512", "draft_vocab_size": "200", "lr": "1e-3"}
EQUAL = ON_GPU | {"deterministic": "true"}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a run whose capture and verify are finished."""
    folder = tmp_path_factory.mktemp("captured")
    target = make_tiny_target(tmp_path_factory.mktemp("target"), hidden=512)
    run = make_run(folder, target, random_samples([60 + 7 * i % 90 for i in range(80)]), shard_bytes=1 << 20)
    run_stage(run, "capture")
    run_stage(run, "verify")
    return folder


@pytest.fixture(autouse=True)
def as_usual() -> Iterator[None]:
    """Deterministic kernels are a setting of the process."""
    yield
    trainer_module.make_deterministic(False)


@pytest.fixture(scope="module")
def straight(captured: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trained by one GPU, without a stop, with kernels whose sums have one order."""
    run = copy_of(captured, tmp_path_factory.mktemp("straight") / "run", **EQUAL, epochs="6")
    run_stage(run, "train")
    return run


class Stopped(Exception):
    """Stands for a kill right after a step."""


def die_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    original, done = Trainer._step, 0

    def counted(self: Trainer, *arguments: object) -> object:
        nonlocal done
        if done == steps:
            raise Stopped
        done += 1
        return original(self, *arguments)  # type: ignore[arg-type]

    patch.setattr(Trainer, "_step", counted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # of torch, where it is set
def test_the_host_waits_for_nothing_in_a_step(captured: Path, tmp_path: Path) -> None:
    run = copy_of(captured, tmp_path / "run", **ON_GPU, epochs="20")
    with join(run.recipe.train) as parallel:
        trainer = Trainer(run, loop.inputs(run), parallel)
        cache = run.train_dir / "a.safetensors"
        argmax = load_or_make(cache, trainer.reader, trainer.load_lm_head, parallel, tmp_path)
        maker = RowMaker(trainer.reader, argmax, trainer.table.ttt_steps, trainer.dtype, trainer.device)
        with Feed(trainer.schedule, 0, maker.row, parallel) as feed:
            steps = feed.steps()
            stop = trainer_module.Stop()
            for _ in range(8):  # kernels are compiled, memory is taken
                trainer._step(*next(steps), stop)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(8):
                    trainer._step(*next(steps), stop)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert trainer.watch.check() is None


@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
def test_rows_decoded_on_the_gpu_are_those_of_the_cpu(tmp_path: Path, encoding: str) -> None:
    write_store(str(tmp_path / "store"), make_samples(30), make_manifest(encoding, encoding))
    reader = StoreReader(str(tmp_path / "store"))
    counts = np.zeros(len(reader.rows), np.int64)
    counts[reader.written()] = reader.rows.supervised[reader.written()]
    argmax = TargetArgmax(torch.randint(VOCAB, (int(counts.sum()),), dtype=torch.int32), np.cumsum(counts))
    rows = reader.written()[[4, 1, 7, 20]]
    made, plain = (RowMaker(reader, argmax, 3, torch.float32, device).row(rows) for device in (CUDA, CPU))
    torch.cuda.synchronize()
    pairs = zip(tensors_of(made), tensors_of(plain), strict=True)
    assert all(torch.equal(one.cpu(), other) for one, other in pairs)


def test_the_argmax_of_a_bf16_head_is_that_of_exact_products(tmp_path: Path) -> None:
    """By tensor cores, with sums in fp32: it differs from fp64's at most where two logits are as good as equal."""
    write_store(str(tmp_path / "store"), make_samples(30), make_manifest("bf16", "bf16"))
    reader = StoreReader(str(tmp_path / "store"))
    hidden = reader.manifest.target.hidden_size
    lm_head = torch.randn(20_000, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    alone = Parallel(Train(device="cuda"), CUDA, None)
    made = load_or_make(tmp_path / "a.safetensors", reader, lambda: lm_head.to(CUDA), alone, tmp_path)
    for row in reader.written()[reader.rows.supervised[reader.written()] > 0]:
        logits = reader.read(reader.rows.id(row)).final_hidden_states.double() @ lm_head.double().T
        short = logits.max(-1).values - logits.gather(-1, made.of(row)[:, None])[:, 0]
        assert float(short.max()) <= 1e-5 * float(logits.abs().max())


def test_a_feed_hands_over_whole_rows(captured: Path, tmp_path: Path) -> None:
    """Its copies are done and its memory is its own, whatever the main stream still computes with earlier rows."""
    run = copy_of(captured, tmp_path / "run", **ON_GPU, epochs="10")
    reader = StoreReader(run.store_url)
    argmax = TargetArgmax(
        torch.zeros(int(reader.rows.supervised.sum()), dtype=torch.int32), np.cumsum(reader.rows.supervised)
    )
    parallel = Parallel(Train(), CUDA, None)
    maker = RowMaker(reader, argmax, 3, torch.bfloat16, CUDA)
    schedule = trainer_module.Schedule(reader, run.recipe.train)
    sums, threads = [], torch.get_num_threads()
    with Feed(schedule, 0, maker.row, parallel) as feed:
        assert torch.get_num_threads() <= 4, "copying threads that wait spin"
        for plan, rows in feed.steps():
            for row, samples in zip(rows, plan.rows, strict=True):
                assert row is not None
                busy = row.pack.aux.float()
                for _ in range(50):  # the row is still read when the next ones are made
                    busy = busy * 1.0
                sums.append((busy.double().sum(), samples))
            del row
    assert torch.get_num_threads() == threads
    for total, samples in sums:
        states = [reader.read(reader.rows.id(row)).aux_hidden_states.float().double().sum() for row in samples]
        assert float(total) == pytest.approx(float(sum(states)), rel=1e-9)


def test_resume_on_a_gpu_is_bit_equal_where_kernels_are_deterministic(
    captured: Path, tmp_path: Path, straight: Run
) -> None:
    run = copy_of(captured, tmp_path / "run", **EQUAL, epochs="6")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        die_after(7, patch)
        run_stage(run, "train")
    run_stage(run, "train")
    assert farthest(run, straight) == 0
    assert losses(run) == losses(straight)


def test_the_next_step_after_a_resume_is_the_same_with_any_kernels(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "LOG_EVERY", 1)
    runs = [copy_of(captured, tmp_path / name, **ON_GPU, epochs="4") for name in ("whole", "stopped")]
    run_stage(runs[0], "train")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        die_after(4, patch)  # right after the checkpoint of step 4
        run_stage(runs[1], "train")
    run_stage(runs[1], "train")
    whole, stopped = (losses(run) for run in runs)
    assert stopped[4] == pytest.approx(whole[4], rel=1e-3)


def test_recomputing_changes_no_bit(captured: Path, tmp_path: Path, straight: Run) -> None:
    run = copy_of(captured, tmp_path / "run", **EQUAL, epochs="6", recompute="true")
    run_stage(run, "train")
    assert farthest(run, straight) == 0


@two_gpus
def test_two_gpus_learn_what_one_does(captured: Path, tmp_path: Path, straight: Run) -> None:
    """Each holds the whole drafter: bit for bit, as the sum of two gradients has one order."""
    run = copy_of(captured, tmp_path / "run", **EQUAL, epochs="6")
    finish(torchrun(run, **EQUAL, epochs="6"))
    assert farthest(run, straight) == 0
    assert losses(run) == losses(straight)
    record = load_record(run.dir, "train")
    assert record is not None and record.counts["processes"] == 2


# FSDP gathers weights and sums gradients in fp32, as DDP does, and halves exactly: only the norm of the gradient,
# which is summed over shards, is rounded otherwise, by about an ulp, 2^-23, and with it the clipped gradient. bf16
# carries that on: a master that has moved by a share d of itself is cast to the next bf16 value with probability d /
# u, u = 2^-8, so the weights in products are off by sqrt(d u), and a step moves d by r sqrt(d u), r being the step's
# size in the weight's. After t steps d = (r t / 2)^2 u: with lr 1e-3, weights of 0.02 and a cosine's mean of 0.6, r is
# 0.03, and d 0.0013 after 39 steps. One process on a CPU, 45 steps of this shape, gradients times 1 + 2^-23 after
# clipping: 0.0018 (losses 7e-5), times 1 + 1e-5: 0.0018 (2e-4); the same in fp32, H 128: 1.3e-7 (0). Two gloo
# processes differed by 0.002 from one. Twice that is allowed; a row whose gradient counts 0.9 instead of 1 makes
# 0.019.
SHARDS_WEIGHTS, SHARDS_LOSS = 4e-3, 1e-3


@two_gpus
def test_two_gpus_with_shards_learn_what_one_does(captured: Path, tmp_path: Path, straight: Run) -> None:
    """But for the rounding of the gradient's norm."""
    run = copy_of(captured, tmp_path / "run", **EQUAL, epochs="6")
    finish(torchrun(run, **EQUAL, epochs="6", parallel="fsdp"))
    assert farthest_norm(straight, run) < SHARDS_WEIGHTS
    assert losses(run) == pytest.approx(losses(straight), rel=SHARDS_LOSS)


@two_gpus
def test_two_gpus_go_on_where_one_was(captured: Path, tmp_path: Path, straight: Run) -> None:
    run = copy_of(captured, tmp_path / "run", **EQUAL, epochs="6")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        die_after(6, patch)
        run_stage(run, "train")
    told = finish(torchrun(run, **EQUAL, epochs="6"))
    assert "going on from step-4" in told
    assert farthest(run, straight) == 0
    steps = [json.loads(line)["step"] for line in (run.logs_dir / "train.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
