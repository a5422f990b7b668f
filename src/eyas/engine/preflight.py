"""What would go wrong is found before anything is started, each with one clear error.

Checks are in order of cost; the last asks the server's own argument parser, which takes seconds.
"""

import errno
import platform
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from eyas import fs
from eyas.engine import process
from eyas.engine.find import Interpreter, find_engine
from eyas.engine.flags import read_flags
from eyas.engine.gpu import Gpu, gpus, visible
from eyas.engine.kinds import KINDS
from eyas.engine.launch import Kind, Launch, engine_env
from eyas.engine.ring import SHM
from eyas.engine.state import stop_command
from eyas.engine.weights import check_weight_files
from eyas.errors import EngineError, EyasError, RecipeError, StoreFull
from eyas.need import Need, both_units, counted, room
from eyas.progress import size
from eyas.run import Run
from eyas.tap.ring import HEADER_BYTES, ORDERED_MACHINES, Layout, least_capacity
from eyas.target import Target, load_target

_HOST_BYTES = 3 << 30  # what an engine's processes take beside the model: 2 to 3 GB seen with SmolLM2
_DEFAULT_GPU_SHARE = 0.8  # engines take 0.8 to 0.92 of a GPU by themselves


class Facts:
    """What the checks look at, each looked up once, when it is first asked for.

    Every property may raise: TargetError, EngineError or RecipeError, the error that its own check reports.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._found: dict[str, Any] = {}

    @property
    def target(self) -> Target:
        return self._once("target", lambda: load_target(self.run.recipe.target))

    @property
    def kind(self) -> Kind:
        return KINDS[self.run.recipe.engine.kind]

    @property
    def interpreter(self) -> Interpreter:
        return self._once("interpreter", lambda: find_engine(self.run))

    @property
    def version(self) -> str:
        """Release of the engine in that interpreter."""
        return self.interpreter.engines[self.run.recipe.engine.kind]

    @property
    def launch(self) -> Launch:
        return self._once("launch", lambda: self.kind.plan_launch(self.run, self.target, self.version))

    @property
    def flags(self) -> dict[str, Any]:
        """Values of all flags as the server's parser reads them."""
        cache = self.run.dir / self.run.engine_folder / "flags.json" if self.run.dir.is_dir() else None
        return self._once("flags", lambda: read_flags(self.launch, self.run.recipe.engine.port or 30000, cache))

    def _once(self, name: str, find: Callable[[], Any]) -> Any:
        """What `find` returns or raises, kept."""
        if name not in self._found:
            try:
                self._found[name] = find()
            except EyasError as error:
                self._found[name] = error
        if isinstance(self._found[name], EyasError):
            raise self._found[name]
        return self._found[name]

    @property
    def layout(self) -> Layout:
        table = self.run.recipe.store
        return Layout(self.target.hidden_size, table.encoding, table.final_encoding)


def preflight(facts: Facts) -> None:
    """Check everything. Raises the first fault."""
    for check in CHECKS:
        check(facts)


def faults(run: Run) -> Iterator[EyasError]:
    """Every fault, not only the first; what can't be checked because of an earlier one is left out."""
    facts, told = Facts(run), set[str]()
    for check in CHECKS:
        try:
            check(facts)
        except EyasError as error:
            if str(error) not in told:
                told.add(str(error))
                yield error


def check_engine(facts: Facts) -> None:
    """The engine is in that interpreter, of a release that is known."""
    facts.kind.check_release(facts.version, facts.run.engine_table)


def check_launch(facts: Facts) -> None:
    """The recipe's own keys make a command line."""
    _ = facts.launch


def check_model(facts: Facts) -> None:
    """Every weight file is there, whole, and holds the tensors that the index says."""
    check_weight_files(facts.target)


def check_ring(facts: Facts) -> None:
    """The processor keeps stores in order, the ring holds some rows, and /dev/shm and memory hold the ring."""
    run, machine = facts.run, platform.machine()
    if not facts.launch.tap:
        return
    if machine not in ORDERED_MACHINES:
        raise EngineError(
            f"this machine is {machine}",
            expected=f"{', '.join(ORDERED_MACHINES)}: the ring needs a processor that shows stores in their order",
            cause="GH200, GB200 and others with Arm cores may show a row's counter before the row",
            next="--set engine.kind=local, or capture on another machine",
        )
    wanted, least = run.recipe.capture.ring_bytes, least_capacity(facts.layout)
    if wanted < least:
        raise RecipeError(
            f"capture.ring_bytes = {wanted:,}",
            expected=f"at least {least:,}: rows of hidden size {facts.target.hidden_size} would not fit",
            next="--set capture.ring_bytes=4294967296   # 4 GiB carry 16 s of a fast 8B model",
        )
    free = fs.free_bytes(SHM)
    if wanted + HEADER_BYTES > free:
        held = sum(path.stat().st_size for path in SHM.glob("eyas-*.ring"))
        rings = f"; {size(held)} of it are rings, see `eyas serve clean`" if held else ""
        raise EngineError(
            f"{SHM} has {size(free)} free, capture.ring_bytes = {wanted:,} needs {size(wanted)}",
            cause=f"{SHM} is small (containers have 64 MB by default) or full{rings}",
            next=f"mount -o remount,size={(wanted >> 30) + 2}G {SHM}, docker run --shm-size={(wanted >> 30) + 2}g, "
            f"or --set capture.ring_bytes={max(least, free * 3 // 4 >> 20 << 20)}",
        )


def check_memory(facts: Facts) -> None:
    """Main memory for the ring and, on a CPU, for weights and KV cache."""
    ring = facts.run.recipe.capture.ring_bytes if facts.launch.tap else 0
    weights = weight_bytes(facts) if facts.launch.device == "cpu" else 0
    itself = _HOST_BYTES + facts.launch.cache_bytes
    needed, free = ring + weights + itself, available_memory()
    if needed > free:
        parts = f"ring {size(ring)}, weights {size(weights)}, {facts.launch.kind.title} itself {size(itself)}"
        raise EngineError(
            f"{size(free)} of memory are free; {size(needed)} are needed ({parts})",
            cause="other programs hold it, or the container's limit is low",
            next="end what else runs, or lower capture.ring_bytes",
        )


def weight_bytes(facts: Facts) -> int:
    """Bytes of the weights in the recipe's number type, taking the files' for 2 bytes a number."""
    stored = sum(path.stat().st_size for path in set(facts.target.weight_files.values()))
    return stored * (2 if facts.run.recipe.engine.dtype == "float32" else 1)


def available_memory() -> int:
    """Bytes that can be taken without swapping, within the container's limit."""
    free = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def check_disk(facts: Facts) -> None:
    """Room for what is not captured yet, by prepare's counts; before prepare ran nothing is known."""
    counts, table = counted(facts.run), facts.run.recipe.store
    if not facts.launch.tap or not counts:
        return
    share = counts["supervised_tokens"] / max(counts["tokens"], 1)
    need = Need(counts["tokens"], "", share, "", facts.target.hidden_size)
    needed = need.store_bytes(table.encoding, table.final_encoding)
    found = room(facts.run, needed)
    if found is not None and found.lacking_bytes:
        raise StoreFull(
            f"{found.folder}: {size(found.free_bytes)} free; the store of {need.tokens:,} tokens takes "
            f"{both_units(needed)}",
            expected=f"{size(found.lacking_bytes)} more (store.min_free_bytes = {table.min_free_bytes:,} included)",
            next="--set store.encoding=fp8, --set store.url=DIR on another disk, or fewer tokens: data.limit",
        )


def check_port(facts: Facts) -> None:
    """The port can be bound; where not, who holds it."""
    engine, table = facts.run.recipe.engine, facts.run.engine_table
    if ":" in engine.host:
        raise RecipeError(
            f"{table}.host = {engine.host}",
            expected="a name or an IPv4 address: no server was ever asked through IPv6 here",
            next=f"--set {table}.host=127.0.0.1",
        )
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the engines' own servers do
        try:
            trial.bind((engine.host, engine.port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RecipeError(
                    f"{table}.host = {engine.host}, {table}.port = {engine.port}: {error.strerror}",
                    expected="an address of this machine, and a port above 1023 for an ordinary user",
                    next=f"--set {table}.host=127.0.0.1 --set {table}.port=0",
                ) from None
            raise _port_held(table, engine.port) from None


def _port_held(table: str, port: int) -> EngineError:
    holder = process.port_holder(port)
    pid, command = holder or (0, "")
    who = f"process {pid}: {command}" if pid else "a process that this user can't see (another user's or container's)"
    ours = process.mark_of(pid) if pid else ""
    stop = stop_command(ours) or f"kill {pid} (a server that a stage measures)" if ours else ""
    return EngineError(
        f"port {port} is held by {who}",
        expected="a free port for the server",
        cause="a server of an earlier start still runs"
        if ours or any(kind in command for kind in KINDS)
        else "another program serves there",
        next=f"{stop + ', or ' if stop else ''}--set {table}.port=0 (any free port)",
    )


def check_gpus(facts: Facts) -> None:
    """Enough of each GPU's memory is free; where not, who holds it."""
    if facts.launch.device == "cpu":
        return
    seen = visible(gpus(), engine_env(facts.launch.python, facts.launch.env))
    kind, flags = facts.launch.kind, facts.flags
    first, count = int(flags.get("base_gpu_id") or 0), int(flags.get(kind.ranks) or 1)
    count *= int(flags.get(kind.stages) or 1)
    if seen and len(seen) < first + count:
        raise EngineError(
            f"{len(seen)} GPUs are visible; the server wants {count}, from number {first}",
            cause=f"{_flag(kind.ranks)} is larger than this machine, or CUDA_VISIBLE_DEVICES hides some",
            next=f"mend {_flag(kind.ranks)} in {facts.run.engine_table}.args",
        )
    share = float(flags.get(kind.memory_share) or _DEFAULT_GPU_SHARE)
    for gpu in seen[first : first + count]:
        if gpu.total_bytes - gpu.used_bytes < share * gpu.total_bytes:
            raise _gpu_held(gpu, share, _flag(kind.memory_share), facts.run.engine_table)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _gpu_held(gpu: Gpu, share: float, flag: str, table: str) -> EngineError:
    def told(pid: int, amount: int) -> str:
        command = process.command_of(pid)
        return f"process {pid} ({command or 'of another container or user'}) {size(amount)}"

    who = "; ".join(told(pid, amount) for pid, amount in gpu.holders.items()) or "nobody that nvidia-smi shows"
    return EngineError(
        f"GPU {gpu.index} ({gpu.name}): {size(gpu.used_bytes)} of {size(gpu.total_bytes)} are held: {who}",
        expected=f"{share:.0%} of it free ({flag})",
        cause="another server, or what an earlier one left"
        if gpu.holders
        else "a process that died without its memory being given back, or one of another container",
        next=f"end that process, or name free GPUs: --set '{table}.env.CUDA_VISIBLE_DEVICES=\"1\"'",
    )


def check_flags(facts: Facts) -> None:
    """The server's own parser takes every flag, and none makes states wrong."""
    _ = facts.flags


CHECKS: tuple[Callable[[Facts], None], ...] = (
    check_engine,
    check_model,
    check_launch,
    check_port,
    check_ring,
    check_memory,
    check_disk,
    check_flags,
    check_gpus,
)
