"""Does training from an fp8 store cost acceptance? The same samples, both encodings, several seeds.

    python benchmarks/fp8_store.py [--work DIR] [--seeds 3] [--epochs 4] [--samples 0]

Captures the demo's samples once per encoding, trains each seed from both stores with the same order of samples and the
same initial weights, and replays held-out answers (a third of the training records is held out too, so that more than
10,000 verifications are walked). `--samples` takes only so many of the samples, for machines without a GPU. Prints a
line a run and, last, one JSON object: the mean difference of acceptance length fp8 - bf16, its standard error over the
paired seeds, and whether |difference| <= 0.02 + 1 standard error. With CUDA and a clean tree the object is kept in
benchmarks/results/fp8_store.json.
"""

import argparse
import gzip
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from results import machine_facts, save_result

from eyas.run import Run, open_run
from eyas.stages import run_stage

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = 0.02
LEAST_STEPS = 10_000


def write_records(folder: Path) -> None:
    """The demo's records with every third training record held out."""
    with gzip.open(ROOT / "examples/smollm2/answers.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    for record in records[::3]:
        record["split"] = "heldout"
    (folder / "answers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    recipe = (ROOT / "examples/smollm2/recipe.toml").read_text(encoding="utf-8")
    (folder / "recipe.toml").write_text(recipe.replace("answers.jsonl.gz", "answers.jsonl"), encoding="utf-8")


def open_one(work: Path, encoding: str, seed: int, epochs: float, samples: int) -> Run:
    """A run of its own for each encoding and seed; the store is shared by the seeds."""
    settings = [f"name={encoding}-{seed}", f"runs_dir={work / 'runs'}", f"store.url={work / 'store' / encoding}"]
    settings += [f"store.encoding={encoding}", f"train.seed={seed}", f"train.epochs={epochs}"]
    settings.append(f"data.limit={samples}")
    return open_run(work / "recipe.toml", [*settings, "evaluate.decode_prompts=0"])


def measure(run: Run) -> tuple[float, int]:
    """Acceptance length and verifications of a run."""
    for stage in ("prepare", "capture", "verify", "train", "evaluate"):
        run_stage(run, stage)
    result = json.loads((run.dir / "eval.json").read_text(encoding="utf-8"))
    return result["acceptance_length"], result["replay"]["verifications"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=None, help="folder to work in (default: a temporary one)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--samples", type=int, default=0, help="samples taken, held-out ones included; 0: all")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="eyas-fp8-"))
    work.mkdir(parents=True, exist_ok=True)
    write_records(work)
    repeats = []
    for seed in range(arguments.seeds):
        row: dict[str, float] = {"seed": seed}
        for encoding in ("bf16", "fp8"):
            run = open_one(work, encoding, seed, arguments.epochs, arguments.samples)
            row[encoding], steps = measure(run)
            row[f"{encoding}_verifications"] = steps
        repeats.append(row)
        print(f"seed {seed}: bf16 {row['bf16']:.4f}, fp8 {row['fp8']:.4f}, difference {row['fp8'] - row['bf16']:+.4f}")
    differences = [row["fp8"] - row["bf16"] for row in repeats]
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    least = min(min(row["bf16_verifications"], row["fp8_verifications"]) for row in repeats)
    passed = abs(mean) <= ALLOWED + error and least >= LEAST_STEPS
    result = {"difference": round(mean, 5), "standard_error": round(error, 5), "allowed": ALLOWED, "passed": passed}
    result |= {
        "verifications_each": least,
        "epochs": arguments.epochs,
        "samples": arguments.samples,
        "repeats": repeats,
    } | machine_facts()
    if torch.cuda.is_available():
        save_result("fp8_store", result)
    print(json.dumps(result))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
