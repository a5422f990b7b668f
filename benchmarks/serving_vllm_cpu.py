"""A run's drafter in vLLM on this machine's CPU, in fp32: speed-up, acceptance, parity, losslessness, held-out prompts.

    python benchmarks/serving_vllm_cpu.py RUN --vllm-python PATH [--set KEY=VALUE]

RUN is the folder of a finished run, such as runs/demo of `make demo`; PATH is the interpreter that `make engine-vllm`
made. The last line is one JSON object; from a clean tree it is kept in benchmarks/results/serving_vllm_cpu.json. Ratios
of two CPU cores say nothing of a GPU: acceptance, parity and losslessness are what counts here.
"""

import argparse
import json
import sys
from pathlib import Path

from results import machine_facts, save_result

from eyas.errors import EyasError
from eyas.run import open_run
from eyas.stages import run_stage

SETTINGS = [
    "serving.kind=vllm",
    'serving.args=["--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16"]',
    "serving.dtype=float32",
    "serving.max_new_tokens=48",
    "serving.concurrency=[1, 8]",
    "serving.prompts_per_stream=16",
    "serving.repeats=3",
    "serving.servers=2",
    "serving.parity_prompts=64",
    "evaluate.decode_prompts=64",
]


def result_of(figures: dict[str, object]) -> dict[str, object]:
    """What machines read: per set and over all."""
    sets = {
        name: {key: entry.get(key) for key in ("acceptance_length", "acceptance_per_position", "speedup", "identical")}
        for name, entry in dict(figures["sets"]).items()  # type: ignore[call-overload]
    }
    kept = ("engine", "version", "dtype", "device", "drafts", "topology", "temperature", "max_new_tokens", "repeats")
    kept += ("interleaved", "prompts", "acceptance_length", "acceptance_per_position", "speedup", "rates", "lossless")
    kept += ("identical", "parity_gap", "parity")
    return {key: figures[key] for key in kept} | {"sets": sets}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--redo", action="store_true", help="measure again what is measured already")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="as for eyas")
    arguments = parser.parse_args()
    run = open_run(arguments.run, [*SETTINGS, f"serving.python={arguments.vllm_python}", *arguments.settings])
    failed = ""
    try:
        run_stage(run, "serving", redo=arguments.redo)
    except EyasError as error:
        if not (run.dir / "serving.json").is_file():
            raise
        failed = str(error)
    figures = json.loads((run.dir / "serving.json").read_text(encoding="utf-8"))
    result = result_of(figures) | {"failed": failed, **machine_facts()}
    if not failed:
        save_result("serving_vllm_cpu", result, of_gpu=False)
    print(json.dumps(result))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
