"""One shard while it is being written: rows go to their place as they arrive, checksums follow them."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import xxhash

from eyas import fs
from eyas.store import index
from eyas.store.format import AUX_LAYERS, Manifest, ShardLayout, TokenSample, tensors
from eyas.store.plan import Plan
from eyas.tap.encode import Encoded

_READ_BYTES = 4 << 20
_WRITEBACK_BYTES = 1 << 20  # smaller pieces are left to the kernel: a call for each would cost more than it saves


class OpenSample:
    """Progress of one sample. Its lock is held while its rows are written: other samples go on meanwhile."""

    def __init__(self, sample: TokenSample, names: list[str]) -> None:
        self.lock = threading.Lock()
        self.finals_before = np.concatenate([[0], np.cumsum(sample.loss_mask, dtype=np.int64)])
        self.ranges: list[tuple[int, int]] = []  # token rows that are written; sorted, disjoint, merged
        self.hashed = 0  # token rows from the start whose bytes are in the checksums
        self.hashes = {name: xxhash.xxh3_128() for name in names}
        self.error: dict[str, npt.NDArray[np.float64]] = {}  # sums of squares by kind of state

    @property
    def complete(self) -> bool:
        return self.ranges == [(0, len(self.finals_before) - 1)]

    def missing(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts of [start, end) that are not written yet."""
        for first, last in self.ranges:
            if first >= end:
                break
            if first > start:
                yield start, first
            start = max(start, last)
        if start < end:
            yield start, end

    def mark(self, start: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.ranges, (start, end)]):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        self.ranges = merged


class OpenShard:
    """A pre-sized file that is not committed yet.

    Attributes:
        layout: where everything lies in it.
        samples: row of the plan -> progress, for samples that have begun and are neither complete nor rejected.
        checksums: row of the plan -> checksum by tensor, for samples that are complete or rejected.
    """

    def __init__(self, shard: int, plan: Plan, manifest: Manifest, staged: Path) -> None:
        self.shard, self.plan, self.manifest, self.staged = shard, plan, manifest, staged
        self.layout: ShardLayout = plan.layout(shard)
        self.rows = plan.rows(shard)
        self.tensors = {tensor.name: tensor for tensor in tensors(manifest)}
        self.samples: dict[int, OpenSample] = {}
        self.checksums: dict[int, dict[str, bytes]] = {}
        self.errors: dict[int, dict[str, npt.NDArray[np.float64]]] = {}
        self.rejected: dict[int, str] = {}
        self.lock = threading.Lock()
        self.taken = False
        self.descriptor = fs.create_sized(staged, self.layout.size)
        fs.pwrite_all(self.descriptor, self.layout.header, 0)

    def take_if_whole(self) -> bool:
        """True once: for the caller that shall commit, when every sample is complete or rejected."""
        with self.lock:
            whole = len(self.checksums) == len(self.rows) and not self.taken
            self.taken = self.taken or whole
            return whole

    def settled(self) -> list[int]:
        """Rows of the plan whose samples are complete or rejected."""
        with self.lock:
            return list(self.checksums)

    def begin(self, row: int, sample: TokenSample) -> OpenSample | None:
        """Progress of a sample, or None where it is settled. Its token ids and mask are written when it begins."""
        with self.lock:
            if row in self.checksums:
                return None
            opened = self.samples.get(row)
            if opened is None:
                opened = OpenSample(sample, list(self.tensors))
                ids, mask = sample.token_ids.astype("<i4"), sample.loss_mask.astype(np.uint8)
                for name, raw in (("token_ids", ids.tobytes()), ("loss_mask", mask.tobytes())):
                    fs.pwrite_all(self.descriptor, raw, self._offset(name, row, 0))
                    opened.hashes[name].update(raw)
                self.samples[row] = opened
            return opened

    def write(self, row: int, opened: OpenSample, start: int, aux: Encoded, final: Encoded) -> None:
        """Write the rows that are not there yet. The caller holds `opened.lock`."""
        finals = opened.finals_before
        for first, last in opened.missing(start, start + len(aux.values)):
            cut_aux, cut_final = slice(first - start, last - start), slice(*(finals[[first, last]] - finals[start]))
            pieces = _pieces("aux", aux, cut_aux) | _pieces("final", final, cut_final)
            for name, raw in pieces.items():
                begin = finals[first] if self.tensors[name].supervised else first
                offset = self._offset(name, row, int(begin))
                fs.pwrite_all(self.descriptor, raw, offset)
                if len(raw) >= _WRITEBACK_BYTES:
                    fs.start_writeback(self.descriptor, offset, len(raw))
            opened.mark(first, last)
            if opened.hashed == first:
                for name, raw in pieces.items():
                    opened.hashes[name].update(raw)
                opened.hashed = last
        for kind, part in (("aux", aux), ("final", final)):
            if part.error is not None:
                sums = part.error.cpu().numpy().sum(0, dtype=np.float64).reshape(-1, 2).T  # [2, layers]
                opened.error[kind] = opened.error.get(kind, np.zeros(1)) + sums

    def settle(self, row: int, opened: OpenSample) -> None:
        """Take the checksums of a complete sample; rows that came out of order are read back for it."""
        total, finals = len(opened.finals_before) - 1, opened.finals_before
        for name, tensor in self.tensors.items():
            if opened.hashed < total and name not in ("token_ids", "loss_mask"):
                first, last = (finals[opened.hashed], finals[total]) if tensor.supervised else (opened.hashed, total)
                for block in self._read(self._offset(name, row, int(first)), int(last - first) * tensor.row_bytes):
                    opened.hashes[name].update(block)
        with self.lock:
            self.checksums[row] = {name: state.digest() for name, state in opened.hashes.items()}
            self.errors[row] = opened.error
            del self.samples[row]

    def reject(self, row: int, reason: str) -> bool:
        """Mark a sample as rejected and zero its bytes, also one that is complete; False where the commit has begun."""
        with self.lock:
            opened = self.samples.get(row)
            if opened is None:
                return self._reject(row, reason, touched=row in self.checksums)
        with opened.lock, self.lock:  # in this order everywhere
            self.samples.pop(row, None)
            return self._reject(row, reason, touched=True)

    def _reject(self, row: int, reason: str, touched: bool) -> bool:
        if self.taken:
            return False
        checksums = {}
        for name, tensor in self.tensors.items():
            rows = self.plan.supervised[row] if tensor.supervised else self.plan.tokens[row]
            state, left, offset = xxhash.xxh3_128(), int(rows) * tensor.row_bytes, self._offset(name, row, 0)
            while left:
                zeros = bytes(min(left, _READ_BYTES))
                if touched:
                    fs.pwrite_all(self.descriptor, zeros, offset)
                state.update(zeros)
                offset, left = offset + len(zeros), left - len(zeros)
            checksums[name] = state.digest()
        self.checksums[row], self.rejected[row] = checksums, reason
        self.errors.pop(row, None)
        return True

    def index_rows(self) -> pa.Table:
        """This shard's part of the index."""
        rows = self.plan.table.slice(self.rows.start, len(self.rows))
        schema = index.schema(self.manifest)
        columns: dict[str, list[Any]] = {"rejected": [self.rejected.get(row, "") for row in self.rows]}
        for name in self.tensors:
            columns[index.checksum_column(name)] = [self.checksums[row][name] for row in self.rows]
        for kind, layers in (("aux", AUX_LAYERS), ("final", 1)):
            columns[f"{kind}_error"] = [self._relative_error(row, kind, layers) for row in self.rows]
        for field in schema:
            if field.name not in rows.schema.names:
                rows = rows.append_column(field, pa.array(columns[field.name], field.type))
        return rows

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _relative_error(self, row: int, kind: str, layers: int) -> list[float]:
        sums = self.errors.get(row, {}).get(kind, np.zeros((2, layers)))
        return [float(value) for value in np.sqrt(sums[0] / np.maximum(sums[1], 1e-300))]

    def _offset(self, name: str, row: int, at: int) -> int:
        """Place in the file of a sample's row `at` (counted in supervised tokens for final states)."""
        tensor = self.tensors[name]
        first = self.plan.first_final[row] if tensor.supervised else self.plan.first_token[row]
        return self.layout.starts[name] + (int(first) + at) * tensor.row_bytes

    def _read(self, offset: int, length: int) -> Iterator[bytes]:
        end = offset + length
        while offset < end:
            block = os.pread(self.descriptor, min(_READ_BYTES, end - offset), offset)
            offset += len(block)
            yield block


def _pieces(kind: str, part: Encoded, cut: slice) -> dict[str, memoryview]:
    """Tensor name -> raw bytes of some rows."""
    raw = {f"{kind}_hidden_states": _bytes(part.values[cut])}
    if part.scales is not None:
        raw[f"{kind}_scales"] = _bytes(part.scales[cut])
    return raw


def _bytes(values: torch.Tensor) -> memoryview:
    flat = values.detach().contiguous().cpu().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
