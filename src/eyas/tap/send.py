"""Rows from the model's output into the ring, on the way encoded and checked on their own device.

On a GPU nothing here waits for it while the ring has room. On the forward's stream: rows are gathered into tensors of
their own (the engine writes its next batch over the originals) and encoded, an event is recorded. On a side stream:
wait for the event, copy into the ring, which is registered with CUDA as pinned. A thread waits for the copies, in
order, and publishes; until then it holds the tensors, so that their memory isn't given to others.
"""

import queue
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .block import AUX_LAYERS, Rows, Segment, Slot
from .encode import encode
from .events import Events, Refused
from .ring import RingError
from .settings import Settings
from .writer import RingWriter

_MOST_REQUESTS = 64  # in a block: their names take 6 KB of the 16 that the smallest ring has for them


class Piece(NamedTuple):
    """Rows row..row+length of a batch: positions start..start+length of request `rid`."""

    rid: str
    start: int
    length: int
    row: int


class Output(NamedTuple):
    """What the model gives for the rows of a batch, and perhaps for padding after them.

    Attributes:
        token_ids: integers [rows].
        aux: 3 tensors [rows, H], or one [rows, 3H].
        final: [rows, H].
    """

    token_ids: Tensor
    aux: list[Tensor] | Tensor
    final: Tensor


def connect(settings: Settings, events: Events, device: torch.device) -> "Sender":
    """Attach the ring and become its producer.

    Raises: Refused where it is gone, or its rows hold something else.
    """
    try:
        ring = RingWriter.attach(settings.ring)
        if ring.layout != settings.layout:
            raise RingError(f"{settings.ring}: {ring.layout}")
        sender = Sender(ring, events, device, settings.patience_s)
    except (OSError, RingError) as error:
        cause = "the ring was removed or made for another run"
        raise Refused(str(error), f"a ring of {settings.layout}", cause) from error
    events.write("ring", pinned=sender.pinned)
    return sender


class Sender:
    """Puts rows into a ring. One thread calls `send`.

    Attributes:
        pinned: whether the ring is registered with CUDA.
    """

    def __init__(self, ring: RingWriter, events: Events, device: torch.device, patience_s: float) -> None:
        self._ring, self._events, self._patience_s = ring, events, patience_s
        self._dropping = False
        ring.open()
        self._copier = _Copier(ring, device) if device.type == "cuda" else None
        self.pinned = self._copier is not None

    def send(self, pieces: list[Piece], output: Output) -> None:
        """Put these rows into the ring, in blocks that leave it in order; waits for room as `reserve` does."""
        deadline = time.monotonic() + self._patience_s
        for part in self._parts(pieces):
            segments = [Segment(*piece[:3]) for piece in part]
            rows = sum(piece.length for piece in part)
            slot = self._ring.reserve(rows, segments, max(0.0, deadline - time.monotonic()))
            if slot is None:
                self._tell(self._ring.dropping, rows)
                continue
            try:
                self._put(slot, part, output)
            except torch.OutOfMemoryError as error:  # of the rows' copies: the engine itself has what it needs
                self._ring.abandon(slot)
                self._tell(str(error).split("\n")[0], rows)
                continue
            self._tell("", 0)

    def close(self) -> None:
        """Wait until all that was sent is published, and release the ring."""
        if self._copier is not None:
            self._copier.close()

    def _parts(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """What goes into one block each."""
        for first in range(0, len(pieces), _MOST_REQUESTS):
            some = pieces[first : first + _MOST_REQUESTS]
            yield from split(some, self._ring.most_rows([Segment(*piece[:3]) for piece in some]))

    def _put(self, slot: Slot, part: list[Piece], output: Output) -> None:
        layout = self._ring.layout
        ids, aux, final = gather(part, output)
        rows = Rows(ids, encode(aux, layout.encoding, every=1), encode(final, layout.final_encoding, every=1))
        if self._copier is None:
            slot.fill(rows)
            self._ring.publish(slot)
        else:
            self._copier.copy(slot, rows)

    def _tell(self, why: str, rows: int) -> None:
        if why and not self._dropping:
            self._events.write("dropped", why=why, rows=rows)
        if not why and self._dropping:
            self._events.write("flowing", dropped_rows=self._ring.counters().dropped_rows)
        self._dropping = bool(why)


class _Copier:
    """The side stream, and the thread that publishes what it has copied."""

    def __init__(self, ring: RingWriter, device: torch.device) -> None:
        self._ring, self._device = ring, device
        code = int(torch.cuda.cudart().cudaHostRegister(ring.memory.data_ptr(), ring.memory.numel(), 0))
        if code != 0:
            raise Refused(
                f"cudaHostRegister of {ring.memory.numel()} bytes at {ring.path}: error {code}",
                "0",
                "a limit on locked memory (ulimit -l), or too little memory for a ring of this size",
            )
        self._stream = torch.cuda.Stream(device)
        self._queue: queue.SimpleQueue[tuple[Slot, torch.cuda.Event, Rows] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._publish, name="eyas-tap", daemon=True)
        self._thread.start()

    def copy(self, slot: Slot, rows: Rows) -> None:
        """Queue the copy of rows that the current stream is making."""
        if not self._thread.is_alive():
            raise RuntimeError("eyas: the thread that publishes rows has ended; the log says why")
        made, copied = torch.cuda.Event(), torch.cuda.Event(blocking=True)
        made.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(made)
            slot.fill(rows)
            copied.record(self._stream)
        self._queue.put((slot, copied, rows))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        torch.cuda.cudart().cudaHostUnregister(self._ring.memory.data_ptr())

    def _publish(self) -> None:
        torch.cuda.set_device(self._device)
        while (queued := self._queue.get()) is not None:
            slot, copied, rows = queued
            copied.synchronize()  # without the GIL, asleep
            self._ring.publish(slot)
            del queued, rows


def split(pieces: list[Piece], most: int) -> list[list[Piece]]:
    """The same rows in the same order, in parts of at most `most` rows.

    Raises: ValueError where not one fits.
    """
    if most < 1:
        raise ValueError(f"the ring is too small for a row and the names of {len(pieces)} requests")
    parts: list[list[Piece]] = [[]]
    room = most
    for rid, start, length, row in pieces:
        done = 0
        while done < length:
            if room == 0:
                parts.append([])
                room = most
            taken = min(room, length - done)
            parts[-1].append(Piece(rid, start + done, taken, row + done))
            done, room = done + taken, room - taken
    return parts


def gather(part: list[Piece], output: Output) -> tuple[Tensor, Tensor, Tensor]:
    """These rows in memory of their own: int32 [n], aux [n, 3, H] and final states [n, H] in the model's type."""
    stretches = _stretches(part)
    if isinstance(output.aux, Tensor):
        aux = _join(output.aux, stretches).unflatten(-1, (AUX_LAYERS, -1))
    else:
        layers = [layer[stretches[0]] if len(stretches) == 1 else _join(layer, stretches) for layer in output.aux]
        aux = torch.stack(layers, 1)
    return _join(output.token_ids, stretches).to(torch.int32), aux, _join(output.final, stretches)


def _join(tensor: Tensor, stretches: list[slice]) -> Tensor:
    return torch.cat([tensor[rows] for rows in stretches])


def _stretches(part: list[Piece]) -> list[slice]:
    """Rows of the batch, pieces that touch taken together."""
    found: list[slice] = []
    for piece in part:
        end = piece.row + piece.length
        if found and found[-1].stop == piece.row:
            found[-1] = slice(found[-1].start, end)
        else:
            found.append(slice(piece.row, end))
    return found
