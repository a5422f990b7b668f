"""Kill the store's writer at random points, resume, compare: `make crash KILLS=1000`.

A child is forked from this warm process, writes a store in pieces from two threads, and gets SIGKILL: by its own hand
at a random one of its operations on files, or from outside at a random moment. A second child goes on, killed again at
times, until the store is whole. Then every byte must equal a store that was written without disturbance.

The last line is JSON: {"kills": n, "lost": samples missing or changed, "doubled": samples there twice}.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow as pa  # noqa: E402
import torch  # noqa: E402
from helpers_store import Sample, make_manifest, make_samples, scratch_folder, write_rows, write_store  # noqa: E402

from eyas import fs  # noqa: E402
from eyas.store.reader import StoreReader  # noqa: E402
from eyas.store.verify import verify_store  # noqa: E402
from eyas.store.writer import StoreWriter  # noqa: E402

MANIFEST = make_manifest("fp8", shard_bytes=1500)


class KillingOs:
    """The `os` module, but the process dies by SIGKILL before its nth call that changes the disk."""

    CHANGES = {"open", "pwrite", "fsync", "replace", "rename", "unlink", "mkdir", "posix_fallocate"}

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __getattr__(self, name: str) -> Any:
        if name in self.CHANGES:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return getattr(os, name)


def write_on(url: str, samples: list[Sample], rejected: set[str], seed: int) -> None:
    """Write what is pending, the samples of a shard in random order and pieces, by two threads; for odd seeds a third
    one commits."""
    rng, by_id = random.Random(seed), {sample.id: sample for sample in samples}
    with (
        StoreWriter.open(url, MANIFEST, [sample.entry for sample in samples]) as writer,
        writer.committing_behind() if seed % 2 else nullcontext(),
        ThreadPoolExecutor(2) as pool,
    ):
        for ids in writer.pending():
            pieces = [piece for name in ids if name not in rejected for piece in _pieces(by_id[name], rng)]
            rng.shuffle(pieces)
            list(pool.map(lambda piece: write_rows(writer, *piece), pieces))
            for name in ids:
                if name in rejected:
                    writer.reject(name, "NaN")


def _pieces(sample: Sample, rng: random.Random) -> Iterator[tuple[Sample, int, int]]:
    total = len(sample.token_ids)
    cut = rng.randint(0, total)
    yield from ((sample, start, end) for start, end in ((0, cut), (cut, total)) if start < end)


def in_child(url: str, samples: list[Sample], rejected: set[str], seed: int, calls: int, after_s: float) -> bool:
    """Run `write_on` in a fork that dies at its `calls`th operation or after `after_s`; whether it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)  # makes its pool anew after the fork, before two threads would race for it
            if calls:
                fs.os = KillingOs(calls)
            write_on(url, samples, rejected, seed)
            code = 0
        except BaseException:  # a fork must not return into the parent's code
            traceback.print_exc()
        finally:
            os._exit(code)
    if after_s:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise AssertionError(f"the writer failed after a kill (seed {seed}); its traceback is above")
    return os.WIFSIGNALED(status)


def crash(kills: int, seed: int = 0) -> dict[str, int]:
    """Kill writers until there were `kills`; figures of the last line."""
    rng, found = random.Random(seed), {"kills": 0, "lost": 0, "doubled": 0}
    samples = make_samples(16, seed)
    rejected = {samples[4].id}
    with scratch_folder() as folder:
        write_store(str(folder / "whole"), samples, MANIFEST, rejected)
        expected, digest = contents(folder / "whole"), StoreReader(str(folder / "whole")).digest
        counter = KillingOs(0)
        fs.os = counter
        started = time.monotonic()
        write_on(str(folder / "counted"), samples, rejected, 0)
        duration_s, calls = time.monotonic() - started, -counter.left
        fs.os = os
        while found["kills"] < kills:
            store = folder / f"store{found['kills']}"
            while True:
                by_call = rng.random() < 0.6
                at_call, after_s = (rng.randint(1, calls), 0.0) if by_call else (0, rng.uniform(0.001, duration_s))
                if rng.random() < 0.3 and store.is_dir():  # let it come to its end at times
                    at_call, after_s = 0, 0.0
                killed = in_child(str(store), samples, rejected, rng.randrange(1 << 30), at_call, after_s)
                found["kills"] += killed
                if not killed:
                    break
            compare(store, samples, expected, digest, found)
            fs_remove(store)
    return found


def compare(store: Path, samples: list[Sample], expected: dict[str, bytes], digest: str, found: dict[str, int]) -> None:
    """Add what is missing, different or there twice in a finished store."""
    rows: pa.Table = StoreReader(str(store)).rows.table
    times = Counter(rows["sample_id"].to_pylist())
    found["lost"] += sum(times[sample.id] == 0 for sample in samples)
    found["doubled"] += sum(count > 1 for count in times.values())
    report = verify_store(str(store))
    if report.faults or report.digest != digest or contents(store) != expected:
        found["lost"] += max(1, len(report.recapture))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes; of the index the names only: its fp8 errors depend on the pieces (its digest does not)."""
    index = ("index.parquet", *(path.name for path in (folder / "shards").glob("*.parquet")))
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): b"" if path.name in index else path.read_bytes() for path in files}


def fs_remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = crash(arguments.kills, arguments.seed)
    print(json.dumps(found))
    sys.exit(0 if found["lost"] == found["doubled"] == 0 else 1)


if __name__ == "__main__":
    main()
