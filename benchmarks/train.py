"""How fast does Eyas train, beside speculators and SpecForge? One GPU, the same rows, repeats interleaved.

    pip install --no-deps --target PEERS/speculators speculators==0.9.0 hs-connectors==0.9.0
    pip install --no-deps --target PEERS/specforge specforge==0.2.0
    python benchmarks/train.py --peers PEERS [--repeats 3] [--state FILE]
    python benchmarks/train.py --peers PEERS --cpu        small shapes, against speculators' model code

Each trainer is a process of its own (benchmarks/training/run_*.py) that compiles and warms up first; then they take
turns, a block of steps each, and hold no more of the GPU than their weights in between. Every block is written to
--state as it ends: a second call goes on where the first was stopped. Target of Llama-3.1-8B's shape, draft vocabulary
32,000, 7 steps of the training-time test, rows of 4,096 tokens in GPU memory, of which all or the last half are
supervised.

Compared is equal work: speculators freezes lm_head, so it stands beside Eyas with `train.freeze_lm_head`, and
SpecForge, which trains it, beside Eyas' default. speedup_full and speedup_half are those against the faster of the two.
`blocks` holds every block of every repeat; the first of each also how its steps' time is spent.
The last line is one JSON object, kept in benchmarks/results/train.json (train_cpu.json) where the tree is clean.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from results import machine_facts, save_result
from training.common import SHAPES

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"
CHECK_PROMPT = 64  # tokens before the answer in the rows whose losses are compared
SHARES = {"full": 1.0, "half": 0.5}


class Worker:
    """A trainer's process."""

    def __init__(self, name: str, script: str, site: Path | None, settings: dict[str, Any], logs: Path) -> None:
        self.name = name
        paths = [str(site)] if site else []
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([*paths, str(SOURCE), os.environ.get("PYTHONPATH", "")]),
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "HF_HUB_OFFLINE": "1",
        }
        self.log = logs / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, HERE / "training" / f"run_{script}.py", json.dumps(settings)],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def answer(self) -> dict[str, Any]:
        """The worker's next answer; all else that it prints goes to its log.

        Raises: RuntimeError where it ended instead.
        """
        assert self.process.stdout is not None
        with self.log.open("a") as log:
            for line in self.process.stdout:
                if line.startswith("@"):
                    return json.loads(line[1:])
                log.write(line)
        tail = "\n".join(self.log.read_text().splitlines()[-12:])
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}; {self.log}:\n{tail}")

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.answer()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class State:
    """Answers so far, by what was asked, kept on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}

    def ask(self, worker: Worker, key: str, **command: Any) -> dict[str, Any]:
        key = f"{worker.name} {key}"
        if key not in self.known:
            began = time.perf_counter()
            self.known[key] = worker.ask(**command)
            self.path.write_text(json.dumps(self.known, indent=1))
            print(f"{key}: {brief(self.known[key])} ({time.perf_counter() - began:.1f} s)", flush=True)
        return self.known[key]


def brief(result: dict[str, Any]) -> str:
    """An answer in a line."""
    if "step_ms" in result:
        parts = " / ".join(f"{result[f'{part}_ms']:.1f}" for part in ("forward", "backward", "optimizer"))
        line = f"{result['tokens_per_s']:,.0f} tokens/s, {result['step_ms']:.1f} ms a step ({parts})"
        if "peak_gib" in result:
            line += f", {result['peak_gib']:.1f} GiB, MFU {result['mfu']:.1%}"
        if "split_ms" in result:
            line += ", ms: " + ", ".join(f"{name} {ms:.1f}" for name, ms in result["split_ms"].items())
        return line
    return json.dumps(result)


def compare_losses(state: State, workers: dict[str, Worker], rows: dict[str, int], tokens: int) -> dict[str, Any]:
    """Losses of each step with equal weights on equal rows, where the maths is the same."""
    ours, found = workers["eyas"], {}
    if "speculators" in workers:
        switches = dict.fromkeys(("norm_before_fc", "norm_before_residual", "norm_output", "normed"), True)
        short = {"rows": 2 * rows["speculators"], "prompt": CHECK_PROMPT}  # within its window, in its packs' length
        theirs = state.ask(workers["speculators"], "losses", do="losses", tokens=tokens // 2, **short)
        own = state.ask(ours, "losses as speculators", do="losses", tokens=tokens // 2 + 2, **short, **switches)
        found["speculators"] = difference(own["divergence"], theirs["divergence"])
    if "specforge" in workers:
        rows_there = {"rows": rows["specforge"], "prompt": CHECK_PROMPT}
        theirs = state.ask(workers["specforge"], "losses", do="losses", **rows_there)
        own = state.ask(ours, "losses as specforge", do="losses", tokens=tokens + 1, **rows_there)
        found["specforge"] = difference(own["cross_entropy"], theirs["cross_entropy"])
    return found


def difference(own: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    largest = max(abs(a - b) / abs(b) for a, b in zip(own, theirs, strict=True))
    return {"eyas": own, "theirs": theirs, "largest_relative_difference": largest}


def run(arguments: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """All blocks, each trainer in turn, round after round; the result so far after each round, and at the end."""
    shape, device = ("small", "cpu") if arguments.cpu else (arguments.shape, "cuda")
    rows = {"eyas": arguments.rows, "speculators": 2, "specforge": arguments.specforge_rows}
    settings = {"shape": shape, "device": device}
    workers = {"eyas": Worker("eyas", "eyas", None, settings, work)}
    for peer in arguments.only or (["speculators"] if arguments.cpu else ["speculators", "specforge"]):
        own = {"compact": False} if peer == "specforge" else {}
        workers[peer] = Worker(peer, peer, arguments.peers / peer, settings | own, work)
    state = State(arguments.state or work / "state.json")
    warm_up(workers, rows)
    losses = compare_losses(state, workers, rows, SHAPES[shape].tokens)
    result: dict[str, Any] = {}
    for repeat in range(arguments.repeats):
        for case, share in SHARES.items():
            for name, worker in workers.items():
                command = {"do": "measure", "rows": rows[name], "share": share, "split": not repeat}
                state.ask(worker, f"{case} {repeat}", **command)
                if name == "eyas":
                    state.ask(worker, f"{case} frozen {repeat}", **command, frozen=True)
        result = summary(state.known, list(workers), rows, repeat + 1) | {"losses": losses}
        yield result
    for worker in workers.values():
        worker.stop()
    if not arguments.cpu:  # only now: SpecForge at its best batch leaves no room for them
        for more in kimi_and_store(state, settings, rows["eyas"], work):
            yield (result := result | more)


def kimi_and_store(state: State, settings: dict[str, Any], rows: int, work: Path) -> Iterator[dict[str, Any]]:
    """Eyas alone: at Kimi-K2's shape, and the whole train stage from a store on disk."""
    kimi = Worker("eyas-kimi", "eyas", None, settings | {"shape": "kimi"}, work)
    store = Worker("eyas-store", "store", None, settings | {"work": str(work / "stored")}, work)
    store.tell(do="fill", rows=rows, share=0.5, steps=12, encoding="bf16")
    for _ in range(2):  # it is ready, it is filled
        store.answer()
    kimi.answer()
    large = {case: state.ask(kimi, case, do="measure", rows=2, share=share) for case, share in SHARES.items()}
    kimi.stop()
    yield {"kimi_shape": large}
    stored = state.ask(store, "half", do="train")
    store.stop()
    yield {"from_a_store_on_disk": stored, "data_wait": stored["data_wait"]}


def warm_up(workers: dict[str, Worker], rows: dict[str, int]) -> None:
    """Let all compile at once. SpecForge's step needs most of the GPU's memory, so Eyas waits for its first."""
    for worker in workers.values():
        worker.answer()
    peers = [name for name in workers if name != "eyas"]
    for name in peers:
        workers[name].tell(do="warm", rows=rows[name], share=1.0)
    for name in sorted(peers):  # SpecForge before speculators
        print(f"{name}: first step {json.dumps(workers[name].answer())}", flush=True)
        if name == sorted(peers)[0]:
            print(f"eyas: first step {json.dumps(workers['eyas'].ask(do='warm', rows=1, share=1.0))}", flush=True)


def summary(known: dict[str, dict[str, Any]], names: list[str], rows: dict[str, int], repeats: int) -> dict[str, Any]:
    """Medians over the repeats, and Eyas against each peer at equal work."""

    def median(name: str, case: str, figure: str = "tokens_per_s") -> float:
        return statistics.median(known[f"{name} {case} {repeat}"][figure] for repeat in range(repeats))

    result: dict[str, Any] = {"repeats": repeats, "rows_of_a_step": rows}
    for case in SHARES:
        peers = {name: median(name, case) for name in names[1:]}
        same = {name: f"{case} frozen" if name == "speculators" else case for name in peers}
        own = {name: median("eyas", same[name]) for name in peers}
        result[case] = {
            "eyas": median("eyas", case),
            "eyas_frozen_lm_head": median("eyas", f"{case} frozen"),
            "peers": peers,
            "speedup_of_equal_work": {name: own[name] / peers[name] for name in peers},
            "speedup_with_trained_lm_head": {name: median("eyas", case) / peers[name] for name in peers},
        }
        if peers:
            faster = max(peers, key=lambda name: peers[name])
            result[f"speedup_{case}"] = round(own[faster] / peers[faster], 3)
    first = known["eyas full 0"]
    result["tokens_per_s"] = median("eyas", "full")
    result |= {name: first.get(name) for name in ("mfu", "mfu_peak_flops", "peak_gib")}
    measured = {str(repeat) for repeat in range(repeats)}
    return result | {"blocks": {key: value for key, value in known.items() if key.rpartition(" ")[2] in measured}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder with speculators/ and specforge/")
    parser.add_argument("--only", nargs="*", choices=("speculators", "specforge"), help="these peers alone")
    parser.add_argument("--cpu", action="store_true", help="small shapes on the CPU, against speculators alone")
    parser.add_argument("--shape", default="8b", help="a name in benchmarks/training/common.py")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=0, help="rows of 4,096 tokens in a step of Eyas (8; on a CPU 2)")
    parser.add_argument("--specforge-rows", type=int, default=8)
    parser.add_argument("--state", type=Path, help="where answers are kept, to go on from")
    arguments = parser.parse_args()
    arguments.rows = arguments.rows or (2 if arguments.cpu else 8)
    facts = machine_facts()
    with tempfile.TemporaryDirectory(prefix="eyas-train-") as folder:
        for result in run(arguments, Path(folder)):
            result |= facts
            save_result("train_cpu" if arguments.cpu else "train", result, of_gpu=not arguments.cpu)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
