"""Several processes that train one drafter: `torchrun --nproc-per-node N -m eyas train RECIPE`.

This module, ranks.py and words.py alone know how many there are. Each process ("rank") works on its share of a step's
packed rows; gradients are added up, so a step learns the same from the same samples whatever their number.

    ddp    every rank holds the whole drafter; its gradients are added up after the last row of a step. (The unroll uses
           each weight at every step of the training-time test, so no gradient is whole before the end of the backward:
           there is nothing to overlap the sum with, and a rank that had no row adds zeros.)
    fsdp   FSDP2: weights, gradients and moments lie in shards, one a rank, and the whole weights are there during a
           step only. Sums are those of `ddp`, in another order.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor

from eyas import fs
from eyas.drafter.eagle3 import Drafter
from eyas.engine.local import find_device
from eyas.errors import EyasError, Interrupted, RecipeError, TrainError
from eyas.settings import Train
from eyas.train.ranks import rank, world
from eyas.train.words import Words

T = TypeVar("T")

_JOIN_S = 600  # for all to start; a cold Python on a network file system may need minutes
_GRACE_S = 60  # by which the sums on the GPU outlive `timeout_s`, so that its error, in words, comes first


@contextmanager
def join(table: Train) -> Iterator["Parallel"]:
    """Meet the other processes, if there are any, and part from them at the end.

    Raises: TrainError where they do not come, or one is lost on the way (also raised by the methods of Parallel).
    """
    device = _own_device(table)
    if world() == 1:
        yield Parallel(table, device, None)
        return
    store, own, count = next(iter(rendezvous("env://", timeout=timedelta(seconds=_JOIN_S))))
    backend = "nccl" if device.type == "cuda" else "gloo"
    later = timedelta(seconds=table.timeout_s + (_GRACE_S if backend == "nccl" else 0))
    try:
        dist.init_process_group(backend, store=PrefixStore("sums", store), rank=own, world_size=count, timeout=later)
    except (RuntimeError, ValueError) as error:
        raise TrainError(
            f"rank {own} of {count} could not meet the others: {error}",
            cause="a rank that never started, or ports that a firewall closes",
            next="start all of them, with the same MASTER_ADDR and MASTER_PORT",
        ) from error
    parallel = Parallel(table, device, PrefixStore("words", store))
    try:
        with parallel.words.telling():
            yield parallel
            parallel.wait()  # nobody hangs up while another still listens
    except EyasError as error:
        # NCCL would wait for sums that a lost rank will never join; the end of the process ends them.
        if backend == "gloo" or isinstance(error, Interrupted):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _own_device(table: Train) -> torch.device:
    """One GPU for each process of a host.

    Raises: TrainError where there are fewer.
    """
    device = find_device(table.device, "train.device")
    if device.type != "cuda":
        return device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if world() > 1 and (device.index is not None or local >= torch.cuda.device_count()):
        raise TrainError(
            f"rank {rank()}: train.device = {table.device!r} and {torch.cuda.device_count()} GPUs seen",
            expected=f"`auto` or `cuda`, and a GPU for each process of this host (this one is number {local + 1})",
            next="torchrun --nproc-per-node NUMBER_OF_GPUS -m eyas train RECIPE",
        )
    index = local if world() > 1 else device.index or 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


class _Root(nn.Module):
    """FSDP gathers weights around a module's forward: this one's runs any function of the drafter."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, function: Callable[[Drafter], T]) -> T:
        return function(self.drafter)


def _nothing(drafter: Drafter) -> tuple[Tensor, None]:
    """A loss of zero that gives every weight a gradient."""
    parts = [parameter.sum() * 0 for parameter in drafter.parameters() if parameter.requires_grad]
    return torch.stack(parts).sum(), None


class Parallel:
    """What one process does alone and what it does with the others.

    Attributes:
        rank, world: number of this process, and how many there are.
        device: its own.
        leads: it alone logs, says how far things are, and writes.
        words: what it says to the others of its end, and hears of theirs.
    """

    def __init__(self, table: Train, device: torch.device, store: Any) -> None:
        self.device, self._timeout_s = device, table.timeout_s
        self.rank, self.world = (rank(), world()) if store is not None else (0, 1)
        self.words = Words(store, self.rank, self.world, table.timeout_s)
        self.leads = self.rank == 0
        self._shards = table.parallel == "fsdp" and self.world > 1
        self._root: Any = None
        if self.world > 1:
            # Sums of a few numbers in host memory, once a step: these wait, and give up, without the GPU.
            self.hosts = dist.new_group(backend="gloo", timeout=timedelta(seconds=table.timeout_s))

    def place(self, drafter: Drafter) -> None:
        """Make all hold the same weights: rank 0's, or its own shard of them. Before the optimizer is made."""
        self._root = _Root(drafter)
        if self.world == 1:
            return
        with self.words.telling(), torch.no_grad():
            for tensor in drafter.state_dict().values():
                dist.broadcast(tensor, 0)
        if self._shards:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self._root, mesh=init_device_mesh(self.device.type, (self.world,)))

    def backward(self, loss: Callable[[Drafter], tuple[Tensor, T]] | None, last: bool) -> T | None:
        """Add the gradients of `loss` (a scalar, and what else is wanted of it) to those of this step.

        Args:
            loss: None on a rank that has no row where others have one: it takes part with zeros.
            last: of this rank's rows in this step; all ranks must call equally often.
        """
        if self._shards:
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)
        elif loss is None:
            return None
        total, result = self._root(loss or _nothing)
        total.backward()
        return cast(T, result)

    def finish_gradients(self, divisor: float) -> None:
        """Of all ranks: their sum / divisor, in every parameter that learns."""
        learning = [parameter for parameter in self._root.parameters() if parameter.requires_grad]
        for parameter in learning:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in learning]
        if self._shards:
            divisor /= self.world  # FSDP has left their mean
        elif self.world > 1:
            for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
                work.wait()
        torch._foreach_mul_(gradients, 1 / divisor)

    def clip(self, largest: float) -> Tensor:
        """Scale the gradients to this norm where theirs is larger; returns theirs, on the device."""
        norm = nn.utils.clip_grad_norm_(self._root.parameters(), largest)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block the drafter holds its whole weights, to be read."""
        if self._shards:
            self._root.unshard()
        try:
            yield
        finally:
            if self._shards:
                self._root.reshard()

    def add(self, values: Sequence[int]) -> list[int]:
        """Sums over all ranks of a few whole numbers that each knows on its host."""
        if self.world == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(sums, group=self.hosts)
        return [int(value) for value in sums]

    def add_tensor(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place, of a tensor on a host or on the device."""
        if self.world > 1:
            dist.all_reduce(tensor, group=None if tensor.is_cuda else self.hosts)
        return tensor

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        if self.world == 1:
            return value
        every = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(every, op=dist.ReduceOp.MAX, group=self.hosts)
        return float(every)

    def refuse_idle(self, rows: int, command: str) -> None:
        """Raises: RecipeError where a step has fewer packed rows than there are ranks."""
        if rows < self.world:
            raise RecipeError(
                f"train.accumulation = {rows}: {rows} packed rows a step for {self.world} processes",
                expected="at least one row a step for each: a step is the same whatever the number of processes",
                next=f"{command} --set train.accumulation={self.world}   # a step then learns from that many rows",
            )

    def same(self, what: str, text: str) -> None:
        """Raises: TrainError on every rank where one has another text: it reads other files than rank 0."""
        if self.world == 1:
            return
        digest = torch.tensor([int(fs.digest(text)[:15], 16)])
        every = [torch.zeros_like(digest) for _ in range(self.world)]
        dist.all_gather(every, digest, group=self.hosts)
        others = [number for number, one in enumerate(every) if not torch.equal(one, every[0])]
        if others:
            raise TrainError(
                f"{what} of rank {', '.join(map(str, others))} differ from those of rank 0",
                cause="hosts that don't share a file system, or processes started with other options",
                next="give every host the same recipe, store and run folder",
            )

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.world > 1:
            dist.barrier(self.hosts)

    def settle(self) -> None:
        """Until the device has done all that was launched."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(blocking=True)
            event.record()
            self.wait_for(event)

    def wait_for(self, event: Any) -> None:
        """Until the GPU has come to this event; like everything that waits for others, not for ever."""
        if self.world == 1:
            event.synchronize()
            return
        end = time.monotonic() + self._timeout_s
        while not event.query():
            if time.monotonic() > end:
                raise self.words.lost(f"the GPU's share of a step was not done after {self._timeout_s:g} s")
            time.sleep(0.0002)

    def full(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor that may lie in shards; all ranks must call."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def like(self, tensor: Tensor, parameter: Tensor) -> Tensor:
        """A whole tensor, equal on all ranks, on the device and laid out as a parameter is."""
        tensor = tensor.to(parameter.device)
        if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
            return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        return tensor
