"""Writing a store: any number of threads, rows in any order and pieces, shards committed one by one."""

import errno
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from eyas import fs
from eyas.errors import CorruptStore, ManifestMismatch, StoreError, StoreFull
from eyas.progress import say, size
from eyas.store import index
from eyas.store.commits import Commits
from eyas.store.files import Files, open_files, refuse_foreign, shard_number
from eyas.store.format import (
    AUX_LAYERS,
    MANIFEST,
    PLAN,
    SHARDS,
    Manifest,
    TokenSample,
    parse_manifest,
    part_name,
    sample_id,
    shard_name,
)
from eyas.store.plan import Plan, PlanEntry, deal
from eyas.store.shard import OpenShard
from eyas.store.tables import table_bytes
from eyas.tap.encode import FAULT_NAMES, FINE, Encoded, encode


class BadStates(StoreError):
    """Hidden states with NaN, Inf or a row of zeros; nothing of the piece was written."""

    def __init__(self, sample: str, position: int, tensor: str, fault: str) -> None:
        super().__init__(
            f"sample {sample}, position {position}: {tensor} has {fault}",
            expected="finite states, not all zero in any row",
            cause="the engine's number type overflows (fp16), or its attention or quantisation kernel is at fault",
            next="reject the sample, or capture with another dtype: --set engine.dtype=bfloat16",
        )
        self.sample, self.position, self.tensor, self.fault = sample, position, tensor, fault


class StoreWriter:
    """Writes the hidden states of planned samples. Make one with `StoreWriter.open`; threads may share it.

    What is committed stays committed: after any end of the process, `open` again and go on with `pending()`.
    """

    def __init__(self, files: Files, manifest: Manifest, plan: Plan, max_bytes: int, min_free_bytes: int) -> None:
        self.files, self.manifest, self.plan = files, manifest, plan
        self._max_bytes, self._min_free_bytes = max_bytes, min_free_bytes
        self._open: dict[int, OpenShard] = {}
        self._commits: Commits | None = None
        self._lock = threading.Lock()
        rows = index.fold(files, manifest)
        sizes = files.sizes()
        self._used = sum(sizes[name] for name in sizes if shard_number(name) is not None)
        self._committed = _committed(files, plan, rows, sizes)
        self._rejected = set(rows.filter(pc.not_equal(rows["rejected"], ""))["sample_id"].to_pylist())

    @classmethod
    def open(
        cls, url: str, manifest: Manifest, samples: Iterable[PlanEntry], *, max_bytes: int = 0, min_free_bytes: int = 0
    ) -> "StoreWriter":
        """Create a store, or go on with one of equal manifest and plan.

        Args:
            url: a folder, or an fsspec URL.
            manifest: what all samples share; its `plan` is filled in here.
            samples: all samples that the store is to hold.
            max_bytes: budget of all shards; 0: none.
            min_free_bytes: no shard is begun that would leave the disk with less.
        Raises: ManifestMismatch, naming the first value that differs; StoreFull where the plan can't fit the budget;
            StoreError for a foreign folder, an impossible plan, or a store that another process is writing.
        """
        files = open_files(url)
        plan = deal(samples, manifest)
        manifest = manifest.model_copy(update={"plan": plan.info()})
        needed = sum(plan.layout(shard).size for shard in range(plan.shards))
        if max_bytes and needed > max_bytes:
            raise StoreFull(
                f"{url}: the plan of {len(plan):,} samples needs {size(needed)}",
                expected=f"at most {size(max_bytes)}, as store.max_bytes says",
                next="raise store.max_bytes, take fewer samples (data.limit), or store less: --set store.encoding=fp8",
            )
        _refuse_others(files)
        files.create()
        files.lock()
        try:
            _create_or_match(files, manifest, plan)
            writer = cls(files, manifest, plan, max_bytes, min_free_bytes)
        except BaseException:
            files.unlock()
            raise
        short = needed - writer._used + min_free_bytes - files.free_bytes()
        if short > 0 and not files.remote:
            say(f"{url}: the disk is {size(short)} short of what the plan needs; capture stops before it is full")
        return writer

    def pending(self) -> list[list[str]]:
        """The ids of the samples that are neither written nor rejected, by shard, in plan order."""
        rows = self.pending_rows()
        starts = np.flatnonzero(np.diff(self.plan.shard[rows], prepend=-1))[1:]
        return [[self.plan.id(row) for row in part.tolist()] for part in np.split(rows, starts) if len(part)]

    def pending_rows(self) -> npt.NDArray[np.intp]:
        """Rows of the plan whose samples are neither written nor rejected."""
        with self._lock:
            waiting = ~np.isin(self.plan.shard, list(self._committed))
            for shard in self._open.values():
                waiting[shard.settled()] = False
        return np.flatnonzero(waiting)

    def settled(self, sample_id: str) -> bool:
        """Whether all rows of a planned sample are written, or it is rejected."""
        row = self.plan.find(sample_id)
        if row is None:
            raise StoreError(f"settled({sample_id!r})", expected="a sample of the plan")
        with self._lock:
            number = int(self.plan.shard[row])
            return number in self._committed or (number in self._open and row in self._open[number].checksums)

    @contextmanager
    def committing_behind(self) -> Iterator[None]:
        """Within it a thread of its own commits: no `write` waits for an fsync or an upload, until two shards wait.

        A `write` or `reject` that completes a shard doesn't say, then, that the shard is durable: leaving does.
        Raises: what a commit failed with, on leaving, and in each `write` and `reject` after it.
        """
        try:
            with Commits() as self._commits:
                yield
        finally:
            self._commits = None

    def write(self, sample: TokenSample, start: int, aux: torch.Tensor, final: torch.Tensor) -> None:
        """Encode, check and store rows start..start+n of a sample.

        Args:
            aux: float [n, 3, H], states of all n tokens, any device.
            final: float [f, H], states of the f supervised tokens among those n.
        Rows that are already there are left as they are: a retracted request may send them again.
        Raises: BadStates; StoreFull; StoreError for a sample or shape that the plan doesn't have.
        """
        encodings = self.manifest.encoding, self.manifest.final_encoding
        self.write_encoded(sample, start, encode(aux, encodings[0]), encode(final, encodings[1]))

    def write_encoded(self, sample: TokenSample, start: int, aux: Encoded, final: Encoded) -> None:
        """`write` for rows that `tap.encode.encode` has made already."""
        row = self._row(sample, start, aux, final)
        _check_values(sample, start, aux, final)
        self._check_commits()
        with self._telling_full_disk():
            shard = self._shard(row)
            opened = shard.begin(row, sample) if shard is not None else None
            if shard is None or opened is None:
                return
            with opened.lock:
                if shard.samples.get(row) is not opened:  # settled meanwhile
                    return
                shard.write(row, opened, start, aux, final)
                if not opened.complete:
                    return
                shard.settle(row, opened)
            self._commit_if_whole(shard)

    def reject(self, sample_id: str, reason: str) -> None:
        """Give a sample up for `reason` (a few words, counted in the accounting); its bytes become zeros.

        Raises: StoreError where the sample isn't planned, or is committed as written.
        """
        row = self.plan.find(sample_id)
        if row is None or not reason:
            raise StoreError(f"reject({sample_id!r}, {reason!r})", expected="a sample of the plan, and a reason")
        self._check_commits()
        with self._telling_full_disk():
            shard = self._shard(row)
            if shard is not None and shard.reject(row, reason):
                self._rejected.add(sample_id)
                self._commit_if_whole(shard)
            elif sample_id not in self._rejected:
                raise StoreError(
                    f"sample {sample_id} is committed in {shard_name(int(self.plan.shard[row]))}, too late to reject",
                    next="eyas verify RECIPE --repair, where the shard is bad; then eyas capture RECIPE",
                )

    def close(self) -> None:
        """Fold the index. Shards with samples pending are given up: all their samples are pending again."""
        with self._lock:
            for shard in self._open.values():
                shard.close()
                fs.remove(shard.staged)
            self._open.clear()
        try:
            with self._telling_full_disk():
                index.fold(self.files, self.manifest)
        finally:
            self.files.unlock()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _row(self, sample: TokenSample, start: int, aux: Encoded, final: Encoded) -> int:
        """Row of the plan, after checking that the sample and its rows have the shapes that are planned."""
        row = self.plan.find(sample.id)
        tokens, mask = len(sample.token_ids), sample.loss_mask
        if row is None or (tokens, int(mask.sum())) != (self.plan.tokens[row], self.plan.supervised[row]):
            raise StoreError(
                f"sample {sample.id} ({tokens} tokens) is not in the plan", expected="a sample of the plan"
            )
        end, hidden = start + len(aux.values), self.manifest.target.hidden_size
        planned = ((end - start, AUX_LAYERS, hidden), (int(mask[start:end].sum()), hidden))
        if (tuple(aux.values.shape), tuple(final.values.shape)) != planned or not 0 <= start < end <= tokens:
            raise StoreError(
                f"sample {sample.id}, positions {start} to {end} of {tokens}: aux states {tuple(aux.values.shape)}, "
                f"final states {tuple(final.values.shape)}",
                expected=f"{planned[0]} and {planned[1]}: a row for each token, a final one for each supervised token",
            )
        if sample_id(sample.token_ids, mask) != sample.id:
            raise StoreError(f"sample {sample.id}: its token ids and mask have another digest", expected="id = digest")
        return row

    def _shard(self, row: int) -> OpenShard | None:
        """The open shard of a row, begun if there is room; None where it is committed."""
        number = int(self.plan.shard[row])
        with self._lock:
            if number in self._committed:
                return None
            if number not in self._open:
                needed = self.plan.layout(number).size
                self._refuse_if_full(needed)
                self._open[number] = OpenShard(number, self.plan, self.manifest, self.files.stage(shard_name(number)))
                self._used += needed
            return self._open[number]

    def _refuse_if_full(self, needed: int) -> None:
        if self._max_bytes and self._used + needed > self._max_bytes:
            raise StoreFull(
                f"{self.files.where}: {size(self._used)} used, the next shard needs {size(needed)}",
                expected=f"at most {size(self._max_bytes)}, as store.max_bytes says",
                next="raise store.max_bytes and run the same command: committed shards are kept",
            )
        free = self.files.free_bytes()
        if free - needed < self._min_free_bytes:
            raise StoreFull(
                f"{self.files.where}: {size(free)} free on the disk, the next shard needs {size(needed)}",
                expected=f"{size(self._min_free_bytes)} left free, as store.min_free_bytes says",
                next="free some space and run the same command: committed shards are kept",
            )

    def _commit_if_whole(self, shard: OpenShard) -> None:
        if not shard.take_if_whole():
            return
        if self._commits is None:
            self._commit(shard)
        else:
            self._commits.give(lambda: self._commit(shard))

    def _commit(self, shard: OpenShard) -> None:
        """Make a finished shard durable: its part of the index, then its bytes, then its name, which is the commit."""
        with self._telling_full_disk():
            shard.close()
            self.files.write(part_name(shard.shard), table_bytes(shard.index_rows()))
            self.files.commit(shard.staged, shard_name(shard.shard))
        with self._lock:
            self._committed.add(shard.shard)
            del self._open[shard.shard]

    def _check_commits(self) -> None:
        if self._commits is not None:
            self._commits.check()

    @contextmanager
    def _telling_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise StoreFull(
                f"{self.files.where}: {error.strerror} while writing",
                cause="another program filled the disk, or a quota or file size limit (ulimit -f) is reached",
                next="make room and run the same command: committed shards are kept, the unfinished one is made again",
            ) from error


def _check_values(sample: TokenSample, start: int, aux: Encoded, final: Encoded) -> None:
    bad = (aux.faults != FINE).flatten().nonzero()
    if len(bad):
        place = int(bad[0])
        name = f"aux_hidden_states[{place % AUX_LAYERS}]"
        raise BadStates(sample.id, start + place // AUX_LAYERS, name, FAULT_NAMES[int(aux.faults.flatten()[place])])
    bad = (final.faults != FINE).nonzero()
    if len(bad):
        place = int(bad[0])
        position = int(np.flatnonzero(sample.loss_mask[start:])[place]) + start
        raise BadStates(sample.id, position, "final_hidden_states", FAULT_NAMES[int(final.faults[place])])


def _refuse_others(files: Files) -> None:
    """Raises: StoreError where the folder holds things that are no store's, so that nothing is written among them."""
    begun = {PLAN, SHARDS}  # a start that was cut off before its manifest
    if MANIFEST not in files.sizes() and set(files.others() or ()) - begun:
        refuse_foreign(files)


def _create_or_match(files: Files, manifest: Manifest, plan: Plan) -> None:
    files.sweep()
    sizes = files.sizes()
    if MANIFEST in sizes:
        match_manifest(parse_manifest(files.read(MANIFEST), files.name(MANIFEST)), manifest, files.where)
    raw = table_bytes(plan.table)
    if PLAN not in sizes or files.read(PLAN) != raw:  # equal in content: the manifest has its digest
        files.write(PLAN, raw)
    if MANIFEST not in sizes:
        files.write(MANIFEST, manifest.to_json())


def match_manifest(stored: Manifest, asked: Manifest, where: str) -> None:
    """Raises: ManifestMismatch naming the first value in which the two differ."""
    ours = asked.identity()
    for key, value in stored.identity().items():
        if value != ours[key]:
            raise ManifestMismatch(
                f"{where}: {key} is {value!r} in the store",
                expected=f"{ours[key]!r}, from the recipe and its tokens",
                cause="the store was captured with another target, tokenizer, template, encoding or set of samples",
                next="capture into another folder (--set store.url=DIR), or make it anew: eyas capture RECIPE --redo",
            )


def _committed(files: Files, plan: Plan, rows: pa.Table, sizes: dict[str, int]) -> set[int]:
    """Shards that are done.

    Raises: CorruptStore where one has not the size or the samples of the plan.
    """
    counts = np.bincount(rows["shard"].to_numpy(), minlength=plan.shards)
    for shard in np.flatnonzero(counts).tolist():
        name = shard_name(shard)
        planned = (plan.layout(shard).size, len(plan.rows(shard))) if shard < plan.shards else (0, 0)
        if (sizes[name], counts[shard]) != planned:
            raise CorruptStore(
                f"{files.name(name)}: {sizes[name]:,} bytes, {counts[shard]} samples in the index",
                expected=f"{planned[0]:,} bytes and {planned[1]} samples, by the plan",
                cause="the file was cut, or copied in part",
                next="eyas verify RECIPE --repair, then eyas capture RECIPE: sound shards are kept",
            )
    return set(np.flatnonzero(counts).tolist())
