"""What capture costs a stock SGLang on one GPU, and whether what it captures is true.

    python benchmarks/capture_sglang.py --work DIR --sglang-python PATH [--sglang-path DIR] [--part speed|truth]

speed: a target of Llama-3.1-8B's shape with random weights, prompts of 1,000 tokens, 64 in flight. Three servers share
the GPU: one without the tap, one captured in bf16, one in fp8; they take turns, and all that is captured goes to a
store on disk. The ratio is tokens/s with capture to tokens/s without, by the medians of the repeats.
truth: SmolLM2 with its real weights, in bfloat16 (on a CPU in float32: SGLang 0.5.14's RMSNorm on CUDA takes none),
through a ring so small that it is full all the time: the cosine of every row to Transformers in float32, of the layers
beside, and of Transformers in bfloat16 to itself in float32, which is what the number type costs.
Each part keeps its result in DIR, so that two calls may share the work. The last line is one JSON object; when both
parts are there, with CUDA and a clean tree, it is kept in benchmarks/results/capture_sglang.json.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from results import machine_facts, save_result
from shapes import LLAMA_8B, write_llama, write_tokens

from eyas.capture import run as capture
from eyas.data.tokens import Tokens
from eyas.engine.client import SGLangClient
from eyas.engine.local import LocalEngine, States
from eyas.engine.server import ServerState, start_server, stop_server
from eyas.run import Run, open_run
from eyas.settings import Engine
from eyas.stages import run_stage
from eyas.store.reader import StoredSample, StoreReader
from eyas.tap.ring import Ring
from eyas.target import load_target

ROOT = Path(__file__).resolve().parent.parent
# What SGLang needs where FlashAttention 3 and prefill graphs are out of reach; harmless elsewhere.
PORTABLE = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
PORTABLE = PORTABLE if torch.cuda.is_available() else []
# The same server without the tap: extraction's flags under the other purpose.
_PLAIN = 'purpose = "serve"\nabout = "as extraction, without the tap"\n'
_PLAIN_FLAGS = [
    "--disable-radix-cache",
    "--disable-prefill-cuda-graph",
    "--disable-cuda-graph",
    "--skip-tokenizer-init",
]
_PLAIN_FLAGS += ["--enforce-disable-flashinfer-allreduce-fusion"]
_RECIPE = 'target.path = "{target}"\ndata.sources = [{{ path = "unused.jsonl" }}]\n'


def open_one(arguments: argparse.Namespace, recipe: Path, name: str, *settings: str) -> Run:
    """A run in the work folder whose engine is the given SGLang."""
    env = f"{{ PYTHONPATH = {json.dumps(str(arguments.sglang_path))} }}" if arguments.sglang_path else "{}"
    common = [f"name={name}", f"runs_dir={arguments.work / 'runs'}", "engine.kind=sglang", f"engine.env={env}"]
    common += [f"engine.python={arguments.sglang_python}", "capture.in_flight=64", f"capture.ring_bytes={2 << 30}"]
    if not any(text.startswith("engine.args") for text in settings):
        common.append(f"engine.args={json.dumps(PORTABLE)}")
    return open_run(recipe, [*common, *settings])


def plain_rate(url: str, prompts: list[list[int]], in_flight: int) -> float:
    """Prompt tokens/s of a server that nothing is captured from, the same client and number in flight."""

    async def ask() -> float:
        gate = asyncio.Semaphore(in_flight)
        async with SGLangClient(url) as client:

            async def one(number: int, prompt: list[int]) -> None:
                async with gate:
                    await client.prefill(prompt, f"plain-{time.time_ns()}-{number}")

            started = time.perf_counter()
            await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
            return sum(map(len, prompts)) / (time.perf_counter() - started)

    return asyncio.run(ask())


def captured_rate(run: Run) -> dict[str, float]:
    """One capture into an empty store on disk: rate by the stage's own account, and by the clock around it."""
    capture.discard(run)
    started = time.perf_counter()
    counts = capture.execute(run).counts
    wall_s = time.perf_counter() - started
    capture.discard(run)
    return {"tokens_per_s": counts["tokens_per_s"], "with_start_and_end": counts["tokens"] / wall_s}


def speed(arguments: argparse.Namespace) -> dict[str, Any]:
    """Three servers in turn."""
    work = arguments.work
    target = work / "llama-8b"
    if not (target / "model.safetensors.index.json").is_file():
        write_llama(target, LLAMA_8B)
    recipe, profile = work / "speed.toml", work / "plain.toml"
    recipe.write_text(_RECIPE.format(target=target), encoding="utf-8")
    flags = [f'[[flags]]\nflag = "{flag}"\nreason = "as extraction has it"\n' for flag in _PLAIN_FLAGS]
    profile.write_text(_PLAIN + "".join(flags), encoding="utf-8")
    # Three servers share the GPU; a prompt leaves the cache with its last chunk, so that a small one holds nothing up.
    limits = ["--max-total-tokens", "49152", "--mem-fraction-static", "0.35"]
    args = f"engine.args={json.dumps([*PORTABLE, *limits])}"
    runs = {
        "plain": open_one(arguments, recipe, "plain", args, f"engine.profile={profile}"),
        "bf16": open_one(arguments, recipe, "bf16", args, "store.encoding=bf16"),
        "fp8": open_one(arguments, recipe, "fp8", args, "store.encoding=fp8"),
    }
    states: dict[str, ServerState] = {}
    rows: list[dict[str, Any]] = []
    try:
        for name, run in runs.items():
            if not run.tokens_dir.exists():
                write_tokens(run, arguments.prompts, 1000, 1.0)
            states[name] = start_server(run)
        prompts = [sample.token_ids.tolist() for sample in Tokens(runs["plain"].tokens_dir)]
        for state in states.values():
            plain_rate(state.url, prompts[:128], 64)  # compiles kernels
        for repeat in range(arguments.repeats):
            row: dict[str, Any] = {"plain": plain_rate(states["plain"].url, prompts, 64)}
            for name in ("bf16", "fp8"):
                row[name] = captured_rate(runs[name])
            rows.append(row)
            print(f"repeat {repeat}: {json.dumps(row)}", flush=True)
        rings = {name: Ring.attach(states[name].ring).counters()._asdict() for name in ("bf16", "fp8")}
    finally:
        for run in runs.values():
            print("; ".join(stop_server(run)), flush=True)
    plain = statistics.median(row["plain"] for row in rows)
    medians = {name: statistics.median(row[name]["tokens_per_s"] for row in rows) for name in ("bf16", "fp8")}
    return {
        **{f"ratio_{name}": round(rate / plain, 4) for name, rate in medians.items()},
        "plain_tokens_per_s": round(plain),
        **{f"{name}_tokens_per_s": round(rate) for name, rate in medians.items()},
        "rows_lost": sum(ring["dropped_rows"] for ring in rings.values()),
        "repeats": rows,
        "rings": rings,
        "prompts": len(prompts),
        "self_test": {name: state.self_test for name, state in states.items()},
        "ready_s": {name: state.layers for name, state in states.items()},
    }


def truth(arguments: argparse.Namespace) -> dict[str, Any]:
    """SmolLM2's states in both number types against Transformers in float32."""
    recipe = ROOT / "examples/smollm2/recipe.toml"
    result: dict[str, Any] = {}
    for dtype in ("bfloat16",) if torch.cuda.is_available() else ("float32",):
        settings = [f"engine.dtype={dtype}", f"capture.ring_bytes={4 << 20}", f"data.limit={arguments.samples}"]
        run = open_one(arguments, recipe, f"truth-{dtype}", *settings)
        run_stage(run, "prepare")
        state = start_server(run)
        try:
            capture.discard(run)
            counts = capture.execute(run).counts
            counters = Ring.attach(state.ring).counters()._asdict()
        finally:
            print("; ".join(stop_server(run)), flush=True)
        result[dtype] = cosines(run) | {"counts": counts, "ring": counters, "self_test": state.self_test}
        print(dtype, json.dumps(result[dtype]), flush=True)
    return result


def cosines(run: Run) -> dict[str, Any]:
    """Smallest and mean cosine of a row to Transformers in float32: aux layers, final state, neighbouring layers, and
    Transformers in the server's number type."""
    store = StoreReader(run.store_url)
    ids = store.manifest.aux_layer_ids
    target, device, dtype = load_target(run.recipe.target), run.recipe.engine.device, run.recipe.engine.dtype
    exact, rounded = (Engine(dtype=kind, device=device) for kind in ("float32", dtype))
    samples = [store.read(ref.sample_id) for ref in store.samples()]
    found: dict[str, list[torch.Tensor]] = {}
    engine = LocalEngine(target, exact, ids)
    truth = [states_of(engine, sample) for sample in samples]
    for sample, states in zip(samples, truth, strict=True):
        found.setdefault("captured", []).append(_cosine(sample.aux_hidden_states, states.aux_hidden_states))
        found.setdefault("final", []).append(_cosine(sample.final_hidden_states, states.final_hidden_states))
    for name, table, layers in (
        ("one below", exact, [i - 1 for i in ids]),
        ("one above", exact, [i + 1 for i in ids]),
        (f"transformers in {dtype}", rounded, ids),
    ):
        engine = LocalEngine(target, table, layers)
        for sample, states in zip(samples, truth, strict=True):
            given = states_of(engine, sample).aux_hidden_states if table is rounded else sample.aux_hidden_states
            against = states if table is rounded else states_of(engine, sample)
            found.setdefault(name, []).append(_cosine(given, against.aux_hidden_states))
    columns = {name: torch.cat(parts) for name, parts in found.items()}
    return {
        name: {"min": rows.amin(0).tolist(), "mean": rows.mean(0).tolist(), "rows": len(rows)}
        for name, rows in columns.items()
    }


def states_of(engine: LocalEngine, sample: StoredSample) -> States:
    return next(iter(engine.states([sample.token_ids.numpy()], [sample.loss_mask.numpy()])))


def _cosine(stored: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(stored.double().cpu(), given.double().cpu(), dim=-1)


def summary(parts: dict[str, Any]) -> dict[str, Any]:
    """The figures that are looked at first."""
    result: dict[str, Any] = {}
    if "speed" in parts:
        result |= {key: parts["speed"][key] for key in ("ratio_bf16", "ratio_fp8", "plain_tokens_per_s", "rows_lost")}
    if "truth" in parts:
        result["min_cosine"] = {
            dtype: round(min(part["captured"]["min"] + [part["final"]["min"]]), 6)
            for dtype, part in parts["truth"].items()
        }
        lost = sum(part["ring"]["dropped_rows"] for part in parts["truth"].values())
        result["rows_lost"] = result.get("rows_lost", 0) + lost
        result["ring_full_waits_s"] = {d: round(part["ring"]["waited_s"], 3) for d, part in parts["truth"].items()}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument(
        "--sglang-path", type=Path, help="PYTHONPATH of that interpreter, where SGLang lies in a folder"
    )
    parser.add_argument("--part", choices=["speed", "truth"], help="default: both")
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=200, help="samples of the truth part")
    arguments = parser.parse_args()
    arguments.work = arguments.work.resolve()
    arguments.work.mkdir(parents=True, exist_ok=True)
    kept = arguments.work / "capture_sglang.json"
    parts = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    for name, measure in (("speed", speed), ("truth", truth)):
        if arguments.part in (None, name) and name not in parts:
            parts[name] = measure(arguments)
            kept.write_text(json.dumps(parts), encoding="utf-8")
    result = summary(parts) | parts | machine_facts()
    if len(parts) == 2 and torch.cuda.is_available():
        save_result("capture_sglang", result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
