"""What the three trainers share in benchmarks/train.py: shapes, weights, rows, clocks, and how a worker talks.

All draw the same numbers from the same seeds, so their losses can be compared, and time themselves in the same way:
by events on the device, from the start of the first timed step to the end of the last, whatever lies in between.
"""

import gc
import json
import re
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_S = 2.0  # of one timed block; a step at full clock speed is no measure of an hour of steps
# An 8192^3 product in bf16 on one of the H200s that were measured; the train stage divides by the vendor's 989e12.
PEAK_FLOPS = 790e12


@dataclass(frozen=True)
class Shape:
    """A target's and its drafter's sizes, and how long a row is."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    tokens: int
    ttt_steps: int


SHAPES = {
    "8b": Shape(4096, 14336, 32, 8, 128, 128256, 32000, 4096, 7),
    "kimi": Shape(7168, 18432, 64, 8, 128, 163840, 32000, 4096, 7),
    "small": Shape(256, 768, 4, 2, 64, 4096, 2048, 512, 3),
    "tiny": Shape(64, 160, 4, 2, 16, 512, 128, 256, 3),
}


@dataclass(frozen=True)
class Sample:
    """One row's states, all positions: ids [T], aux [T, 3H], final [T, H], mask bool [T] (on the CPU)."""

    ids: Tensor
    aux: Tensor
    final: Tensor
    mask: Tensor


class World:
    """Weights and rows that all trainers begin with."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = shape
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(7)
        self.draft_ids = torch.randperm(shape.vocab, generator=generator)[: shape.draft_vocab].sort().values
        self.t2d = torch.zeros(shape.vocab, dtype=torch.bool).index_fill_(0, self.draft_ids, True)
        self.d2t = self.draft_ids - torch.arange(shape.draft_vocab)

    def normal(self, name: str, *size: int, scale: float = 1.0) -> Tensor:
        """Random numbers that follow from their name, in the compute dtype."""
        generator = torch.Generator(device=self.device).manual_seed(zlib.crc32(name.encode()))
        return torch.randn(*size, generator=generator, device=self.device).mul_(scale).to(self.dtype)

    def embedding(self) -> Tensor:
        return self.normal("embedding", self.shape.vocab, self.shape.hidden, scale=0.02)

    def target_head(self) -> Tensor:
        """Rows outside the draft vocabulary are small: every argmax lies inside it, as nearly all do in real data."""
        head = self.normal("head", self.shape.vocab, self.shape.hidden, scale=0.02)
        head[~self.t2d.to(self.device)] *= 0.5
        return head

    def drafter(self) -> dict[str, Tensor]:
        """Matrices of the drafter, by the names that all three give them; norms are ones."""
        s = self.shape
        query, key, hidden = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.hidden
        sizes = {
            "fc": (hidden, 3 * hidden),
            "q_proj": (query, 2 * hidden),
            "k_proj": (key, 2 * hidden),
            "v_proj": (key, 2 * hidden),
            "o_proj": (hidden, query),
            "gate_proj": (s.inner, hidden),
            "up_proj": (s.inner, hidden),
            "down_proj": (hidden, s.inner),
        }
        matrices = {name: self.normal(name, *size, scale=0.02) for name, size in sizes.items()}
        return matrices | {"lm_head": self.target_head()[self.draft_ids.to(self.device)]}

    def load(self, model: torch.nn.Module) -> None:
        """Put the drafter's matrices into a model, and ones into its norms."""
        matrices = self.drafter()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                key = name.split(".")[-2]
                if key in matrices:
                    parameter.copy_(matrices[key])
                elif parameter.dim() == 1:
                    parameter.fill_(1.0)

    def sample(self, number: int, tokens: int, prompt: int) -> Sample:
        """The first `tokens` of a row, all supervised but its first `prompt`."""
        longest, name = self.shape.tokens + 2, f"row {number} "
        generator = torch.Generator(device=self.device).manual_seed(number)
        return Sample(
            torch.randint(self.shape.vocab, (longest,), generator=generator, device=self.device)[:tokens],
            self.normal(name + "aux", longest, 3 * self.shape.hidden)[:tokens],
            self.normal(name + "final", longest, self.shape.hidden)[:tokens],
            torch.arange(tokens) >= prompt,
        )

    def prompt(self, share: float) -> int:
        """Tokens before the supervised share of a row."""
        return round(self.shape.tokens * (1 - share))

    def flops_per_token(self, *, trained_head: bool, teacher_columns: int, window: int | None = None) -> float:
        """Products that a peer's maths needs for a token, forward and backward: every position at every step."""
        s = self.shape
        query, key = s.heads * s.head_dim, s.kv_heads * s.head_dim
        layer = 2 * (2 * s.hidden * (query + 2 * key) + query * s.hidden + 3 * s.hidden * s.inner)
        head = 2 * s.hidden * s.draft_vocab
        position = torch.arange(1, s.tokens + 1, dtype=torch.float64)
        seen = float((position if window is None else position.clamp(max=window)).mean())
        attention = sum(4 * query * (seen + k) for k in range(s.ttt_steps))
        once = 2 * (2 * 3 * s.hidden**2) + 2 * s.hidden * teacher_columns
        return s.ttt_steps * (3 * layer + (3 if trained_head else 2) * head) + 3 * attention + once


class Clock:
    """Marks on the device's timeline (on the host's, where there is no GPU)."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.marks = device.type == "cuda", []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def between(self, first: int, last: int) -> float:
        """Milliseconds."""
        a, b = self.marks[first], self.marks[last]
        return a.elapsed_time(b) if self.cuda else (b - a) * 1e3


# Does a step; calls mark() where the forward, the backward and the optimizer end.
Step = Callable[[Callable[[], None]], Any]


@dataclass(frozen=True)
class Job:
    """Steps that are ready to be done: tokens of each, and products that its maths needs."""

    step: Step
    tokens: int
    flops: float


class Timed(ABC):
    """A trainer that can be warmed up and timed."""

    device: torch.device

    @abstractmethod
    def job(self, rows: int, share: float, **settings: Any) -> AbstractContextManager[Job]:
        """Steps of `rows` rows whose last `share` is supervised."""

    def warm(self, **settings: Any) -> dict[str, Any]:
        """One step: everything is compiled after it."""
        began = time.perf_counter()
        with self.job(**settings) as job:
            job.step(lambda: None)
            synchronize(self.device)
        return {"seconds": time.perf_counter() - began}

    def measure(self, split: bool = False, **settings: Any) -> dict[str, Any]:
        """A block of steps; with `split`, one more under the profiler."""
        with self.job(**settings) as job:
            result = time_block(job.step, job.tokens, self.device)
            if split:
                result["split_ms"] = profile(job.step, self.device)
        mfu = job.flops / result["step_ms"] * 1e3 / PEAK_FLOPS
        return result | {"gflop_per_token": job.flops / job.tokens / 1e9, "mfu": mfu, "mfu_peak_flops": PEAK_FLOPS}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_block(step: Step, tokens: int, device: torch.device) -> dict[str, Any]:
    """Steps for some seconds, after two that are not counted."""
    gc.collect()
    step(lambda: None)
    synchronize(device)
    began = time.perf_counter()
    step(lambda: None)
    synchronize(device)
    count = max(3, round(BLOCK_S / (time.perf_counter() - began)))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(device)
    for _ in range(count):
        clock.mark()
        step(clock.mark)
    synchronize(device)
    whole = clock.between(0, -1) / count
    parts = [sum(clock.between(4 * k + i, 4 * k + i + 1) for k in range(count)) / count for i in range(3)]
    result = {"tokens_per_s": tokens / whole * 1e3, "step_ms": whole, "steps": count, "tokens": tokens}
    result |= dict(zip(("forward_ms", "backward_ms", "optimizer_ms"), parts, strict=True))
    if device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return result


CLASSES = [
    ("attention", r"flex_attention|flash|sdpa|fmha|_merge|tem_fused_.*attention"),
    ("loss", r"loss_(for|back)ward_kernel|log_softmax|_cross_entropy|_log_sum"),
    ("products", r"gemm|nvjet|cutlass|xmma|cublas|splitk|triton_mm"),
    ("optimizer", r"multi_tensor_apply|FusedAdam"),
    ("reductions", r"reduce_kernel|argmax|softmax|triton_(per|red)_"),
    ("copies", r"copy|Memcpy|Memset|CatArray|Fill"),
    ("elementwise", r"elementwise|^_|triton_poi|index|gather"),
]


def profile(step: Step, device: torch.device) -> dict[str, float]:
    """Milliseconds of a step by class of kernel, and the time in which none ran."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    step(lambda: None)
    synchronize(device)
    with record(activities=[ProfilerActivity.CUDA]) as recorded:
        step(lambda: None)
        synchronize(device)
    split: dict[str, float] = dict.fromkeys([name for name, _ in CLASSES] + ["other"], 0.0)
    kernels = [event for event in recorded.events() if "cuda" in str(event.device_type).lower()]
    for event in kernels:
        found = (name for name, pattern in CLASSES if re.search(pattern, event.name, re.IGNORECASE))
        split[next(found, "other")] += event.time_range.elapsed_us() / 1e3
    span = max(event.time_range.end for event in kernels) - min(event.time_range.start for event in kernels)
    return split | {"idle": max(0.0, span / 1e3 - sum(split.values()))}


def serve(worker: Any) -> None:
    """Answer commands, one JSON object a line, until the parent hangs up; what else is printed is log."""
    answer({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            result = getattr(worker, command.pop("do"))(**command)
        except torch.cuda.OutOfMemoryError as error:
            result = {"out_of_memory": str(error).split(". ")[0]}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        answer(result)


def answer(result: dict[str, Any]) -> None:
    print("@" + json.dumps(result), flush=True)
