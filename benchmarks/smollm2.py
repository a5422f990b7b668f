"""From prompts to a drafter for SmolLM2-135M-Instruct, with a stock SGLang on one GPU: what Eyas is for, end to end.

    python benchmarks/smollm2.py --data DIR --work DIR --sglang-python PATH [--sglang-path DIR] [--until STAGE]

DIR holds train/*.jsonl and eval/*.jsonl, one {"id", "prompt"} or {"id", "turns"} a line. SGLang answers the training
prompts and the evaluation sets (greedy, bf16), then its hidden states are captured by `eyas capture`, a drafter is
trained, and each evaluation set is walked over SGLang's own answers; 64 of its prompts are decoded in process.
Every stage resumes: call it again with the same --work to go on. The last line is one JSON object; with CUDA, a clean
tree and all stages done it is kept in benchmarks/results/smollm2.json.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from results import machine_facts, save_result

from eyas.engine.server import start_server, stop_server
from eyas.record import load_record
from eyas.run import Run, open_run
from eyas.stages import STAGES, run_stage

TRAIN = ["gsm8k_train", "code_alpaca_2k", "gpteacher_codegen", "gpteacher_roleplay", "alpaca_en_demo"]
TRAIN += ["dolly_hhrlhf_small", "openassistant_prompts", "mbpp_train", "self_instruct_seed", "nq_open_dev", "svamp"]
SETS = ["mt_bench", "eagle_gsm8k", "eagle_humaneval", "eagle_alpaca", "eagle_qa", "eagle_sum"]
# What SGLang needs where FlashAttention 3 and prefill graphs are out of reach; harmless elsewhere.
PORTABLE = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
PORTABLE = PORTABLE if torch.cuda.is_available() else []
_RECIPE = """
name = "smollm2"
target.path = "{target}"
engine = {{ kind = "sglang", python = "{python}", args = {args}, env = {env} }}
capture = {{ in_flight = 256, ring_bytes = 1_073_741_824 }}
evaluate = {{ drafts = 3, decode_prompts = 64, decode_tokens = 48 }}

[data]
max_tokens = 1024
evaluation_prompts = {evaluation}

[regenerate]
servers = ["http://127.0.0.1:{port}"]
kind = "sglang"
temperature = 0
max_new_tokens = 256
max_conversations = 2000

[train]
draft_vocab_size = 8192
epochs = {epochs}
batch_tokens = 4096
ttt_steps = 4
ttt_decay = 0.7
lr = 1e-3
clip = 1.0
checkpoint_every = 2000
eval_every = 1000
compile = true
"""


def write_recipe(arguments: argparse.Namespace) -> Path:
    """The recipe, its inputs given by absolute paths."""
    data, work = arguments.data.resolve(), arguments.work.resolve()
    env = {"PYTHONPATH": str(arguments.sglang_path)} if arguments.sglang_path else {}
    text = _RECIPE.format(
        target=arguments.target.expanduser().resolve(),
        port=arguments.port,
        evaluation=json.dumps([str(data / f"eval/{name}.jsonl") for name in SETS]),
        python=arguments.sglang_python,
        args=json.dumps(PORTABLE),
        env="{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in env.items()) + " }",
        epochs=arguments.epochs,
    )
    for split, folder, names in (("train", "train", TRAIN), ("heldout", "eval", SETS)):
        for name in names:
            text += f'\n[[data.sources]]\npath = "{data}/{folder}/{name}.jsonl"\nname = "{name}"\n'
            text += f'format = "prompts"\nsplit = "{split}"\n'
    work.mkdir(parents=True, exist_ok=True)
    path = work / "smollm2.toml"
    path.write_text(text, encoding="utf-8")
    return path


def regenerate(recipe: Path, settings: list[str], run: Run, port: int) -> None:
    """Serve the target without the tap, have the answers written, stop it."""
    if load_record(run.dir, "regenerate") is not None:
        return
    serving = open_run(recipe, [*settings, "name=smollm2-serving", "engine.profile=serving", f"engine.port={port}"])
    start_server(serving)
    try:
        run_stage(run, "regenerate")
    finally:
        print("\n".join(stop_server(serving)), file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=Path("~/.cache/eyas/SmolLM2-135M-Instruct"))
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument(
        "--sglang-path", type=Path, help="PYTHONPATH of that interpreter, where SGLang lies in a folder"
    )
    parser.add_argument("--port", type=int, default=31700)
    parser.add_argument("--epochs", type=float, default=8.0)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="as for eyas")
    parser.add_argument("--until", choices=list(STAGES), default="evaluate", help="last stage of this call")
    arguments = parser.parse_args()
    recipe = write_recipe(arguments)
    settings = [f"runs_dir={arguments.work / 'runs'}", *arguments.settings]
    run = open_run(recipe, settings)
    seconds = {}
    for stage in list(STAGES)[: list(STAGES).index(arguments.until) + 1]:
        started = time.monotonic()
        if stage == "regenerate":
            regenerate(recipe, settings, run, arguments.port)
        else:
            run_stage(run, stage)
        seconds[stage] = round(time.monotonic() - started, 1)
    records = {stage: load_record(run.dir, stage) for stage in seconds}
    result = {
        "counts": {stage: record.counts for stage, record in records.items() if record},
        "stage_s": {stage: record.duration_s for stage, record in records.items() if record},
        **machine_facts(),
    }
    if (run.dir / "eval.json").is_file():
        result["evaluation"] = json.loads((run.dir / "eval.json").read_text(encoding="utf-8"))
        if torch.cuda.is_available():
            save_result("smollm2", result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
