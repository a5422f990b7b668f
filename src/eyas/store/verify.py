"""Proof that a store holds what was written: every byte of every file is covered by some check here.

manifest.json by its own digest; plan.parquet by the manifest; index.parquet and its parts by their checksums and by one
another; headers and sizes of shards by plan and manifest; the bytes of every sample by the checksums in the index.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash

from eyas.errors import CorruptStore
from eyas.progress import Progress
from eyas.store import index
from eyas.store.files import Files, open_files, refuse_foreign
from eyas.store.format import (
    INDEX,
    MANIFEST,
    PLAN,
    Manifest,
    ShardLayout,
    Tensor,
    parse_manifest,
    part_name,
    sample_id,
    shard_name,
    tensors,
)
from eyas.store.plan import SCHEMA, Plan, Rows
from eyas.store.reader import load_plan
from eyas.store.tables import parse_table
from eyas.tap.encode import DTYPES, FAULT_NAMES, FINE, row_faults


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        file: name within the store.
        text: what is wrong with it.
        sample: the sample it concerns, or "".
    """

    file: str
    text: str
    sample: str = ""

    def __str__(self) -> str:
        return f"{self.file}: " + (f"sample {self.sample}: " if self.sample else "") + self.text


@dataclass
class Report:
    """What verify found.

    Attributes:
        faults: everything wrong, in order of files.
        bad_shards: shards that capture must make again.
        recapture: ids of the samples in them.
        written, rejected (by reason), pending: samples; they add up to the plan's.
        checked: samples whose bytes were read.
        digest: the store's, as StoreReader.digest.
    """

    faults: list[Fault] = field(default_factory=list)
    bad_shards: list[int] = field(default_factory=list)
    recapture: list[str] = field(default_factory=list)
    written: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    checked: int = 0
    digest: str = ""


def verify_store(url: str, *, fraction: float = 1.0, workers: int = 0, logs_dir: Path | None = None) -> Report:
    """Check a store.

    Args:
        url: the store.
        fraction: share of the samples whose bytes are read, at least one a shard; all else is checked in full.
        workers: threads; 0: as many as cores, at most 8.
        logs_dir: where `eyas status` looks for progress.
    Raises: StoreError where there is no store; CorruptStore where the manifest, on which all rests, is damaged.
    """
    files = open_files(url)
    refuse_foreign(files)
    manifest = parse_manifest(files.read(MANIFEST), files.name(MANIFEST))
    sizes = files.sizes()
    faults: list[Fault] = []
    plan = _plan(files, manifest, sizes, faults)
    bad: set[int] = set()
    rows = Rows(_index(files, manifest, sizes, faults, bad))
    shards = sorted(index.committed_shards(sizes))
    _orphans(sizes, plan, set(rows.shard.tolist()), faults)
    bad |= {shard for shard in shards if not _as_planned(shard, rows, plan, faults)}
    job = _ShardCheck(files, manifest, rows, fraction)
    report = Report(digest=index.digest(manifest, rows.table))
    with (
        Progress("verify", len(rows), "samples", logs_dir) as progress,
        ThreadPoolExecutor(workers or min(os.cpu_count() or 1, 8)) as pool,
    ):
        todo = [shard for shard in shards if shard not in bad]
        for shard, (checked, found) in zip(todo, pool.map(job, todo), strict=True):
            report.checked += checked
            faults += found
            bad |= {shard} if found else set()
            progress.advance(len(job.rows_of(shard)), f"{len(faults)} faults")
    report.faults, report.bad_shards = faults, sorted(bad)
    _account(report, rows, plan)
    return report


def repair_store(url: str, report: Report) -> None:
    """Drop the bad shards, so that `capture` makes just those again, and mend the index from its second copy."""
    files = open_files(url)
    files.lock()
    try:
        manifest = parse_manifest(files.read(MANIFEST), files.name(MANIFEST))
        rows = _index(files, manifest, files.sizes(), [], set())
        # The index first: a shard that comes back after a power cut has its own part, but stale rows would outlive it.
        index.write(files, index.only(rows, index.committed_shards(files.sizes()) - set(report.bad_shards)))
        files.drop(shard_name(shard) for shard in report.bad_shards)
    finally:
        files.unlock()


def _plan(files: Files, manifest: Manifest, sizes: dict[str, int], faults: list[Fault]) -> Plan | None:
    if PLAN not in sizes:
        faults.append(Fault(PLAN, "missing; capture writes it anew"))
        return None
    try:
        return load_plan(files, manifest)
    except CorruptStore as error:
        faults.append(Fault(PLAN, f"{error.seen.partition(': ')[2]}; capture writes it anew"))
        return None


def _index(files: Files, manifest: Manifest, sizes: dict[str, int], faults: list[Fault], bad: set[int]) -> pa.Table:
    """Rows of all committed shards, from whichever copy is sound; the two must agree. Missing shards are `bad`."""
    schema = index.schema(manifest)

    def parse(name: str) -> pa.Table:
        if name not in sizes:
            return None
        try:
            return parse_table(files.read(name), files.name(name), schema)
        except CorruptStore as error:
            faults.append(Fault(name, error.seen.partition(": ")[2]))
            return None

    folded = parse(INDEX)
    folded = schema.empty_table() if folded is None else folded
    tables, committed = [schema.empty_table()], index.committed_shards(sizes)
    for shard in sorted(set(pc.unique(folded["shard"]).to_pylist()) - committed):
        faults.append(Fault(shard_name(shard), f"missing; {INDEX} has its samples"))
        bad.add(shard)
    for shard in sorted(committed):
        part, rows = parse(part_name(shard)), folded.filter(pc.equal(folded["shard"], shard))
        if part is not None and len(rows) and not part.equals(rows.combine_chunks()):
            faults.append(Fault(part_name(shard), f"differs from {INDEX}"))
        tables.append(rows if len(rows) else schema.empty_table() if part is None else part)
    return pa.concat_tables(tables).combine_chunks()


def _orphans(sizes: dict[str, int], plan: Plan | None, indexed: set[int], faults: list[Fault]) -> None:
    known = {MANIFEST, PLAN, INDEX}
    shards = set(range(plan.shards)) if plan else indexed
    known |= {part_name(shard) for shard in shards} | {shard_name(shard) for shard in shards}
    faults += [Fault(name, "not a file of this store; remove it") for name in sorted(sizes.keys() - known)]


def _as_planned(shard: int, rows: Rows, plan: Plan | None, faults: list[Fault]) -> bool:
    """Whether the index has exactly the planned rows of a committed shard."""
    first, last = np.searchsorted(rows.shard, [shard, shard + 1])
    if first == last:
        faults.append(Fault(shard_name(shard), "no rows in the index"))
        return False
    if plan is None:
        return True
    planned = plan.table.slice(plan.rows(shard).start, len(plan.rows(shard))) if shard < plan.shards else None
    if planned is None or not rows.table.slice(first, last - first).select(SCHEMA.names).equals(planned):
        faults.append(Fault(shard_name(shard), "its rows in the index are not those of the plan"))
        return False
    return True


class _ShardCheck:
    """Reads one shard and says what is wrong in it; called from many threads."""

    def __init__(self, files: Files, manifest: Manifest, rows: Rows, fraction: float) -> None:
        self.files, self.manifest, self.rows, self.fraction = files, manifest, rows, fraction
        self.tensors = tensors(manifest)
        self.rejected = ~rows.equal("rejected", "")
        self.checksums = {t.name: rows.table[index.checksum_column(t.name)] for t in self.tensors}

    def rows_of(self, shard: int) -> range:
        return range(*(int(place) for place in np.searchsorted(self.rows.shard, [shard, shard + 1])))

    def __call__(self, shard: int) -> tuple[int, list[Fault]]:
        name, rows = shard_name(shard), self.rows_of(shard)
        chosen: Sequence[int] = rows
        if self.fraction < 1:
            count = max(1, round(self.fraction * len(rows)))
            chosen = sorted(np.random.default_rng([0, shard]).choice(rows, count, replace=False).tolist())
        counts = (self.rows.tokens[rows.start : rows.stop], self.rows.supervised[rows.start : rows.stop])
        layout = ShardLayout(self.tensors, shard, int(counts[0].sum()), int(counts[1].sum()))
        with self.files.local(name).open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if size != layout.size:
                return 0, [Fault(name, f"{size:,} bytes, by the plan {layout.size:,}")]
            if handle.read(len(layout.header)) != layout.header:
                return 0, [Fault(name, "its header is not the one that manifest and plan give")]
            found = [
                Fault(name, text, self.rows.id(row)) for row in chosen for text in self._sample(handle, layout, row)
            ]
        return len(chosen), found

    def _sample(self, handle: Any, layout: ShardLayout, row: int) -> Iterator[str]:
        raw = {tensor.name: self._read(handle, layout, tensor, row) for tensor in self.tensors}
        for name, data in raw.items():
            if xxhash.xxh3_128_digest(data) != self.checksums[name][row].as_py():
                yield f"checksum of {name}"
                return
        if self.rejected[row]:
            if any(np.frombuffer(data, np.uint8).any() for data in raw.values()):
                yield "rejected, but its bytes are not zero"
            return
        ids, mask = np.frombuffer(raw["token_ids"], "<i4"), np.frombuffer(raw["loss_mask"], np.uint8)
        if sample_id(ids, mask.astype(bool)) != self.rows.id(row) or mask.max() > 1:
            yield "token ids and mask have another digest than its id"
        if int(mask.sum()) != self.rows.supervised[row]:
            yield f"{mask.sum()} supervised tokens, by the plan {self.rows.supervised[row]}"
        if ids.min() < 0 or ids.max() >= self.manifest.target.vocab_size:
            yield f"token id {ids.min()} or {ids.max()} outside the vocabulary"
        yield from self._values(raw)

    def _values(self, raw: dict[str, bytearray]) -> Iterator[str]:
        for kind, encoding in (("aux", self.manifest.encoding), ("final", self.manifest.final_encoding)):
            data = raw[f"{kind}_hidden_states"]
            if not data:
                continue
            values = torch.frombuffer(data, dtype=DTYPES[encoding]).view(-1, self.manifest.target.hidden_size)
            scales = torch.frombuffer(raw[f"{kind}_scales"], dtype=torch.float32) if encoding == "fp8" else None
            bad = row_faults(values, scales)
            for fault in sorted(set(bad.tolist()) - {FINE}):
                count, first = int((bad == fault).sum()), int((bad == fault).nonzero()[0])
                layers = len(self.manifest.aux_layer_ids) if kind == "aux" else 1
                yield f"{kind}_hidden_states: {count} rows with {FAULT_NAMES[fault]}, first at row {first // layers}"

    def _read(self, handle: Any, layout: ShardLayout, tensor: Tensor, row: int) -> bytearray:
        first, count = (
            (self.rows.first_final[row], self.rows.supervised[row])
            if tensor.supervised
            else (self.rows.first_token[row], self.rows.tokens[row])
        )
        data = bytearray(int(count) * tensor.row_bytes)
        handle.seek(layout.starts[tensor.name] + int(first) * tensor.row_bytes)
        handle.readinto(data)
        return data


def _account(report: Report, rows: Rows, plan: Plan | None) -> None:
    reasons = Counter(reason for reason in rows.table["rejected"].to_pylist() if reason)
    report.rejected = dict(sorted(reasons.items()))
    report.written = len(rows) - sum(reasons.values())
    report.pending = (len(plan) if plan else len(rows)) - len(rows)
    source: Iterable[int] = report.bad_shards
    for shard in source:
        if plan and shard < plan.shards:
            report.recapture += [plan.id(row) for row in plan.rows(shard)]
        else:
            report.recapture += [rows.id(row) for row in np.flatnonzero(rows.shard == shard).tolist()]
