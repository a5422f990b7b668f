"""The store against the disk and against the peers' layouts.

    python benchmarks/store.py [--folder DIR] [--gib 2] [--repeats 6]

Write and read: a store of bf16 states, checksums and value checks on, beside plain write() and read() of the same bytes
with the same fsyncs. They take turns in going first, and the best of the repeats counts: the disk of a shared or
virtual machine throttles what comes second. Reads are cold (the page cache is dropped before each) and cached.
Bytes per token: the same samples in this store and in the peers' files, written by their own rules.
The last line is one JSON object.
"""

import argparse
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import safetensors.torch
import torch

from eyas import fs
from eyas.store.format import EngineInfo, Manifest, TargetInfo, part_name, sample_bytes, sample_id, shard_name, tensors
from eyas.store.plan import PlanEntry, deal
from eyas.store.reader import StoreReader
from eyas.store.writer import StoreWriter

LONGEST = 2048
PEER_BATCH = 32  # SpecForge's default --batch-size
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Sample:
    id: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]

    @property
    def entry(self) -> PlanEntry:
        return PlanEntry(self.id, "bench", "train", len(self.token_ids), int(self.loss_mask.sum()))


def make_samples(share: float, tokens: int, seed: int = 0) -> Iterator[Sample]:
    """Samples with lognormal lengths (median 400, at most 2,048 tokens), the last `share` of each supervised."""
    rng, made = np.random.default_rng(seed), 0
    while made < tokens:
        length = int(np.clip(rng.lognormal(np.log(400), 0.8), 16, LONGEST))
        ids, mask = rng.integers(0, 32_000, length).astype(np.int32), np.arange(length) >= length * (1 - share)
        made += length
        yield Sample(sample_id(ids, mask), ids, mask)


def make_manifest(hidden: int, encoding: str = "bf16", final_encoding: str = "bf16") -> Manifest:
    target = TargetInfo(
        path="-", architecture="-", model_digest="-", hidden_size=hidden, vocab_size=32_000, num_layers=32
    )
    return Manifest(
        target=target,
        tokenizer_digest="-",
        template_digest="-",
        tokens_digest="-",
        aux_layer_ids=[2, 16, 29],
        encoding=encoding,
        final_encoding=final_encoding,
        engine=EngineInfo(kind="-", dtype="bfloat16", version="-"),
        shard_bytes=1 << 30,
    )


class States:
    """Random states from one pool that no cache holds."""

    def __init__(self, hidden: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.aux = torch.randn(LONGEST, 3, hidden, generator=generator).bfloat16()
        self.final = torch.randn(LONGEST, hidden, generator=generator).bfloat16()

    def of(self, sample: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        return self.aux[: len(sample.token_ids)], self.final[: int(sample.loss_mask.sum())]


def write_store(folder: Path, samples: list[Sample], manifest: Manifest, states: States) -> None:
    by_id = {sample.id: sample for sample in samples}
    with StoreWriter.open(str(folder), manifest, [sample.entry for sample in samples]) as writer:
        for name in (name for shard in writer.pending() for name in shard):
            writer.write(by_id[name], 0, *states.of(by_id[name]))


def write_plain(folder: Path, samples: list[Sample], manifest: Manifest, states: States) -> None:
    """The same bytes with write(), and the fsyncs and renames that a commit of the store does."""
    plan, by_id = deal([sample.entry for sample in samples], manifest), {sample.id: sample for sample in samples}
    for name in ("plan", "manifest"):
        fs.write_atomic(folder / name, bytes(len(plan) * 60))
    for shard in range(plan.shards):
        partial, final = folder / f"partial-{shard}", folder / shard_name(shard)
        final.parent.mkdir(exist_ok=True)
        with partial.open("wb", buffering=0) as handle:
            for sample in (by_id[plan.id(row)] for row in plan.rows(shard)):
                for part in states.of(sample):
                    handle.write(part.reshape(-1).view(torch.uint8).numpy())
                handle.write(sample.token_ids.tobytes() + sample.loss_mask.tobytes())
        fs.write_atomic(folder / part_name(shard), bytes(len(plan.rows(shard)) * 150))
        fs.commit_file(partial, final)


def read_store(folder: Path) -> None:
    store = StoreReader(str(folder))
    for ref in store.samples():
        store.read(ref.sample_id)


def read_plain(folder: Path) -> None:
    buffer = bytearray(READ_BYTES)
    for path in sorted((folder / "shards").glob("*.safetensors")):
        with path.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def seconds(action: Callable[..., None], *arguments: Any) -> float:
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


def speed(hidden: int, gib: float, repeats: int, folder: Path) -> dict[str, float]:
    """GB/s of the store and of plain system calls, and their ratios."""
    manifest, states = make_manifest(hidden), States(hidden)
    per_token = sample_bytes(tensors(manifest), 1000, 500) / 1000
    samples = list(make_samples(0.5, int(gib * 2**30 / per_token)))
    total = sum(sample_bytes(tensors(manifest), s.entry.tokens, s.entry.supervised) for s in samples)
    times: dict[str, list[float]] = {
        name: [] for name in ("write", "plain write", "read", "plain read", "read cached", "plain read cached")
    }
    for turn in range(repeats):
        store, plain = folder / f"store{turn}", folder / f"plain{turn}"
        plain.mkdir()
        writers = [("write", write_store, store), ("plain write", write_plain, plain)]
        for name, writer, place in writers[:: 1 if turn % 2 else -1]:
            os.sync()
            times[name].append(seconds(writer, place, samples, manifest, states))
        readers = [("read", read_store), ("plain read", read_plain)][:: 1 if turn % 2 else -1]
        for name, reader in readers:
            drop_cache(store)
            times[name].append(seconds(reader, store))
        for name, reader in readers:
            reader(store)
            times[f"{name} cached"].append(seconds(reader, store))
        shutil.rmtree(store)
        shutil.rmtree(plain)
    rates = {name: total / min(values) / 1e9 for name, values in times.items()}
    for name, rate in rates.items():
        spread = ", ".join(f"{total / value / 1e9:.2f}" for value in times[name])
        print(f"H={hidden}  {name:18} {rate:6.2f} GB/s   ({spread})")
    pairs_of = (("write_ratio", "write"), ("read_ratio", "read"), ("read_ratio_cached", "read cached"))
    return {ratio: round(rates[name] / rates[f"plain {name}"], 3) for ratio, name in pairs_of} | {
        f"{name.replace(' ', '_')}_gb_s": round(rate, 3) for name, rate in rates.items()
    }


def store_size(folder: Path, samples: list[Sample], manifest: Manifest, states: States) -> int:
    """All bytes of a store: shards, index with its parts, plan, manifest."""
    write_store(folder, samples, manifest, states)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    return size


def speculators_size(samples: list[Sample], states: States) -> int:
    """speculators 0.9: an Arrow stream, and hs_ROW.safetensors with hidden_states [S, 4, H] and token_ids int64 [S]."""
    ids, masks = ([getattr(s, name).astype(np.int64) for s in samples] for name in ("token_ids", "loss_mask"))
    table = pa.table({"input_ids": ids, "loss_mask": masks, "seq_len": [len(row) for row in ids]})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    size = len(sink.getvalue())
    for sample in samples:
        tokens = len(sample.token_ids)
        hidden = torch.cat([states.aux[:tokens], states.final[:tokens].unsqueeze(1)], 1)
        size += len(
            safetensors.torch.save({"hidden_states": hidden, "token_ids": torch.from_numpy(sample.token_ids).long()})
        )
    return size


def specforge_size(samples: list[Sample], states: States) -> int:
    """SpecForge: torch.save of one dict a sample, each padded to the longest of its batch of 32, in the given order."""
    size = 0
    for first in range(0, len(samples), PEER_BATCH):
        batch = samples[first : first + PEER_BATCH]
        longest = max(len(sample.token_ids) for sample in batch)
        for sample in batch:
            pad = (0, longest - len(sample.token_ids))
            record = {
                "input_ids": torch.from_numpy(np.pad(sample.token_ids, pad).astype(np.int64)),
                "loss_mask": torch.from_numpy(np.pad(sample.loss_mask, pad).astype(np.int64)),
                "aux_hidden_state": states.aux[:longest].reshape(1, longest, -1).clone(),
                "hidden_state": states.final[:longest].unsqueeze(0).clone(),
            }
            sink = io.BytesIO()
            torch.save(record, sink)
            size += len(sink.getvalue())
    return size


def sizes(hidden: int, folder: Path) -> dict[str, dict[str, float]]:
    """Supervised share -> layout -> bytes per token, over 64 samples."""
    states, found = States(hidden), {}
    for share in (0.2, 0.5, 1.0):
        samples = [sample for sample, _ in zip(make_samples(share, 1 << 40), range(2 * PEER_BATCH), strict=False)]
        tokens = sum(len(sample.token_ids) for sample in samples)
        row: dict[str, Any] = {
            f"eyas {name}": store_size(folder / "sizes", samples, make_manifest(hidden, *encodings), states)
            for name, encodings in (("bf16", ()), ("fp8", ("fp8",)), ("fp8, final fp8", ("fp8", "fp8")))
        }
        if not found:  # the peers store every row, whatever the share
            peers = {"speculators": speculators_size(samples, states), "SpecForge": specforge_size(samples, states)}
        found[str(share)] = {name: round(size / tokens, 1) for name, size in (row | peers).items()}
        cells = "  ".join(f"{name} {value:,.0f}" for name, value in found[str(share)].items())
        print(f"H={hidden}  supervised {share:3}  bytes per token: {cells}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write; default: the system's temporary folder"
    )
    parser.add_argument("--gib", type=float, default=2.0, help="size of each store for speed, GiB")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 7168])
    parser.add_argument("--skip-sizes", action="store_true", help="speed only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        speeds = {f"H{h}": speed(h, arguments.gib, arguments.repeats, folder) for h in arguments.hidden}
        tables = {} if arguments.skip_sizes else {f"H{h}": sizes(h, folder) for h in arguments.hidden}
    half = [row["0.5"]["eyas fp8"] / min(row["0.5"]["speculators"], row["0.5"]["SpecForge"]) for row in tables.values()]
    figures = {
        name: min(row[name] for row in speeds.values()) for name in ("write_ratio", "read_ratio", "read_ratio_cached")
    }
    figures |= {
        "bytes_per_token": tables,
        "fp8_ratio_to_peers_at_half": round(max(half, default=0.0), 4),
        "speed": speeds,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
