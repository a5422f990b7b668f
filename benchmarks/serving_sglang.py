"""A drafter in SGLang on one GPU: speed-up and acceptance on four prompt sets, tuning, what acceptance is worth at 8B.

    python benchmarks/serving_sglang.py RUN --data DIR --sglang-python PATH [--sglang-path DIR] [--parts sets,tune]

RUN is the folder of a finished run with a trained drafter, such as WORK/runs/smollm2 of benchmarks/smollm2.py; DIR/eval
holds the prompt sets. Parts:

    sets    without and with the drafter, one stream and 16, both servers at once, repeats in turn; parity; losslessness
    tune    six configurations of the drafter, six servers at once, refined by halving, one stream
    shape   Llama-3.1-8B's shape with random weights, drafts accepted by SGLANG_SIMULATE_ACC_LEN: the speed-up that an
            acceptance length is worth, one stream and 16

Each part resumes and is skipped once it is done: its figures lie in RUN/bench/. A part starts its servers at the same
time, which takes 1 to 2 minutes; about 7 minutes in all on an H200. The last line is one JSON object; with CUDA, from a
clean tree and with all parts done it is kept in benchmarks/results/serving_sglang.json.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import machine_facts, save_result
from serving_vllm_cpu import result_of
from shapes import LLAMA_8B

from eyas import fs
from eyas.engine import process
from eyas.engine.begin import free_port
from eyas.engine.choices import load_choices
from eyas.errors import EngineError, EyasError
from eyas.evaluate.ask import Asker
from eyas.evaluate.load import Load, run_pass
from eyas.evaluate.prompts import Prompt, PromptSets
from eyas.evaluate.tune import tune
from eyas.pids import alive
from eyas.run import Run, open_run
from eyas.settings import Serving
from eyas.signals import stop_on_signals
from eyas.stages import run_stage

SETS = ["mt_bench", "eagle_gsm8k", "eagle_humaneval", "eagle_alpaca"]
GPU = torch.cuda.is_available()
# What SGLang needs where FlashAttention 3 is out of reach and prefill graphs take minutes; harmless elsewhere.
PORTABLE = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
PORTABLE += ["--disable-prefill-cuda-graph"]
# Several servers share the GPU: each takes as much cache as it needs, whatever its share of memory would be.
SHARED = ["--mem-fraction-static", "0.5", "--max-total-tokens", "65536", "--cuda-graph-max-bs", "16"]
SHARED += ["--max-running-requests", "48"]  # with a drafter SGLang takes 48 by itself, without one more
LENGTHS = [1.5, 2.0, 3.0, 4.0]
STREAMS = [1, 16]
CHOICES = """
about = "how SmolLM2's drafter is served: chains and trees"
[[choices]]
drafter = [{ drafts = 3 }, { drafts = 1 }, { drafts = 2 }, { drafts = 5 }, { drafts = 3, top_k = 4, draft_tokens = 8 },
           { drafts = 5, top_k = 4, draft_tokens = 16 }]
reason = "more drafts and trees are accepted further, and cost more for each verification"
"""


def serving_run(arguments: argparse.Namespace, **changes: Any) -> Run:
    """The run with [serving] for this machine's SGLang."""
    env = {"PYTHONPATH": str(arguments.sglang_path)} if arguments.sglang_path else {}
    table = {
        "kind": "sglang",
        "python": arguments.sglang_python,
        "env": env,
        "args": [*PORTABLE, *SHARED] if GPU else ["--max-running-requests", "16"],
        "dtype": "bfloat16" if GPU else "float32",
        "prompts": [str(arguments.data.resolve() / f"eval/{name}.jsonl") for name in SETS],
        "max_new_tokens": 256,
        "concurrency": STREAMS,
        "prompts_per_stream": 4,
        "repeats": 2,
        "servers": 2,
    } | changes
    settings = [f"serving.{key}={_toml(value)}" for key, value in table.items()]
    # Answers are captured again in process: no third server for some tens of samples.
    settings += ["engine.kind=local", "evaluate.decode_prompts=4", "export.sglang_version=0.5.14"]
    return open_run(arguments.run, [*settings, *arguments.settings])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {json.dumps(text)}" for key, text in value.items()) + " }"
    return json.dumps(value)


def sets_part(arguments: argparse.Namespace) -> dict[str, Any]:
    """The serving stage."""
    run = serving_run(arguments, max_prompts=arguments.prompts)
    run_stage(run, "export", redo=True)  # for this release of SGLang
    failed = ""
    try:
        run_stage(run, "serving")
    except EyasError as error:
        if not (run.dir / "serving.json").is_file():
            raise
        failed = str(error)
    figures = json.loads((run.dir / "serving.json").read_text(encoding="utf-8"))
    commands = {name: entry["command"] for name, entry in figures["servers"].items()}
    return result_of(figures) | {"commands": commands, "failed": failed}


def tune_part(arguments: argparse.Namespace) -> dict[str, Any]:
    """`eyas tune` over six configurations."""
    run = serving_run(
        arguments,
        max_prompts=2,
        max_new_tokens=128,
        servers=6,
        concurrency=[1],
        prompts_per_stream=0,
        profile="serving",
    )
    path = run.dir / "bench" / "six.toml"
    fs.write_atomic(path, CHOICES)
    with stop_on_signals("this pass") as stop:
        tuned = tune(run, load_choices(str(path)), minutes=arguments.minutes, streams=1, most=6, stop=stop)
    return tuned.evidence


def shape_part(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rates of the dummy shape without a drafter, and with drafts accepted at each length."""
    work = arguments.run / "bench" / "shape"
    config = dict(LLAMA_8B) if GPU else dict(LLAMA_8B) | {"num_hidden_layers": 2, "hidden_size": 256, "head_dim": 8}
    drafter = config | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
    drafter["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 15, 28], "use_aux_hidden_state": True}
    for name, content in (("target", config), ("drafter", drafter)):
        fs.write_atomic(work / name / "config.json", json.dumps(content, indent=1))
    servers = {0.0: Dummy(arguments, work, 0.0)} | {length: Dummy(arguments, work, length) for length in LENGTHS}
    rates: dict[float, dict[int, list[float]]] = {length: {count: [] for count in STREAMS} for length in servers}
    try:
        with ThreadPoolExecutor(len(servers)) as threads:
            started = time.monotonic()
            list(threads.map(Dummy.start, servers.values()))
            start_s = time.monotonic() - started
        for repeat in range(-1, arguments.repeats):  # the first is to warm up
            for length, server in servers.items():
                for count in STREAMS:
                    rate = server.rate(count, f"{repeat}")
                    if repeat >= 0:
                        rates[length][count].append(rate)
    finally:
        with ThreadPoolExecutor(len(servers)) as threads:
            list(threads.map(Dummy.stop, servers.values()))
    base = {count: statistics.fmean(values) for count, values in rates[0.0].items()}
    curve = [
        {
            "acceptance_length": length,
            "streams": count,
            "tokens_per_s": round(statistics.fmean(values), 1),
            "speedup": round(statistics.fmean(values) / base[count], 4),
            "low": round(min(values) / max(rates[0.0][count]), 4),
            "high": round(max(values) / min(rates[0.0][count]), 4),
        }
        for length, of_length in rates.items()
        for count, values in of_length.items()
        if length
    ]
    baseline = {count: {"tokens_per_s": round(rate, 1)} for count, rate in base.items()}
    told = {"shape": config, "drafts": 3, "topology": "chain", "new_tokens": arguments.new_tokens, "prompt_tokens": 200}
    return told | {"start_s": round(start_s, 1), "baseline": baseline, "curve": curve, "repeats": arguments.repeats}


class Dummy:
    """One SGLang with random weights; the acceptance length of its drafts is simulated (0: no drafter)."""

    def __init__(self, arguments: argparse.Namespace, work: Path, length: float) -> None:
        self.arguments, self.length, self.work = arguments, length, work
        self.port = free_port("127.0.0.1")
        self.mark, self.log, self.pid = f"{work}:{length}", work / f"server-{length}.log", 0

    def start(self) -> None:
        """Start it and wait until it answers; one that a killed call left is ended first."""
        process.end(0, self.mark, 20.0)
        words = [self.arguments.sglang_python, "-m", "sglang.launch_server", "--model-path", str(self.work / "target")]
        words += ["--load-format", "dummy", "--skip-tokenizer-init", "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--max-total-tokens", "16384", "--max-running-requests", "16", "--random-seed", "0"]
        words += (
            [*PORTABLE, "--mem-fraction-static", "0.9", "--cuda-graph-max-bs", "16"] if GPU else ["--device", "cpu"]
        )
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        env |= {process.MARK: self.mark, "PATH": f"{Path(words[0]).parent}:{os.environ['PATH']}"}
        env |= {"PYTHONPATH": str(self.arguments.sglang_path)} if self.arguments.sglang_path else {}
        if self.length:
            words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(self.work / "drafter")]
            words += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
            words += ["--speculative-num-draft-tokens", "4"]
            env["SGLANG_SIMULATE_ACC_LEN"] = str(self.length)
        self.log.unlink(missing_ok=True)
        started = process.launch([shutil.which(words[0]) or words[0], *words[1:]], env, self.log)
        self.pid, created = started.pid, started.create_time()
        deadline = time.monotonic() + self.arguments.patience_s
        while time.monotonic() < deadline and alive(self.pid, created):
            if "The server is fired up" in self.log.read_text(encoding="utf-8", errors="replace"):
                return
            time.sleep(0.5)
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
        raise EngineError(f"the server for acceptance length {self.length} did not get ready; its log ends:\n{tail}")

    def rate(self, streams: int, salt: str) -> float:
        """Tokens/s of `streams` answers at once, each of `new_tokens`."""
        chance = np.random.default_rng(1)
        count = 2 if streams == 1 else streams
        prompts = [Prompt(str(at), None, tuple(chance.integers(10, 100000, 200).tolist())) for at in range(count)]
        sets = PromptSets({"random": prompts}, None)  # type: ignore[arg-type]

        async def go() -> float:
            url = f"http://127.0.0.1:{self.port}"
            async with Asker(url, "sglang", Serving(), frozenset([128009]), LLAMA_8B["vocab_size"]) as asker:
                done = await run_pass(asker, sets, "random", Load(streams, count, self.arguments.new_tokens, 0, salt))
            return done.tokens / done.wall_s

        return asyncio.run(go())

    def stop(self) -> None:
        if self.pid:
            process.end(self.pid, self.mark, 20.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument(
        "--sglang-path", type=Path, help="PYTHONPATH of that interpreter, where SGLang lies in a folder"
    )
    parser.add_argument("--parts", default="sets,tune,shape")
    parser.add_argument("--prompts", type=int, default=40, help="of each set")
    parser.add_argument("--minutes", type=float, default=6.0, help="for tuning")
    parser.add_argument("--repeats", type=int, default=3, help="of the 8B shape")
    parser.add_argument("--new-tokens", type=int, default=128, help="of the 8B shape's answers")
    parser.add_argument("--patience-s", type=float, default=300.0, help="for a server of the 8B shape to start")
    parser.add_argument("--redo", action="store_true", help="do the parts again that are done")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="as for eyas")
    arguments = parser.parse_args()
    done: dict[str, Any] = {}
    for name, part in PARTS.items():
        path = arguments.run / "bench" / f"{name}.json"
        if name in arguments.parts.split(",") and (arguments.redo or not path.is_file()):
            began = time.monotonic()
            figures = part(arguments)
            fs.write_json(path, figures | {"part_s": round(time.monotonic() - began, 1), **machine_facts()})
        if path.is_file():
            done[name] = json.loads(path.read_text(encoding="utf-8"))
    result = {**done.pop("sets", {}), **done, **machine_facts()}
    if len(done) == 2 and "acceptance_length" in result and GPU:
        save_result("serving_sglang", result)
    print(json.dumps(result))
    return int(bool(result.get("failed")))


PARTS = {"sets": sets_part, "tune": tune_part, "shape": shape_part}

if __name__ == "__main__":
    sys.exit(main())
