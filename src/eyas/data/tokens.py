"""The token set of a run (`tokens/`): samples as token ids and loss masks, and the account of how they came about.

    samples.parquet   one row a sample, in the seeded order; row groups of about 65,536 tokens
    rejected.jsonl    one line a rejected record: source, file, line, reason, detail
    manifest.json     counts by split and source, tokenizer and template digests, digest of the set

The folder appears whole: it is written under a partial name and renamed.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from eyas import fs
from eyas.errors import DataError

Split = Literal["train", "heldout"]
TokenIds = npt.NDArray[np.int32]
LossMask = npt.NDArray[np.bool_]

FORMAT = 1
SAMPLES, REJECTED, MANIFEST = "samples.parquet", "rejected.jsonl", "manifest.json"
ROWS_PER_GROUP = 5_000
# A shard's samples lie scattered over the set, and each costs a whole group: 37 of 1,000 tokens out of 200,000 took
# 18 s with groups of 4M tokens, 0.1 s with these. A million samples of 1,000 tokens are 15,000 groups.
_TOKENS_PER_GROUP = 64 << 10
# Values that come again and again are written as numbers of a dictionary; ids would only fill it up.
_DICTIONARY = ["source", "split", "loss_mask.list.element"]
_SCHEMA = pa.schema(
    {
        "sample_id": pa.string(),
        "source": pa.string(),
        "split": pa.string(),
        "tokens": pa.int32(),
        "supervised": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
    }
)


@dataclass(frozen=True)
class Sample:
    """One sample.

    Attributes:
        id: 32 hex digits, the digest of token ids and loss mask.
        source: name in counts and reports.
        split: "train" or "heldout".
        token_ids: int32 [T].
        loss_mask: bool [T]; True where the assistant wrote the token, its end-of-turn token included.
    """

    id: str
    source: str
    split: Split
    token_ids: TokenIds
    loss_mask: LossMask


def sample_id(token_ids: TokenIds, loss_mask: LossMask) -> str:
    """Identity of a sample: digest of its token ids (int32, little endian) and loss mask (uint8)."""
    ids = np.ascontiguousarray(token_ids, dtype="<i4")
    return fs.digest(ids.tobytes(), np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())


class TokensWriter:
    """Writes a token set; nothing is visible at `folder` before `finish`.

    Use as a context manager: without `finish`, leaving it removes what was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._partial = folder.with_name(f"{fs.PARTIAL_PREFIX}{folder.name}")
        if self._partial.exists():
            shutil.rmtree(self._partial)
        self._partial.mkdir(parents=True)
        self._rows: list[Sample] = []
        self._tokens_pending = 0
        self._ids = bytearray()
        self._running = fs.digest("")
        self._parquet = pq.ParquetWriter(
            self._partial / SAMPLES, _SCHEMA, compression="zstd", compression_level=1, use_dictionary=_DICTIONARY
        )
        self._rejected: IO[str] = (self._partial / REJECTED).open("w", encoding="utf-8")
        self.by_split: Counter[str] = Counter()
        self.by_source: dict[str, Counter[str]] = {}
        self.by_length: Counter[int] = Counter()

    def __enter__(self) -> "TokensWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._rejected.closed:
            self._rejected.close()
            self._parquet.close()
            shutil.rmtree(self._partial)

    def add(self, sample: Sample) -> None:
        """Append one sample; the order of calls is the order of the set."""
        self._rows.append(sample)
        self._tokens_pending += len(sample.token_ids)
        self._ids += f"{sample.id} {sample.split} {sample.source}\n".encode()
        self.by_split[sample.split] += 1
        self.by_length[len(sample.token_ids)] += 1
        counts = self.by_source.setdefault(sample.source, Counter())
        counts["samples"] += 1
        counts["tokens"] += len(sample.token_ids)
        counts["supervised_tokens"] += int(sample.loss_mask.sum())
        if len(self._rows) >= ROWS_PER_GROUP or self._tokens_pending >= _TOKENS_PER_GROUP:
            self._flush()

    def reject(self, line: dict[str, Any]) -> None:
        """Note a record that gives no sample: source, file, line, reason, detail."""
        self._rejected.write(json.dumps(line, ensure_ascii=False) + "\n")

    def finish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Write manifest.json (counts and `facts`) and make the folder appear; returns the manifest."""
        self._flush()
        self._parquet.close()
        self._rejected.close()
        totals: Counter[str] = sum(self.by_source.values(), Counter())
        manifest = {
            "format": FORMAT,
            "samples": totals["samples"],
            "tokens": totals["tokens"],
            "supervised_tokens": totals["supervised_tokens"],
            "by_split": {split: self.by_split[split] for split in ("train", "heldout")},
            **facts,
            "digest": self._running,
        }
        fs.write_json(self._partial / MANIFEST, manifest)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        fs.commit_folder(self._partial, self.folder)
        return manifest

    def _flush(self) -> None:
        if not self._rows:
            return
        self._parquet.write_table(_to_table(self._rows), row_group_size=len(self._rows))
        # A chain over groups: the digest follows order and content without holding all ids.
        self._running = fs.digest(self._running, bytes(self._ids))
        self._rows, self._tokens_pending, self._ids = [], 0, bytearray()


def _to_table(rows: Sequence[Sample]) -> pa.Table:
    offsets = np.cumsum([0, *(len(row.token_ids) for row in rows)], dtype=np.int32)
    ids = np.concatenate([row.token_ids for row in rows]).astype(np.int32, copy=False)
    mask = np.concatenate([row.loss_mask for row in rows]).astype(np.uint8)
    columns = [
        pa.array([row.id for row in rows]),
        pa.array([row.source for row in rows]),
        pa.array([row.split for row in rows]),
        pa.array(np.diff(offsets)),
        pa.array([int(row.loss_mask.sum()) for row in rows], type=pa.int32()),
        pa.ListArray.from_arrays(offsets, ids),
        pa.ListArray.from_arrays(offsets, mask),
    ]
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


class Tokens:
    """Reads a token set.

    Args:
        folder: `tokens/` of a run.
    Raises: DataError where the folder is missing, cut short or of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            self._parquet = pq.ParquetFile(folder / SAMPLES)
        except FileNotFoundError:
            raise DataError(
                f"{folder}: no token set here",
                expected=f"{MANIFEST} and {SAMPLES}, which `eyas prepare` writes",
                cause="prepare was not run yet, or the folder was moved",
            ) from None
        except (ValueError, pa.ArrowInvalid) as error:
            raise DataError(
                f"{folder}: not a whole token set: {error}",
                cause="files were cut or edited",
                next="eyas prepare RECIPE --redo",
            ) from None
        if self.manifest.get("format") != FORMAT or self._parquet.metadata.num_rows != self.manifest["samples"]:
            raise DataError(
                f"{folder}: format {self.manifest.get('format')}, {self._parquet.metadata.num_rows} rows",
                expected=f"format {FORMAT} and {self.manifest.get('samples')} rows, as {MANIFEST} says",
                cause="written by another version of Eyas, or a file was replaced",
                next="eyas prepare RECIPE --redo",
            )
        self._order: npt.NDArray[np.intp] | None = None

    def __len__(self) -> int:
        return int(self.manifest["samples"])

    def __iter__(self) -> Iterator[Sample]:
        """All samples in the set's order, one row group in memory at a time."""
        for group in range(self._parquet.num_row_groups):
            yield from _to_samples(self._parquet.read_row_group(group))

    def table(self, columns: Sequence[str]) -> pa.Table:
        """Light columns of all samples: sample_id, source, split, tokens, supervised."""
        return self._parquet.read(columns=list(columns))

    def fetch(self, ids: Iterable[str]) -> list[Sample]:
        """Samples by id, in the order asked. Each row group that holds one is read once, one in memory at a time.

        Raises: DataError naming the first id that the set doesn't hold.
        """
        wanted = list(ids)
        if not wanted:
            return []
        if self._order is None:
            self._order = self._build_index()
        keys = np.array(wanted, dtype="S32")
        found = np.searchsorted(self._ids, keys, sorter=self._order)
        rows = self._order[np.minimum(found, len(self) - 1)]
        held = self._ids[rows] == keys
        if not held.all():
            missing = wanted[int(np.argmin(held))]
            raise DataError(f"{self.folder}: no sample {missing}", cause="the plan was made from another token set")
        groups = np.searchsorted(self._starts, rows, side="right") - 1
        samples: list[Sample | None] = [None] * len(wanted)
        for group in np.unique(groups).tolist():
            here = np.flatnonzero(groups == group)
            table = self._parquet.read_row_group(group).take(pa.array(rows[here] - self._starts[group]))
            for position, sample in zip(here.tolist(), _to_samples(table), strict=True):
                samples[position] = sample
        return [sample for sample in samples if sample is not None]

    def _build_index(self) -> npt.NDArray[np.intp]:
        """The order that sorts the ids (40 bytes a sample with them); also the first row of every row group."""
        self._ids = np.array(self.table(["sample_id"])["sample_id"].to_pylist(), dtype="S32")
        sizes = [self._parquet.metadata.row_group(i).num_rows for i in range(self._parquet.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])[:-1]
        return np.argsort(self._ids)


def _to_samples(table: pa.Table) -> Iterator[Sample]:
    light = table.select(["sample_id", "source", "split"]).to_pydict()
    ids, mask = table["token_ids"].combine_chunks(), table["loss_mask"].combine_chunks()
    offsets = ids.offsets.to_numpy()
    flat_ids = ids.values.to_numpy().copy()  # writable, as torch.from_numpy wants it
    flat_mask = mask.values.to_numpy().astype(np.bool_)
    for row, (start, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        yield Sample(
            light["sample_id"][row],
            light["source"][row],
            light["split"][row],
            flat_ids[start:end],
            flat_mask[start:end],
        )
