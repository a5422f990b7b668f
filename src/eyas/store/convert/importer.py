"""Another tool's folder into a store."""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from eyas import fs
from eyas.errors import StoreError, TargetError
from eyas.progress import Progress
from eyas.store.convert.formats import conventions, open_source
from eyas.store.convert.peer import BadFile, Conventions, FinalState, Head, Source
from eyas.store.convert.tail import FinalNorm, Fit
from eyas.store.format import AUX_LAYERS, Encoding, EngineInfo, Manifest, TargetInfo, sample_id
from eyas.store.plan import PlanEntry
from eyas.store.reader import StoreReader
from eyas.store.writer import BadStates, StoreWriter
from eyas.target import Target

_FIT_SAMPLES = 8
_CONTRADICTED = 1.0  # nats a token; SmolLM2-135M: -0.7 with the right convention, -9.6 and -7.7 with the wrong ones


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What a folder doesn't say.

    Attributes:
        aux_layer_ids: our ids of the three aux layers, or
        tool_layer_ids: those that the tool was given; both None where the folder records them.
        final_state: None: what the tool's own writer stores, unless the text contradicts it.
        source: name of the samples' source; "": the folder's name.
        heldout: share of samples that go to the split `heldout`, by their ids.
        pad_id: unsupervised tokens of this id at a sample's end are padding and cut off; None: none are.
        skip_bad_files: leave out files that give no sample, and count them.
    """

    aux_layer_ids: list[int] | None = None
    tool_layer_ids: list[int] | None = None
    final_state: FinalState | None = None
    encoding: Encoding = "bf16"
    final_encoding: Encoding = "bf16"
    shard_bytes: int = 1 << 30
    source: str = ""
    heldout: float = 0.0
    pad_id: int | None = None
    skip_bad_files: bool = False


@dataclass
class ImportReport:
    """What was done.

    Attributes:
        read: samples in the folder; = written + rejected, by reason.
        aux_layer_ids, tool_layer_ids: of the three layers, by our meaning and by the tool's.
        final_state: of the folder; the store's are always post-norm.
        fit: mean log-probability of the next supervised token with final states taken as the folder is said to have
            them, then the other way, then positions; None: not measured, because of `unchecked`.
        repeated_tail: unsupervised tokens that only repeat one id at the ends of samples: likely padding.
    """

    read: int
    aux_layer_ids: list[int]
    tool_layer_ids: list[int]
    final_state: FinalState
    written: int = 0
    tokens: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    fit: tuple[float, float, int] | None = None
    unchecked: str = ""
    repeated_tail: int = 0
    dtype: str = ""
    digest: str = ""


def import_folder(name: str, folder: Path, url: str, target: Target, options: ImportOptions) -> ImportReport:
    """Convert a folder into the store at `url`; a stopped import goes on where it was.

    The folder is read twice: once for ids and masks, which the plan needs, once for the states.
    Raises: BadFile for the first file that gives no sample, unless those are skipped; StoreError where the folder is
        of another format or target, or where something must be said that isn't.
    """
    told, source = conventions(name), open_source(name, folder)
    ours = _layer_ids(told, source, target, options)
    final_state = options.final_state or told.final_state
    report = ImportReport(len(source), ours, told.from_ours(ours), final_state)
    norm = FinalNorm(target) if final_state == "pre_norm" else None
    rows, entries = _scan(source, target, folder, options, report)
    report.dtype = str(source.states(next(iter(rows.values())))[0].dtype).removeprefix("torch.")
    report.fit, report.unchecked = _fit(source, target, rows, options, final_state)
    _refuse_unfit(told, report, options)
    manifest = _manifest(told, target, report, entries, options)
    with (
        StoreWriter.open(url, manifest, entries) as writer,
        ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool,
        Progress("import", len(entries), "samples", None) as progress,
    ):
        job = _Job(source, writer, rows, norm, options)
        pending = writer.pending()
        progress.advance(len(entries) - sum(map(len, pending)))
        for shard in pending:
            for _ in pool.map(job, shard):
                progress.advance(1)
    return _finish(report, url)


class _Job:
    """Writes one sample; called from several threads."""

    def __init__(
        self,
        source: Source,
        writer: StoreWriter,
        rows: dict[str, int],
        norm: FinalNorm | None,
        options: ImportOptions,
    ) -> None:
        self._source, self._writer, self._rows, self._norm, self._options = source, writer, rows, norm, options

    def __call__(self, name: str) -> None:
        row = self._rows[name]
        head = _cut(self._source.head(row), self._options.pad_id)
        mask = torch.from_numpy(head.loss_mask)
        try:
            aux, final = self._source.states(row)
            kept = final[: len(mask)][mask]
            if self._norm is not None:
                kept = self._norm.to_post(kept)
            self._writer.write(_Sample(name, head), 0, aux[: len(mask)], kept)
        except BadStates as error:
            self._writer.reject(name, f"{error.fault} in {error.tensor.partition('[')[0]}")
        except BadFile as error:
            self._writer.reject(name, error.reason)


class _Sample:
    def __init__(self, name: str, head: Head) -> None:
        self.id, self.token_ids, self.loss_mask = name, head.token_ids, head.loss_mask


def _layer_ids(told: Conventions, source: Source, target: Target, options: ImportOptions) -> list[int]:
    """Our ids of the aux layers, from what was said or what the folder records."""
    recorded = source.recorded_layer_ids()
    said = options.tool_layer_ids
    ours = options.aux_layer_ids if said is None else told.to_ours(said, target.model_type)
    if ours is None and recorded is not None:
        ours = told.to_ours(recorded, target.model_type)
    if ours is None:
        raise StoreError(
            f"{told.tool}: the folder doesn't say which layers its aux states are of",
            expected="--tool-layer-ids A,B,C as that tool was given them, or --aux-layer-ids A,B,C, the number of "
            "decoder layers before each state",
            next="look them up where the capture was configured; a wrong guess trains a drafter that is never accepted",
        )
    if recorded is not None and told.from_ours(ours) != recorded:
        raise StoreError(
            f"the folder records the layers {recorded}, as {told.tool} counts them",
            expected=f"{told.from_ours(ours)}, which is {ours} in Eyas's meaning, as the option says",
            next=f"leave the option out, or --tool-layer-ids {','.join(map(str, recorded))}",
        )
    if len(ours) != AUX_LAYERS or sorted(set(ours)) != ours or ours[0] < 0:
        raise StoreError(f"aux layers {ours}", expected="three rising ids, 0 or more (0 = embeddings)")
    return target.aux_layer_ids(ours)


def _scan(
    source: Source, target: Target, folder: Path, options: ImportOptions, report: ImportReport
) -> tuple[dict[str, int], list[PlanEntry]]:
    """Sample id -> row of the folder, and the plan's entries."""
    rows: dict[str, int] = {}
    entries = []
    with Progress("scan", len(source), "samples", None) as progress:
        for row in range(len(source)):
            progress.advance(1)
            try:
                head = _cut(source.head(row), options.pad_id)
            except BadFile as error:
                if not options.skip_bad_files:
                    raise
                report.rejected[error.reason] += 1
                continue
            _check_target(source.path(row), head, target)
            name = sample_id(head.token_ids, head.loss_mask)
            if name in rows:
                report.rejected["duplicate"] += 1
                continue
            report.repeated_tail += _tail(head)
            rows[name] = row
            split = "heldout" if int(name[:8], 16) < options.heldout * 2**32 else "train"
            tokens, supervised = len(head.token_ids), int(head.loss_mask.sum())
            entries.append(PlanEntry(name, options.source or folder.name, split, tokens, supervised))
    if not rows:
        raise StoreError(f"{folder}: none of its {len(source)} files gives a sample: {dict(report.rejected)}")
    return rows, entries


def _check_target(path: Path, head: Head, target: Target) -> None:
    largest = int(head.token_ids.max())
    if head.hidden_size != target.hidden_size or largest >= target.vocab_size or int(head.token_ids.min()) < 0:
        raise StoreError(
            f"{path}: states of width {head.hidden_size}, token ids up to {largest}",
            expected=f"width {target.hidden_size}, ids below {target.vocab_size}, by the target {target.path}",
            cause="captured from another target",
            next="name the target that was captured with --target",
        )


def _cut(head: Head, pad_id: int | None) -> Head:
    """The sample without padding at its end."""
    if pad_id is None:
        return head
    kept = np.flatnonzero((head.token_ids != pad_id) | head.loss_mask)
    end = int(kept[-1]) + 1 if len(kept) else 1
    return Head(head.token_ids[:end], head.loss_mask[:end], head.hidden_size)


def _tail(head: Head) -> int:
    """Tokens at the end that are unsupervised and all of one id, where there are at least two."""
    same = (head.token_ids == head.token_ids[-1]) & ~head.loss_mask
    other = np.flatnonzero(~same)
    length = len(same) - (int(other[-1]) + 1 if len(other) else 0)
    return length if length > 1 else 0


def _fit(
    source: Source, target: Target, rows: dict[str, int], options: ImportOptions, final_state: FinalState
) -> tuple[tuple[float, float, int] | None, str]:
    def samples() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        for row in list(rows.values())[:_FIT_SAMPLES]:
            head = _cut(source.head(row), options.pad_id)
            yield torch.from_numpy(head.token_ids), torch.from_numpy(head.loss_mask), source.states(row)[1]

    try:
        measured = Fit(target, FinalNorm(target)).measure(samples())
    except (TargetError, BadFile) as error:
        return None, error.seen
    if measured is None:
        return None, "no two supervised tokens in a row"
    post, pre, count = measured
    return ((pre, post, count) if final_state == "pre_norm" else (post, pre, count)), ""


def _refuse_unfit(told: Conventions, report: ImportReport, options: ImportOptions) -> None:
    """Raises: StoreError where the tool's own convention is contradicted by the text, and none was said."""
    if options.final_state is None and report.fit and report.fit[1] > report.fit[0] + _CONTRADICTED:
        other = "post_norm" if report.final_state == "pre_norm" else "pre_norm"
        raise StoreError(
            f"final states taken as {report.final_state} give the text a log-probability of {report.fit[0]:.2f} a "
            f"token, as {other} {report.fit[1]:.2f} (mean of {report.fit[2]:,})",
            expected=f"{report.final_state}, as {told.tool} writes them",
            cause="another tool wrote the folder, or another target was captured",
            next=f"--final-state {other} where that is so; --final-state {report.final_state} where you know better",
        )


def _manifest(
    told: Conventions, target: Target, report: ImportReport, entries: list[PlanEntry], options: ImportOptions
) -> Manifest:
    return Manifest(
        target=TargetInfo.of(target),
        tokenizer_digest=target.tokenizer_digest,
        template_digest="",  # as for samples that come as token ids: the template is not known
        tokens_digest=fs.digest(*(entry.sample_id for entry in entries)),
        aux_layer_ids=report.aux_layer_ids,
        encoding=options.encoding,
        final_encoding=options.final_encoding,
        engine=EngineInfo(kind="import", dtype=report.dtype, version=told.name),
        shard_bytes=options.shard_bytes,
    )


def _finish(report: ImportReport, url: str) -> ImportReport:
    store = StoreReader(url)
    report.rejected.update(reason for reason in store.rows.table["rejected"].to_pylist() if reason)
    written = store.samples()
    report.written, report.tokens = len(written), sum(ref.tokens for ref in written)
    report.digest = store.digest
    return report
