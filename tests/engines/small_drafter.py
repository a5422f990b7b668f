"""A small drafter for SmolLM2, trained by the demo's recipe on a part of its data: made once and kept in the user's
cache, about two minutes on two idle cores."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples/smollm2/recipe.toml"
NAME = "small-limit420"
SETTINGS = [
    *("name=small", "data.limit=420", "train.epochs=2", "train.eval_every=100000", "train.checkpoint_every=100000"),
    *("evaluate.decode_prompts=0", "train.seed=0"),
]
# What serving needs of a run; states, optimizer and logs stay behind.
_LEFT_OUT = shutil.ignore_patterns("store", "logs", "optimizer.safetensors", "target_argmax.safetensors", "*.html")


def small_run(folder: Path, target: Path, *more: str) -> Path:
    """A copy, in `folder`, of the finished run, with `more` settings; returns its folder."""
    settings = [*SETTINGS, *more]
    said = [RECIPE.read_text(), (RECIPE.parent / "answers.jsonl.gz").read_bytes().hex(), *settings]
    digest = hashlib.sha256("\n".join(said).encode()).hexdigest()[:12]
    kept = Path.home() / ".cache/eyas/test-runs" / digest
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (kept / NAME).exists():
            _make(kept, target, settings)
    return Path(shutil.copytree(kept / NAME, folder / NAME))


def _make(kept: Path, target: Path, given: list[str]) -> None:
    env = os.environ | {"GOMP_SPINCOUNT": "1000"}
    settings = [word for text in [*given, f"runs_dir={kept / 'making'}"] for word in ("--set", text)]
    settings += ["--set", f"target.path={target}"]
    made = subprocess.run(
        [sys.executable, "-m", "eyas", "run", RECIPE, *settings], env=env, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-3000:]
    shutil.copytree(kept / "making" / NAME, kept / f"{NAME}.partial", ignore=_LEFT_OUT)
    (kept / f"{NAME}.partial").rename(kept / NAME)
    shutil.rmtree(kept / "making")
