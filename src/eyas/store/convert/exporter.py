"""A store into another tool's folder."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas import fs
from eyas.errors import ManifestMismatch, StoreError
from eyas.progress import Progress
from eyas.store.convert.formats import conventions, open_sink
from eyas.store.convert.peer import MARKER, Heads
from eyas.store.convert.tail import FinalNorm
from eyas.store.reader import SampleRef, StoreReader
from eyas.target import Target

_AT_ONCE = 256


@dataclass
class ExportReport:
    """What was written.

    Attributes:
        samples, tokens: in the folder.
        empty_rows: final states that the store doesn't have, because nothing learns from them; written as zeros.
        ends: of those, rows right after an answer's last token.
        aux_layer_ids, tool_layer_ids: of the three layers, by our meaning and by the tool's.
    """

    samples: int
    tokens: int
    empty_rows: int
    ends: int
    aux_layer_ids: list[int]
    tool_layer_ids: list[int]


def export_store(
    name: str, url: str, folder: Path, *, target: Target | None, split: str | None = None, compress: bool = False
) -> ExportReport:
    """Write the samples of a store as another tool's folder; a stopped export goes on where it was.

    Samples of `train` come first, then `heldout`, each in plan order: tools that hold out the last share get ours.
    Args:
        target: needed for tools that keep the final state before the norm, whose weight is divided out.
        compress: gzip (SpecForge only).
    Raises: StoreError where the folder holds something else; ManifestMismatch for another target.
    """
    told, store = conventions(name), StoreReader(url)
    norm = None
    if told.final_state == "pre_norm":
        norm = FinalNorm(_same_target(store, target, told.tool))
    if compress and name != "specforge":
        raise StoreError(f"--compress with {name}", expected="only with specforge, which reads .ckpt.gz")
    refs = sorted(store.samples(split), key=lambda ref: ref.split != "train")
    if not refs:
        raise StoreError(f"{url}: no sample" + (f" of split {split!r}" if split else ""))
    ours = store.manifest.aux_layer_ids
    report = ExportReport(len(refs), sum(ref.tokens for ref in refs), 0, 0, ours, told.from_ours(ours))
    _claim(folder, {"format": name, "store": store.digest, "split": split or "", "compress": compress})
    sink = open_sink(name, folder, compress)

    def job(row: int) -> tuple[int, int]:
        sample = store.read(refs[row].sample_id)
        mask = sample.loss_mask
        final = torch.zeros(len(mask), store.manifest.target.hidden_size, dtype=torch.bfloat16)
        kept = sample.final_hidden_states
        final[mask] = kept if norm is None else norm.to_pre(kept)
        sink.write(row, sample.token_ids.long(), mask.long(), sample.aux_hidden_states, final)
        return len(mask) - len(kept), int((mask[:-1] & ~mask[1:]).sum())

    with (
        Progress("export", len(refs), "samples", None) as progress,
        ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool,
    ):
        for rows in _chunks(len(refs)):
            for empty, ends in pool.map(job, rows):
                report.empty_rows, report.ends = report.empty_rows + empty, report.ends + ends
                progress.advance(1)
    sink.finish(_heads(store, refs, report, split))
    return report


def _same_target(store: StoreReader, target: Target | None, tool: str) -> Target:
    theirs = store.manifest.target
    if target is None:
        raise StoreError(
            f"{tool} keeps final states before the target's last norm, the store has them after it",
            expected=f"the target's folder, for the norm's weight (it was at {theirs.path})",
            next="--target DIR",
        )
    if target.model_digest != theirs.model_digest:
        raise ManifestMismatch(
            f"{store.files.where}: target.model_digest is {theirs.model_digest!r} in the store",
            expected=f"{target.model_digest!r}, of {target.path}",
            cause="captured from another target",
            next=f"name that one with --target (it was at {theirs.path})",
        )
    return target


def _claim(folder: Path, content: dict[str, object]) -> None:
    """Mark the folder as the export of this store, before anything is in it."""
    marker = folder / MARKER
    if marker.is_file():
        found = json.loads(marker.read_text(encoding="utf-8"))
        for key, value in content.items():
            if found.get(key) != value:
                raise StoreError(
                    f"{folder}: an export with {key} {found.get(key)!r} is here",
                    expected=repr(value),
                    next="choose another folder, or remove this one",
                )
        for left in folder.rglob(f"{fs.PARTIAL_PREFIX}*"):
            fs.remove(left)
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise StoreError(f"{folder}: not empty", expected="a new folder, or an unfinished export of the same store")
    fs.make_folder(folder)
    fs.write_json(marker, content)


def _chunks(count: int) -> Iterator[range]:
    for first in range(0, count, _AT_ONCE):
        yield range(first, min(first + _AT_ONCE, count))


def _heads(store: StoreReader, refs: list[SampleRef], report: ExportReport, split: str | None) -> Heads:
    target = store.manifest.target
    return Heads(
        [ref.tokens for ref in refs],
        store.token_counts(split),
        report.tool_layer_ids,
        target.num_layers,
        target.hidden_size,
        target.path,
    )
