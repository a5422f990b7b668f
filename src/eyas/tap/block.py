"""A block of the ring: the rows of one forward pass, or a part of them, and where its tensors lie.

64 bytes of header, the segments as JSON [[rid, start, length], ...], then the tensors of `_fields`, each 64-byte
aligned.
"""

import json
from typing import NamedTuple

import torch
from torch import Tensor

from .encode import DTYPES, Encoded

AUX_LAYERS = 3
ALIGN = 64


class Segment(NamedTuple):
    """Rows of request `rid` at positions start..start+length of its token ids."""

    rid: str
    start: int
    length: int


class Layout(NamedTuple):
    """What a row holds: 3 aux states and the final state of one token, encoded as `tap.encode` does."""

    hidden_size: int
    encoding: str
    final_encoding: str


class Rows(NamedTuple):
    """The tensors of a block, as views on memory.

    Attributes:
        token_ids: int32 [n].
        aux: values [n, 3, H]; scales [n, 3] and error [n, 3, 2], None for bf16; faults [n, 3].
        final: values [n, H]; scales [n] and error [n, 2], None for bf16; faults [n].
    """

    token_ids: Tensor
    aux: Encoded
    final: Encoded


class Slot(NamedTuple):
    """A reserved block: its tensors are filled (`fill`, or field by field), then it is published.

    Attributes:
        rows: number of rows n.
        token_ids, aux, final: as in Rows.
        begin, end: place in the ring, in bytes since it was made; a filler before the block is included.
    """

    rows: int
    token_ids: Tensor
    aux: Encoded
    final: Encoded
    begin: int
    end: int

    def fill(self, rows: Rows) -> None:
        """Copy rows in. From a GPU the copies are only queued, on its current stream."""
        self.token_ids.copy_(rows.token_ids, non_blocking=True)
        for part, source in ((self.aux, rows.aux), (self.final, rows.final)):
            for tensor, given in zip(part, source, strict=True):
                if tensor is not None and given is not None:
                    tensor.copy_(given, non_blocking=True)


class Block:
    """A published block, as the consumer sees it. Its tensors are views on the ring, valid until it is released.

    Attributes:
        segments: whose rows these are, in order.
        rows: the sum of their lengths.
        token_ids, aux, final: all rows, as in Rows.
        end: its place in the ring.
    """

    def __init__(self, segments: list[Segment], rows: Rows, end: int) -> None:
        self.segments, self.end = segments, end
        self.token_ids, self.aux, self.final = rows
        self._firsts = [0]
        for segment in segments:
            self._firsts.append(self._firsts[-1] + segment.length)
        self.rows = self._firsts[-1]

    def piece(self, i: int) -> tuple[Tensor, Encoded, Encoded]:
        """Token ids, aux states and final states of segment `i`: views, valid until the block is released."""
        rows = slice(self._firsts[i], self._firsts[i + 1])
        return self.token_ids[rows], cut(self.aux, rows), cut(self.final, rows)


def row_bytes(layout: Layout) -> int:
    """Bytes of one row in the ring."""
    return sum(_bytes(dtype, shape) for _, dtype, shape in _fields(layout))


def place(layout: Layout, rows: int, table_bytes: int) -> tuple[int, list[int]]:
    """Bytes of a block, and where each of its tensors starts."""
    at, starts = up(ALIGN + table_bytes, ALIGN), []
    for _, dtype, shape in _fields(layout):
        starts.append(at)
        at += up(_bytes(dtype, shape) * rows, ALIGN)
    return at, starts


def view(memory: Tensor, base: int, layout: Layout, rows: int, starts: list[int]) -> Rows:
    """The tensors of the block at byte `base` of `memory` (uint8)."""
    found: dict[str, Tensor] = {}
    for (name, dtype, shape), start in zip(_fields(layout), starts, strict=True):
        first = base + start
        found[name] = memory[first : first + _bytes(dtype, shape) * rows].view(dtype).view(rows, *shape)
    aux, final = (
        Encoded(
            found[f"{kind}_values"], found.get(f"{kind}_scales"), found[f"{kind}_faults"], found.get(f"{kind}_error")
        )
        for kind in ("aux", "final")
    )
    return Rows(found["token_ids"], aux, final)


def table(segments: list[Segment]) -> bytes:
    """The segments as they stand in a block."""
    return json.dumps(segments, separators=(",", ":")).encode()


def up(value: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-value // step) * step


def _fields(layout: Layout) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and shape of a row of each tensor, in the order they lie in a block."""
    fields: list[tuple[str, torch.dtype, tuple[int, ...]]] = [("token_ids", torch.int32, ())]
    for kind, encoding, shape in (("aux", layout.encoding, (AUX_LAYERS,)), ("final", layout.final_encoding, ())):
        fields.append((f"{kind}_values", DTYPES[encoding], (*shape, layout.hidden_size)))
        fields.append((f"{kind}_faults", torch.int8, shape))
        if encoding == "fp8":
            fields.append((f"{kind}_scales", torch.float32, shape))
            fields.append((f"{kind}_error", torch.float32, (*shape, 2)))
    return fields


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


def cut(part: Encoded, rows: slice | Tensor) -> Encoded:
    """Some rows: views for a slice, a copy for a mask."""
    scales, error = part.scales, part.error
    return Encoded(
        part.values[rows],
        None if scales is None else scales[rows],
        part.faults[rows],
        None if error is None else error[rows],
    )
