"""The ring between the engine and the capture worker: nothing lost, nothing doubled, order kept, and no consumer that
is dead, slow or stopped holds the producer for long."""

import errno
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from eyas.tap.block import AUX_LAYERS, Rows, cut, table
from eyas.tap.encode import encode
from eyas.tap.reader import RingReader
from eyas.tap.ring import HEADER_BYTES, Layout, Ring, RingError, Segment, least_capacity, row_bytes
from eyas.tap.writer import RingWriter

ENCODINGS = [("bf16", "bf16"), ("fp8", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")]


def make_rows(layout: Layout, count: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(count, AUX_LAYERS, layout.hidden_size, generator=generator)
    final = torch.randn(count, layout.hidden_size, generator=generator)
    ids = torch.arange(count, dtype=torch.int32) + 1000 * seed
    return Rows(ids, encode(aux, layout.encoding, every=1), encode(final, layout.final_encoding, every=1))


def same(found, expected) -> bool:
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
        elif one.dtype != other.dtype or not torch.equal(
            one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
        ):
            return False
    return True


def assert_block(block, segments: list[Segment], rows: Rows) -> None:
    assert block.segments == segments
    assert torch.equal(block.token_ids, rows.token_ids)
    assert same(block.aux, rows.aux) and same(block.final, rows.final)


@pytest.fixture
def pair(tmp_path):
    """A ring's two ends in one process."""
    layout = Layout(8, "fp8", "bf16")
    path = str(tmp_path / "ring")
    Ring.create(path, least_capacity(layout), layout)
    writer, reader = RingWriter.attach(path), RingReader.attach(path)
    writer.open()
    yield writer, reader
    reader.close()


def fill(path: str) -> None:
    """Publish blocks until there is no room."""
    ring, number = RingWriter.attach(path), 0
    while (slot := ring.reserve(16, [Segment("eyas-f", 0, 16)], 0.0)) is not None:
        slot.fill(make_rows(ring.layout, 16, number))
        ring.publish(slot)
        number += 1


class Naive:
    """A ring's two ends, and beside them deques of what should be where."""

    def __init__(self, path: Path, layout: Layout, capacity: int) -> None:
        Ring.create(str(path), capacity, layout)
        self.writer, self.reader = RingWriter.attach(str(path)), RingReader.attach(str(path))
        self.reader.open()
        self.reserved, self.published, self.taken = deque(), deque(), []
        self.sent = self.freed = self.dropped = self.number = 0

    def reserve(self, choice: int) -> None:
        """Room for between 1 row and nearly half of the ring, in between 1 and 5 segments."""
        self.number += 1
        ids = [f"eyas-{self.number}-{part}" for part in range(1 + choice % 5)]
        most = 2 * self.writer.most_rows([Segment(rid, 0, 1) for rid in ids]) - 8 * len(ids)
        lengths = [1 + (choice >> part) % max(1, most // len(ids)) for part in range(len(ids))]
        segments = [Segment(rid, choice % 97, length) for rid, length in zip(ids, lengths, strict=True)]
        slot = self.writer.reserve(sum(lengths), segments, 0.0)
        if slot is None:
            self.dropped += sum(lengths)
            assert self.reserved or self.published or self.taken, "an empty ring has room for half its size"
        else:
            rows = make_rows(self.writer.layout, slot.rows, self.number)
            slot.fill(rows)
            self.reserved.append((slot, segments, rows))

    def publish(self, choice: int) -> None:
        if self.reserved:
            slot, segments, rows = self.reserved.popleft()
            self.writer.publish(slot)
            self.published.append((segments, rows))
            self.sent += slot.rows

    def abandon(self, choice: int) -> None:
        if self.reserved:
            slot, *_ = self.reserved.pop()
            self.writer.abandon(slot)
            self.dropped += slot.rows

    def read(self, choice: int) -> None:
        block = self.reader.read(0.0)
        assert (block is None) == (not self.published)
        if block is not None:
            segments, rows = self.published.popleft()
            assert_block(block, segments, rows)
            self.taken.append((block, segments, rows))

    def release(self, choice: int) -> None:
        if self.taken:
            block, segments, rows = self.taken.pop(choice % len(self.taken))
            assert_block(block, segments, rows)  # whole after all that was written meanwhile
            self.reader.release(block)
            self.freed += block.rows

    def cycle(self, choice: int) -> None:
        for step in (self.reserve, self.publish, self.read, self.release):
            step(choice)

    def check(self) -> None:
        counters = self.writer.counters()
        assert (counters.rows, counters.dropped_rows, counters.released_rows) == (self.sent, self.dropped, self.freed)
        assert counters.reserved_rows == self.sent + sum(slot.rows for slot, *_ in self.reserved)
        assert 0 <= counters.used_bytes <= counters.capacity_bytes


STEPS = st.tuples(
    st.sampled_from(["cycle", "cycle", "reserve", "reserve", "publish", "publish", "read", "release", "abandon"]),
    st.integers(0, 10**9),
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(STEPS, min_size=30, max_size=120), encodings=st.sampled_from(ENCODINGS), extra=st.integers(0, 30000)
)
def test_like_a_deque(steps, encodings, extra, tmp_path_factory) -> None:
    """Any sequence of steps with blocks of any size: nothing lost, nothing doubled, order kept, around the end too."""
    layout = Layout(8, *encodings)
    naive = Naive(tmp_path_factory.mktemp("ring") / "ring", layout, least_capacity(layout) + extra)
    for step, choice in steps:
        getattr(naive, step)(choice)
        naive.check()
    event(f"around {naive.writer.counters().rows * row_bytes(layout) // naive.writer.capacity} times")
    event("dropped" if naive.dropped else "all kept")
    naive.reader.close()


@pytest.mark.parametrize("encodings", ENCODINGS)
def test_a_piece_is_its_rows(encodings, tmp_path: Path) -> None:
    layout = Layout(64, *encodings)
    Ring.create(str(tmp_path / "ring"), 1 << 20, layout)
    ring, reader = RingWriter.attach(str(tmp_path / "ring")), RingReader.attach(str(tmp_path / "ring"))
    reader.open()
    segments, rows = [Segment("eyas-a", 5, 3), Segment("eyas-b", 0, 7)], make_rows(layout, 10, 1)
    slot = ring.reserve(10, segments, 0.0)
    assert slot is not None and slot.token_ids.dtype == torch.int32
    slot.fill(rows)
    ring.publish(slot)
    block = reader.read(1.0)
    mask = torch.tensor([True, False, True, True, False, False, True])
    ids, aux, final = block.piece(1)
    assert ids.tolist() == rows.token_ids[3:].tolist() and aux.values.is_contiguous()
    assert same(aux, [None if part is None else part[3:] for part in rows.aux])
    assert same(final, [None if part is None else part[3:] for part in rows.final])
    assert same(cut(final, mask), [None if part is None else part[3:][mask] for part in rows.final])
    assert same(block.piece(0)[2], [None if part is None else part[:3] for part in rows.final])
    for part in (block.token_ids, *block.aux, *block.final):
        assert part is None or part.data_ptr() % 64 == 0


def test_a_row_costs_what_it_stores() -> None:
    assert row_bytes(Layout(7168, "bf16", "bf16")) == 4 * 7168 * 2 + 4 + 4
    assert row_bytes(Layout(7168, "fp8", "fp8")) == 4 * 7168 + 4 + 4 * (1 + 4 + 8)


def test_most_rows_fill_a_quarter(pair) -> None:
    writer, reader = pair
    reader.open()
    segments = [Segment("eyas-a", 0, 10**6), Segment("eyas-b", 7, 10**6)]
    most = writer.most_rows(segments)
    assert most >= 16
    slot = writer.reserve(most, segments, 0.0)
    assert writer.capacity // 4 - 2 * row_bytes(writer.layout) - 1024 < slot.end - slot.begin <= writer.capacity // 4
    with pytest.raises(ValueError, match="in a ring of"):
        writer.reserve(4 * most, segments, 0.0)


def test_blocks_leave_in_the_order_of_their_reservation(pair) -> None:
    writer, reader = pair
    reader.open()
    first, second = (writer.reserve(1, [Segment("eyas-a", at, 1)], 0.0) for at in (0, 1))
    with pytest.raises(RuntimeError, match="out of order"):
        writer.publish(second)
    with pytest.raises(RuntimeError, match="not the last"):
        writer.abandon(first)
    assert reader.read(0.0) is None
    writer.publish(first)
    writer.publish(second)
    block = reader.read(0.0)
    reader.release(block)
    with pytest.raises(RuntimeError, match="released already"):
        reader.release(block)


def test_without_a_reader_rows_are_dropped_at_once(pair) -> None:
    writer, reader = pair
    began = time.monotonic()
    assert writer.reserve(3, [Segment("eyas-a", 0, 3)], 30.0) is None
    assert writer.dropping == "nobody reads the ring"
    reader.open()
    assert writer.reserve(3, [Segment("eyas-a", 0, 3)], 30.0) is not None and writer.dropping == ""
    reader.close()
    assert writer.reserve(3, [Segment("eyas-a", 0, 3)], 30.0) is None
    assert writer.counters().dropped_rows == 6 and time.monotonic() - began < 1


def test_a_full_ring_is_waited_for(pair) -> None:
    writer, reader = pair
    reader.open()
    fill(writer.path)
    writer = RingWriter.attach(writer.path)
    block = reader.read(0.0)
    threading.Timer(0.3, reader.release, [block]).start()
    began = time.monotonic()
    slot = writer.reserve(16, [Segment("eyas-a", 0, 16)], 30.0)
    assert slot is not None and 0.2 < time.monotonic() - began < 5
    assert 0.2 < writer.counters().waited_s < 5


def test_a_reader_that_moves_nothing_costs_one_wait(pair) -> None:
    writer, reader = pair
    reader.open()
    fill(writer.path)
    writer = RingWriter.attach(writer.path)
    block = reader.read(0.0)
    began = time.monotonic()
    waits = []
    for _ in range(4):
        reader.beat()
        asked = time.monotonic()
        assert writer.reserve(16, [Segment("eyas-a", 0, 16)], 0.4) is None
        waits.append(time.monotonic() - asked)
    assert 0.4 <= time.monotonic() - began < 3 and max(waits[1:]) < 0.1
    assert "released nothing" in writer.dropping
    reader.release(block)  # it moves: rows are kept again, and waited for again
    assert writer.reserve(1, [Segment("eyas-a", 0, 1)], 0.0) is not None


def test_a_ring_that_doesnt_fit_fails_when_it_is_made(tmp_path: Path) -> None:
    state = os.statvfs("/dev/shm")
    path = Path(f"/dev/shm/eyas-test-{os.getpid()}")
    with pytest.raises(OSError) as told:
        Ring.create(str(path), state.f_bavail * state.f_frsize + (1 << 30), Layout(8, "bf16", "bf16"))
    assert told.value.errno == errno.ENOSPC and not path.exists()
    Ring.create(str(tmp_path / "ring"), 1 << 20, Layout(8, "bf16", "bf16"))
    with pytest.raises(FileExistsError):
        Ring.create(str(tmp_path / "ring"), 1 << 20, Layout(8, "bf16", "bf16"))
    assert (tmp_path / "ring").stat().st_size == HEADER_BYTES + (1 << 20)
    with pytest.raises(ValueError, match="at least"):
        Ring.create(str(tmp_path / "small"), 4096, Layout(7168, "bf16", "bf16"))
    assert not (tmp_path / "small").exists()


def test_a_processor_without_ordered_stores_has_no_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(RingError, match="a ring on aarch64"):
        Ring.create(str(tmp_path / "ring"), 1 << 20, Layout(48, "bf16", "bf16"))
    assert not (tmp_path / "ring").exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    path.write_bytes(b"")
    with pytest.raises(RingError, match="no ring"):
        Ring.attach(str(path))
    path.write_bytes(bytes(1 << 20))
    with pytest.raises(RingError, match="expected a ring"):
        Ring.attach(str(path))
    path.unlink()
    Ring.create(str(path), 1 << 20, Layout(8, "bf16", "bf16"))
    os.truncate(path, 1 << 19)
    with pytest.raises(RingError, match="expected a ring"):
        Ring.attach(str(path))


def test_what_is_not_what_was_published_is_told(pair) -> None:
    writer, reader = pair
    reader.open()
    slot = writer.reserve(3, [Segment("eyas-a", 0, 3)], 0.0)
    writer.publish(slot)
    reader.memory[HEADER_BYTES] ^= 1  # the block's size
    with pytest.raises(RingError, match="by its header"):
        reader.read(0.0)
    reader.memory[HEADER_BYTES] ^= 1
    at = bytes(
        reader.memory[HEADER_BYTES + 64 : HEADER_BYTES + 64 + len(table([Segment("eyas-a", 0, 3)]))].tolist()
    ).index(b"3]")
    reader.memory[HEADER_BYTES + 64 + at] = ord("4")
    with pytest.raises(RingError, match="by its segments"):
        reader.read(0.0)


def test_one_writer_one_reader(pair) -> None:
    writer, reader = pair
    reader.open()
    with pytest.raises(RingError, match=f"process {os.getpid()} reads this ring"):
        RingReader.attach(writer.path).open()
    child = subprocess.run(
        [sys.executable, "-c", f"from eyas.tap.writer import RingWriter; RingWriter.attach({writer.path!r}).open()"],
        capture_output=True,
        text=True,
    )
    assert f"process {os.getpid()} writes this ring" in child.stderr


# Other processes, and what happens to them.

CONSUMER = """
import sys, time, torch
from eyas.tap.reader import RingReader
path, log, pause, count = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
ring = RingReader.attach(path)
ring.open()
print("reading", flush=True)
with open(log, "a") as out:
    while count:
        block = ring.read(0.1)
        if block is None:
            continue
        for i, (rid, start, length) in enumerate(block.segments):
            ids, aux, final = block.piece(i)
            whole = torch.equal(aux.values.float(), ids.view(-1, 1, 1).expand(-1, 3, 64).float())
            whole = whole and torch.equal(final.values.float(), ids.view(-1, 1).expand(-1, 64).float())
            out.write(f"{rid} {start} {length} {ids[0]} {whole}\\n")
        out.flush()
        time.sleep(pause)
        ring.release(block)
        count -= 1
"""


class Consumer:
    """A real process that reads a ring, noting what it got before it gives it back."""

    def __init__(self, path: str, log: Path, pause: float = 0.0, count: int = -1) -> None:
        self.log = log
        words = [sys.executable, "-c", CONSUMER, path, str(log), str(pause), str(count)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "reading\n"

    def kill(self, signum: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, signum)
        if signum == signal.SIGKILL:
            self.process.wait()
            self.process.stdout.close()

    def seen(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


class Producer:
    """This process as the engine: block number n holds the value n in all its rows."""

    def __init__(self, tmp_path: Path, capacity: int = 1 << 20) -> None:
        self.path = str(tmp_path / "ring")
        Ring.create(self.path, capacity, Layout(64, "bf16", "bf16"))
        self.ring = RingWriter.attach(self.path)
        self.ring.open()
        self.number = 0

    def send(self, patience_s: float = 30.0) -> bool:
        self.number += 1
        rows, number = 16 + self.number % 40, self.number % 256  # bf16 holds these whole
        slot = self.ring.reserve(rows, [Segment(f"eyas-{self.number}", self.number, rows)], patience_s)
        if slot is None:
            return False
        states = torch.full((rows, AUX_LAYERS, 64), float(number))
        slot.fill(Rows(torch.full((rows,), number), encode(states, "bf16"), encode(states[:, 0], "bf16")))
        self.ring.publish(slot)
        return True

    def line(self, number: int) -> str:
        return f"eyas-{number} {number} {16 + number % 40} {number % 256} True"


def wait_for(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_rows_reach_another_process_whole_and_in_order(tmp_path: Path) -> None:
    producer = Producer(tmp_path)
    consumer = Consumer(producer.path, tmp_path / "log")
    assert all(producer.send() for _ in range(600))  # some 20 times around
    wait_for(lambda: producer.ring.counters().released_rows == producer.ring.counters().rows)
    consumer.kill()
    assert consumer.seen() == [producer.line(number) for number in range(1, 601)]
    assert producer.ring.counters().blocks == 600 and producer.ring.counters().dropped_rows == 0


def test_a_slow_reader_slows_the_engine_and_loses_nothing(tmp_path: Path) -> None:
    producer = Producer(tmp_path, 1 << 18)
    consumer = Consumer(producer.path, tmp_path / "log", pause=0.02)
    assert all(producer.send() for _ in range(60))
    assert producer.ring.counters().waited_s > 0.2
    wait_for(lambda: len(consumer.seen()) == 60)
    consumer.kill()
    assert consumer.seen() == [producer.line(number) for number in range(1, 61)]


def test_a_killed_reader_is_noticed_and_followed_by_another(tmp_path: Path) -> None:
    producer = Producer(tmp_path)
    first = Consumer(producer.path, tmp_path / "first", pause=0.05)
    kept = [number for number in range(1, 9) if producer.send()]
    wait_for(lambda: first.seen())
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    began = time.monotonic()
    assert not any(producer.send() for _ in range(50))
    assert time.monotonic() - began < 2 and f"process {first.process.pid}, has ended" in producer.ring.dropping
    second = Consumer(producer.path, tmp_path / "second")
    kept += [number for number in range(59, 159) if producer.send()]
    assert len(kept) == 108
    wait_for(lambda: producer.ring.counters().released_rows >= producer.ring.counters().rows)
    second.kill()
    first.process.stdout.close()
    # The second begins with what the first had not given back: seen once by a reader that lived to release it.
    lines = [producer.line(number) for number in kept]
    assert second.seen() == lines[len(lines) - len(second.seen()) :]
    given_back = len(lines) - len(second.seen())
    assert first.seen()[:given_back] == lines[:given_back] and len(first.seen()) <= given_back + 1


def test_a_stopped_reader_costs_one_wait_and_goes_on(tmp_path: Path) -> None:
    producer = Producer(tmp_path, 1 << 18)
    consumer = Consumer(producer.path, tmp_path / "log")
    assert producer.send()
    wait_for(lambda: consumer.seen())
    consumer.kill(signal.SIGSTOP)
    began, kept = time.monotonic(), [1]
    kept += [number for number in range(2, 202) if producer.send(patience_s=1.0)]
    assert 1.0 <= time.monotonic() - began < 4
    assert 2 < len(kept) < 100 and producer.ring.counters().dropped_rows > 0
    consumer.kill(signal.SIGCONT)
    wait_for(lambda: producer.ring.counters().released_rows == producer.ring.counters().rows)
    kept += [number for number in range(202, 232) if producer.send()]
    assert kept[-30:] == list(range(202, 232))
    wait_for(lambda: len(consumer.seen()) == len(kept))
    consumer.kill()
    assert consumer.seen() == [producer.line(number) for number in kept]


def test_a_reader_that_is_silent_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.tap.writer.STALE_S", 0.5)
    producer = Producer(tmp_path, 1 << 18)
    consumer = Consumer(producer.path, tmp_path / "log")
    consumer.kill(signal.SIGSTOP)
    began = time.monotonic()
    while producer.send(patience_s=30.0):
        pass
    assert time.monotonic() - began < 5 and "silent" in producer.ring.dropping
    consumer.kill(signal.SIGKILL)


def test_a_writer_that_is_killed_leaves_whole_blocks(tmp_path: Path) -> None:
    """Killed between filling a block and publishing it, at some hundred places: the reader sees whole blocks only."""
    path = str(tmp_path / "ring")
    Ring.create(path, 1 << 20, Layout(64, "bf16", "bf16"))
    reader = RingReader.attach(path)
    reader.open()
    program = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_tap_ring import *
producer = Producer.__new__(Producer); producer.ring, producer.number = RingWriter.attach({path!r}), 0
producer.ring.open()
print("writing", flush=True)
while True:
    producer.send()
"""
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "writing\n"
        numbers, deadline = [], time.monotonic() + 0.7
        while time.monotonic() < deadline or child.poll() is None:
            if time.monotonic() >= deadline and child.poll() is None:
                child.kill()
                child.wait()
            block = reader.read(0.01)
            if block is not None:
                number = int(block.segments[0].rid.removeprefix("eyas-"))
                assert (block.aux.values.float() == number % 256).all() and (block.token_ids == number % 256).all()
                numbers.append(number)
                reader.release(block)
        while (block := reader.read(0.0)) is not None:
            numbers.append(int(block.segments[0].rid.removeprefix("eyas-")))
            reader.release(block)
        child.stdout.close()
        assert len(numbers) > 10 and numbers == list(range(1, len(numbers) + 1))
    reader.close()
