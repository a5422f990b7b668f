"""A small trained run whose drafter a real vLLM on this machine's CPU serves, in fp32."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# All held-out prompts of the small run; of these as many as there are streams are timed.
PROMPTS, STREAMS, DRAFTS = 17, 8, 3
ARGS = '["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "16"]'


def settings_of(run: Path, **changes: Any) -> list[str]:
    """Overrides: fp32, 32 tokens an answer, eight streams; the servers without and with the drafter start together."""
    venv = os.environ.get("EYAS_VLLM_VENV")
    assert venv, "EYAS_VLLM_VENV is not set: run `make test-engines`"
    given = {
        "runs_dir": str(run.parent),
        "serving.kind": "vllm",
        "serving.python": f"{venv}/bin/python",
        "serving.args": ARGS,
        "serving.dtype": "float32",
        "serving.drafts": DRAFTS,
        "serving.max_new_tokens": 32,
        "serving.repeats": 1,
        "serving.servers": 2,
        "serving.concurrency": f"[{STREAMS}]",
        "serving.prompts_per_stream": 1,
        "serving.parity_prompts": PROMPTS,
        "evaluate.decode_prompts": PROMPTS,
    } | changes
    return [f"{key}={value}" for key, value in given.items()]


def eyas(run: Path, command: str, *options: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Run a command (`serve start` is one) on the run."""
    words = [sys.executable, "-m", "eyas", *command.split(), run, *options]
    words += [word for text in settings_of(run, **changes) for word in ("--set", text)]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {"GOMP_SPINCOUNT": "1000"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=1800)
    print(done.stdout, done.stderr, sep="\n")
    return done
