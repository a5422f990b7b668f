"""A store of a million small samples: memory and time of plan, index and resume scan.

    python benchmarks/store_scale.py [--samples 1000000] [--folder DIR]

Each phase runs in a process of its own, whose peak memory (torch and all) is read at its end. The writing itself is
done through the ordinary writer and is not counted. The last line is one JSON object.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from eyas.store.format import EngineInfo, Manifest, TargetInfo, sample_id
from eyas.store.plan import PlanEntry
from eyas.store.reader import StoreReader
from eyas.store.verify import verify_store
from eyas.store.writer import StoreWriter
from eyas.tap.encode import encode

TOKENS, HIDDEN, VOCAB = 8, 4, 32_000
MASK = np.arange(TOKENS) >= TOKENS // 2
SHARD_BYTES = 264_000  # a thousand samples: a million samples make a thousand shards
LIMIT_S, LIMIT_BYTES = 60, 1 << 30


@dataclass(frozen=True, slots=True)
class Sample:
    id: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]


def make_samples(count: int) -> Iterator[Sample]:
    for number in range(count):
        ids = np.array([number // VOCAB**place % VOCAB for place in range(TOKENS)], np.int32)
        yield Sample(sample_id(ids, MASK), ids, MASK)


def make(url: str, count: int) -> None:
    """Make the samples' ids, which `prepare` knows in a real run."""
    np.save(f"{url}.npy", np.array([sample.id for sample in make_samples(count)], "S32"))


def entries(url: str) -> Iterator[PlanEntry]:
    for name in np.load(f"{url}.npy"):
        yield PlanEntry(name.decode(), "bench", "train", TOKENS, TOKENS // 2)


def manifest() -> Manifest:
    return Manifest(
        target=TargetInfo(
            path="-", architecture="-", model_digest="-", hidden_size=HIDDEN, vocab_size=VOCAB, num_layers=8
        ),
        tokenizer_digest="-",
        template_digest="-",
        tokens_digest="-",
        aux_layer_ids=[2, 4, 5],
        engine=EngineInfo(kind="-", dtype="bfloat16", version="-"),
        shard_bytes=SHARD_BYTES,
    )


def plan(url: str, count: int) -> None:
    """Deal the samples, write plan and manifest, list what is pending."""
    with StoreWriter.open(url, manifest(), entries(url)) as writer:
        assert sum(len(shard) for shard in writer.pending()) == count


def write(url: str, count: int) -> None:
    """Write all samples; without `close`, so that every part of the index is left to be folded."""
    aux, final = encode(torch.ones(TOKENS, 3, HIDDEN), "bf16"), encode(torch.ones(int(MASK.sum()), HIDDEN), "bf16")
    writer = StoreWriter.open(url, manifest(), entries(url))
    by_shard: dict[int, list[Sample]] = {}
    for sample in make_samples(count):
        by_shard.setdefault(int(writer.plan.shard[writer.plan.find(sample.id)]), []).append(sample)
    for shard in sorted(by_shard):
        for sample in by_shard.pop(shard):
            writer.write_encoded(sample, 0, aux, final)


def index(url: str, count: int) -> None:
    """Resume after a kill: read a thousand parts and fold them into one index."""
    with StoreWriter.open(url, manifest(), entries(url)) as writer:
        assert writer.pending() == []


def resume(url: str, count: int) -> None:
    """Resume scan of a finished store: what is there, what is pending."""
    index(url, count)


def read(url: str, count: int) -> None:
    """Open for training: digest, order of an epoch, 1,000 samples at random."""
    store = StoreReader(url)
    assert len(store.digest) == 32
    order = store.order("train", seed=0, epoch=0)
    assert len(order) == count
    for row in order[:1000].tolist():
        store.read(store.rows.id(row))


def verify(url: str, count: int) -> None:
    """Check everything, the bytes of every hundredth sample."""
    report = verify_store(url, fraction=0.01)
    assert (report.faults, report.written, report.pending) == ([], count, 0)


PHASES = {"make": make, "plan": plan, "write": write, "index": index, "resume": resume, "read": read, "verify": verify}
COUNTED = ("plan", "index", "resume")


def run_phase(name: str, url: str, count: int) -> dict[str, float]:
    """Run a phase in a new process."""
    command = [sys.executable, __file__, "--phase", name, "--url", url, "--samples", str(count)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    print(f"{name:8} {figures['seconds']:7.1f} s  {figures['peak_bytes'] / 1e6:7.0f} MB at most", flush=True)
    return dict(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default: the system's temporary folder"
    )
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.phase:
        start = time.perf_counter()
        PHASES[arguments.phase](arguments.url, arguments.samples)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": round(time.perf_counter() - start, 2), "peak_bytes": peak}))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        phases = {name: run_phase(name, f"{folder}/store", arguments.samples) for name in PHASES}
    counted = [phases[name] for name in COUNTED]
    seconds, peak = sum(phase["seconds"] for phase in counted), max(phase["peak_bytes"] for phase in counted)
    within = seconds <= LIMIT_S and peak <= LIMIT_BYTES
    print(
        json.dumps(
            {
                "samples": arguments.samples,
                "seconds": round(seconds, 1),
                "peak_bytes": peak,
                "within": within,
                "phases": phases,
            }
        )
    )


if __name__ == "__main__":
    main()
