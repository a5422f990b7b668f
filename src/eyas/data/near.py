"""Near-duplicates: records whose token 5-grams overlap beyond a threshold, found by MinHash signatures in bands.

Signatures lie in a file (256 bytes a record); one band's hashes are in memory at a time (16 bytes a record).
"""

from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
from rensa import RMinHash

from eyas.data.tokens import TokenIds

PERMUTATIONS = 64
_SHINGLE = 5
_SEED = 1
_RECALL = 0.99
_RECORD = np.dtype([("record", "<i8"), ("id", "<u8"), ("signature", "<u4", (PERMUTATIONS,))])
_PAIRS_AT_ONCE = 1 << 16
Signature = npt.NDArray[np.uint32]


def signature(token_ids: TokenIds) -> Signature:
    """MinHash of a sample's runs of five tokens, uint32 [64]."""
    raw = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    last = max(len(raw) - 4 * _SHINGLE, 0)
    minhash = RMinHash(num_perm=PERMUTATIONS, seed=_SEED)
    minhash.update([raw[start : start + 4 * _SHINGLE] for start in range(0, last + 1, 4)])
    return np.array(minhash.digest(), dtype=np.uint32)


def band_rows(threshold: float) -> int:
    """Rows of a band: as many as still find 99 of 100 pairs that are alike by `threshold`."""
    rows = [r for r in range(1, 33) if 1 - (1 - threshold**r) ** (PERMUTATIONS // r) >= _RECALL]
    return max(rows, default=1)


class NearDuplicates:
    """Collects signatures, then names the records to leave out.

    Args:
        path: file for the signatures; leaving the context removes it.
        threshold: share of common 5-grams (Jaccard) from which two records are alike, 0 to 1. It is estimated from
            64 hashes, so within about 0.05.
    """

    def __init__(self, path: Path, threshold: float) -> None:
        self._path, self._threshold = path, threshold
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._count = 0

    def __enter__(self) -> "NearDuplicates":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def add(self, record: int, sample_id: str, signed: Signature) -> None:
        """Records come in rising order; of alike ones the lowest stays."""
        self._file.write(np.array([(record, int(sample_id[:16], 16), signed)], dtype=_RECORD).tobytes())
        self._count += 1

    def find(self) -> npt.NDArray[np.int64]:
        """Records that are alike to an earlier one. Equal samples are not named: they are doubles."""
        self._file.flush()
        if not self._count:
            return np.zeros(0, np.int64)
        held = np.memmap(self._path, dtype=_RECORD, mode="r")
        dropped = np.zeros(self._count, dtype=np.bool_)
        rows = band_rows(self._threshold)
        for band in range(PERMUTATIONS // rows):
            hashes = self._band_hashes(held, slice(band * rows, (band + 1) * rows))
            order = np.argsort(hashes, kind="stable")
            same = hashes[order][1:] == hashes[order][:-1]
            self._drop(held, order, same, dropped)
        return np.asarray(held["record"][dropped], dtype=np.int64)

    def _band_hashes(self, held: "np.memmap[tuple[int], np.dtype[np.void]]", band: slice) -> npt.NDArray[np.uint64]:
        hashes = np.zeros(self._count, dtype=np.uint64)
        factor = np.uint64(0x9E3779B97F4A7C15)
        for start in range(0, self._count, _PAIRS_AT_ONCE):
            part = held["signature"][start : start + _PAIRS_AT_ONCE, band].astype(np.uint64)
            mixed = np.zeros(len(part), dtype=np.uint64)
            for column in part.T:
                mixed = (mixed ^ column) * factor
                mixed ^= mixed >> np.uint64(29)
            hashes[start : start + len(part)] = mixed
        return hashes

    def _drop(
        self,
        held: "np.memmap[tuple[int], np.dtype[np.void]]",
        order: npt.NDArray[np.intp],
        same: npt.NDArray[np.bool_],
        dropped: npt.NDArray[np.bool_],
    ) -> None:
        """Compare the members of each run of equal hashes with the run's first; those unlike it among themselves."""
        run = np.concatenate([[0], np.cumsum(~same)])
        in_run = np.concatenate([[False], same]) | np.concatenate([same, [False]])
        members, run = order[in_run], run[in_run]
        while len(members):
            first = np.concatenate([[True], run[1:] != run[:-1]])
            leaders = members[np.maximum.accumulate(np.where(first, np.arange(len(members)), 0))]
            alike = np.zeros(len(members), dtype=np.bool_)
            for start in range(0, len(members), _PAIRS_AT_ONCE):
                part = slice(start, start + _PAIRS_AT_ONCE)
                a, b = held[leaders[part]], held[members[part]]
                alike[part] = (a["signature"] == b["signature"]).mean(axis=1) >= self._threshold
                dropped[members[part]] |= alike[part] & ~first[part] & (a["id"] != b["id"])
            rest = ~alike & ~first
            members, run = members[rest], run[rest]
