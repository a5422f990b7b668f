"""From prompts to a drafter for SmolLM2-135M-Instruct, with a stock SGLang on one GPU: what Eyas is for, end to end.

    python benchmarks/smollm2.py --data DIR --work DIR --sglang-python PATH [--sglang-path DIR] [--until STAGE]
    python benchmarks/smollm2.py --data DIR --work DIR --peer --peers PEERS

DIR holds train/*.jsonl and eval/*.jsonl, one {"id", "prompt"} or {"id", "turns"} a line. SGLang answers 11,451 training
prompts and the evaluation sets (greedy, bf16), then its hidden states are captured by `eyas capture`, a drafter is
trained, and each evaluation set is walked over SGLang's own answers; 64 of its prompts are decoded in process.

--peer does the same through speculators 0.9.0: its own trainer learns from the same store (`eyas store export --as
speculators`) as many epochs with the same draft vocabulary, and its checkpoint is imported and evaluated as ours is. It
needs the store (--until verify), no SGLang, and may run beside the rest. PEERS/speculators is a folder of wheels:

    pip install --no-deps --target PEERS/speculators speculators==0.9.0 hs-connectors==0.9.0 'datasets<=5.1.0' \\
        multiprocess dill loguru pydantic-settings python-dotenv

Every stage resumes: call it again with the same --work to go on. The last line is one JSON object; with CUDA, a clean
tree and both drafters evaluated it is kept in benchmarks/results/smollm2.json.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from results import machine_facts, save_result
from training.speculators_smollm2 import SETTINGS, facts_of, peer_run, train_and_evaluate

from eyas import fs
from eyas.engine.server import start_server, stop_server
from eyas.engine.state import running
from eyas.record import load_record
from eyas.run import Run, open_run
from eyas.stages import STAGES, run_stage

TRAIN = ["gsm8k_train", "code_alpaca_2k", "gpteacher_codegen", "gpteacher_roleplay", "alpaca_en_demo"]
TRAIN += ["dolly_hhrlhf_small", "openassistant_prompts", "mbpp_train", "self_instruct_seed", "nq_open_dev", "svamp"]
SETS = ["mt_bench", "eagle_gsm8k", "eagle_humaneval", "eagle_alpaca", "eagle_qa", "eagle_sum"]
OURS = list(STAGES)[: list(STAGES).index("evaluate") + 1]
# What SGLang needs where FlashAttention 3 is out of reach and prefill graphs take minutes; harmless elsewhere. Decoding
# graphs up to the number of requests in flight.
PORTABLE = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
PORTABLE += ["--disable-prefill-cuda-graph", "--cuda-graph-max-bs", "256"]
PORTABLE = PORTABLE if torch.cuda.is_available() else []
_RECIPE = """
name = "smollm2"
target.path = "{target}"
engine = {{ kind = "sglang", python = "{python}", args = {args}, env = {env} }}
capture = {{ in_flight = 256, ring_bytes = 1_073_741_824 }}
drafter = {{ fc_norm = true, norm_output = true }}
evaluate = {{ drafts = 3, decode_prompts = 64, decode_tokens = 48 }}

[data]
max_tokens = 2048
evaluation_prompts = {evaluation}

[regenerate]
servers = ["http://127.0.0.1:{port}"]
kind = "sglang"
temperature = 0
max_new_tokens = 256
max_conversations = 1500

[train]
draft_vocab_size = 8192
epochs = {epochs}
batch_tokens = 4096
ttt_steps = 4
ttt_decay = 0.7
lr = 1e-3
optimizer = "muon"
clip = 1.0
checkpoint_every = 500
eval_every = 1000
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
    path = work / "smollm2.toml"
    fs.write_atomic(path, text)  # ours and the peer's call may begin at the same time
    return path


def do(run: Run, serving: Run, stage: str) -> None:
    """Bring one stage to its end, with the server that it needs: one that a killed call left goes on, none is left."""
    if stage == "regenerate" and load_record(run.dir, stage) is None:
        start_server(serving)  # without the tap
    try:
        run_stage(run, stage)
    finally:
        server = {"regenerate": serving, "capture": run}.get(stage)
        if server and running(server):
            print("\n".join(stop_server(server)), file=sys.stderr)


def lengths(evaluation: dict[str, Any]) -> dict[str, float]:
    """Acceptance length of each set, of all their verifications, and of the prompts that were decoded."""
    found = {name: of_set["acceptance_length"] for name, of_set in evaluation["by_source"].items()}
    return found | {"all": evaluation["acceptance_length"], "decoded": evaluation["decode"]["acceptance_length"]}


def result_of(runs: dict[str, Run]) -> dict[str, Any]:
    """What the runs have so far; acceptance lengths side by side, set by set."""
    result: dict[str, Any] = {}
    side: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        records = {stage: load_record(run.dir, stage) for stage in OURS}
        told: dict[str, Any] = {"counts": {stage: record.counts for stage, record in records.items() if record}}
        told["stage_s"] = {stage: record.duration_s for stage, record in records.items() if record}
        if records["evaluate"] is not None:
            told["evaluation"] = json.loads((run.dir / "eval.json").read_text(encoding="utf-8"))
            for place, length in lengths(told["evaluation"]).items():
                side.setdefault(place, {})[name] = length
        result[name] = told
    return {"acceptance_length": side, **result}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=Path("~/.cache/eyas/SmolLM2-135M-Instruct"))
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument(
        "--sglang-path", type=Path, help="PYTHONPATH of that interpreter, where SGLang lies in a folder"
    )
    parser.add_argument("--port", type=int, default=21700)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], dest="settings", help="as for eyas")
    parser.add_argument("--until", choices=OURS, default="evaluate", help="last stage of this call")
    parser.add_argument("--peer", action="store_true", help="speculators' part instead of ours")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder with speculators/")
    arguments = parser.parse_args()
    recipe = write_recipe(arguments)
    settings = [f"runs_dir={arguments.work.resolve() / 'runs'}", *arguments.settings]
    run = open_run(recipe, settings)
    serving = open_run(
        recipe, [*settings, "name=smollm2-serving", "engine.profile=serving", f"engine.port={arguments.port}"]
    )
    peer = peer_run(recipe, settings, run)
    if arguments.peer:
        train_and_evaluate(run, peer, arguments.peers.resolve())
    else:
        for stage in OURS[: OURS.index(arguments.until) + 1]:
            do(run, serving, stage)
    result = result_of({"eyas": run, "speculators": peer})
    result["speculators"] |= {"trainer": facts_of(run), "settings": SETTINGS}
    result |= machine_facts()
    if torch.cuda.is_available() and len(result["acceptance_length"].get("all", ())) == 2:
        save_result("smollm2", result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
