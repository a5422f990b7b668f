"""Samples on disk until all are known: memory holds one bucket, however many there are.

A sample's key is a digest of seed and sample id. Keys give the seeded order, independent of how work was shared out;
their top bits choose the bucket, so equal samples meet in one bucket and buckets follow one another in the final order.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eyas import fs
from eyas.data.make import Draft
from eyas.data.tokens import LossMask, TokenIds

SPLITS = ("", "train", "heldout")
# 512 buckets that wait to be flushed hold 170 MB; a bucket of 24 MB of text takes some 60 MB when it is read.
_FLUSH_TOKENS = 64 << 10
_BUCKET_BYTES = 24 << 20
_MAX_BUCKETS = 512
_LIGHT = {
    "key": pa.uint64(),
    "id_high": pa.uint64(),
    "id_low": pa.uint64(),
    "record": pa.int64(),
    "turn": pa.int32(),
    "file": pa.int32(),
    "line": pa.int64(),
    "label": pa.uint16(),
    "split": pa.uint8(),
    "conversation": pa.uint64(),
    "tokens": pa.int32(),
}
_SCHEMA = pa.schema({**_LIGHT, "token_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8())})
Light = dict[str, npt.NDArray[Any]]


class Spill:
    """Buckets of samples in a folder of their own, which leaving the context removes.

    Args:
        folder: made anew.
        source_bytes: size of all sources, which sets the number of buckets.
        seed: of the order.
    """

    def __init__(self, folder: Path, source_bytes: int, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self.buckets = min(max(source_bytes // _BUCKET_BYTES, 1), _MAX_BUCKETS)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self._pending: list[list[tuple[tuple[int, ...], Draft]]] = [[] for _ in range(self.buckets)]
        self._pending_tokens = [0] * self.buckets
        self._writers: dict[int, pa.RecordBatchFileWriter] = {}

    def __enter__(self) -> "Spill":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers.values():
            writer.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, draft: Draft, *, record: int, turn: int, file: int, label: int) -> None:
        """Keep a sample.

        Args:
            record: number of its record over all sources; of equal samples the one of the lowest number stays.
            turn: its place among the samples of its record.
            file, label: kept for the account.
        """
        key = int(fs.digest(f"{self._seed} {draft.id}")[:16], 16)
        high, low = int(draft.id[:16], 16), int(draft.id[16:], 16)
        split = SPLITS.index(draft.split)
        bucket = key * self.buckets >> 64
        size = len(draft.token_ids)
        light = (key, high, low, record, turn, file, draft.line, label, split, draft.conversation, size)
        self._pending[bucket].append((light, draft))
        self._pending_tokens[bucket] += size
        if self._pending_tokens[bucket] >= _FLUSH_TOKENS:
            self._flush(bucket)

    def close(self) -> None:
        """Nothing more comes; buckets can be read."""
        for bucket in range(self.buckets):
            self._flush(bucket)
        for writer in self._writers.values():
            writer.close()

    def light(self, bucket: int) -> Light:
        """All columns but ids and masks of a bucket."""
        if bucket not in self._writers:
            return {name: np.zeros(0, kind.to_pandas_dtype()) for name, kind in _LIGHT.items()}
        table = self._read(bucket, list(_LIGHT))
        return {name: table[name].to_numpy() for name in _LIGHT}

    def payload(self, bucket: int, rows: npt.NDArray[np.intp]) -> Iterator[tuple[TokenIds, LossMask]]:
        """Token ids and masks of some rows of a bucket, in the order asked."""
        if not len(rows):
            return
        table = self._read(bucket, ["token_ids", "loss_mask"]).combine_chunks()
        ids, mask = table["token_ids"].chunk(0), table["loss_mask"].chunk(0)
        offsets, flat_ids, flat_mask = ids.offsets.to_numpy(), ids.values.to_numpy(), mask.values.to_numpy()
        for row in rows.tolist():
            part = slice(offsets[row], offsets[row + 1])
            yield flat_ids[part], flat_mask[part].astype(np.bool_)

    def _path(self, bucket: int) -> Path:
        return self._folder / f"{bucket:04d}.arrow"

    def _read(self, bucket: int, columns: list[str]) -> pa.Table:
        options = pa.ipc.IpcReadOptions(included_fields=[_SCHEMA.get_field_index(name) for name in columns])
        with pa.memory_map(str(self._path(bucket))) as file:
            return pa.ipc.open_file(file, options=options).read_all()

    def _flush(self, bucket: int) -> None:
        pending = self._pending[bucket]
        if not pending:
            return
        columns = list(zip(*(light for light, _ in pending), strict=True))
        arrays = [
            pa.array(np.array(column, dtype=kind.to_pandas_dtype()))
            for column, kind in zip(columns, _LIGHT.values(), strict=True)
        ]
        offsets = np.cumsum([0, *columns[-1]], dtype=np.int32)
        ids = np.concatenate([draft.token_ids for _, draft in pending])
        mask = np.concatenate([draft.loss_mask for _, draft in pending]).astype(np.uint8)
        arrays += [pa.ListArray.from_arrays(offsets, ids), pa.ListArray.from_arrays(offsets, mask)]
        if bucket not in self._writers:
            # lz4: the spill is written once, read once, and the processor is the bottleneck.
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writers[bucket] = pa.ipc.new_file(self._path(bucket), _SCHEMA, options=options)
        self._writers[bucket].write_table(pa.Table.from_arrays(arrays, schema=_SCHEMA))
        self._pending[bucket], self._pending_tokens[bucket] = [], 0
