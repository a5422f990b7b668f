"""The tap on a real GPU: rows go from its memory into a real ring and out of it in another process, and the forward
path never waits for the GPU. Run by `make test-gpu`."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from eyas.tap.encode import Encoded, decode, encode
from eyas.tap.events import Events
from eyas.tap.ring import Layout, Ring, row_bytes
from eyas.tap.send import Output, Piece, Sender
from eyas.tap.writer import RingWriter

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
ENCODINGS = [("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")]

# Reads `rows` rows and saves them whole (or, with no file, only gives them back), slowly if asked to.
CONSUMER = """
import sys, time, torch
from eyas.tap.reader import RingReader
path, out, rows, pause = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
ring, kept, seen = RingReader.attach(path), [], 0
ring.open()
print("reading", flush=True)
while seen < rows:
    block = ring.read(0.1)
    if block is None:
        continue
    time.sleep(pause)
    if out:
        whole = [[None if part is None else part.clone() for part in side] for side in (block.aux, block.final)]
        kept.append((block.segments, block.token_ids.clone(), *whole))
    seen += block.rows
    ring.release(block)
if out:
    torch.save([([tuple(s) for s in segments], *rest) for segments, *rest in kept], out)
"""


class Consumer:
    def __init__(self, ring: Path, rows: int, out: Path | None = None, pause: float = 0.0) -> None:
        words = [sys.executable, "-c", CONSUMER, str(ring), str(out or ""), str(rows), str(pause)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "reading\n"

    def join(self) -> None:
        assert self.process.wait(timeout=120) == 0
        self.process.stdout.close()


@pytest.fixture
def path() -> Iterator[Path]:
    path = Path(f"/dev/shm/eyas-gpu-test-{os.getpid()}")
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def make_sender(path: Path, tmp_path: Path) -> Iterator[Callable[[Layout, int], tuple[Sender, RingWriter]]]:
    """Makes the ring of a layout and capacity, and what sends into it."""
    senders: list[Sender] = []

    def make(layout: Layout, capacity: int) -> tuple[Sender, RingWriter]:
        Ring.create(str(path), capacity, layout)
        ring = RingWriter.attach(str(path))
        senders.append(Sender(ring, Events(str(tmp_path / "events")), torch.device("cuda", 0), 30.0))
        return senders[-1], ring

    yield make
    for sender in senders:
        sender.close()


def make_output(rows: int, hidden: int, packed: bool, seed: int) -> Output:
    generator = torch.Generator("cuda").manual_seed(seed)
    layers = [torch.randn(rows, hidden, device="cuda", generator=generator).bfloat16() for _ in range(3)]
    final = torch.randn(rows, hidden, device="cuda", generator=generator).bfloat16()
    ids = torch.arange(rows, device="cuda") + 10000 * seed
    return Output(ids, torch.cat(layers, -1) if packed else layers, final)


def wipe(output: Output) -> None:
    """What the engine's next batch does to the memory of this one."""
    for tensor in (output.token_ids, output.final, *(output.aux if isinstance(output.aux, list) else [output.aux])):
        tensor.zero_()


def equal(found: list, expected: Encoded, rows: slice) -> bool:
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            if one is not other:
                return False
        elif not torch.equal(one.view(torch.uint8), other[rows].cpu().contiguous().view(torch.uint8)):
            return False
    return True


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("encodings", ENCODINGS)
def test_rows_arrive_whole_in_another_process(encodings, packed: bool, path: Path, tmp_path: Path, make_sender) -> None:
    """Through a ring that is too small for all of them at once, from memory that is overwritten right after."""
    layout = Layout(1024, *encodings)
    sender, ring = make_sender(layout, 900 * row_bytes(layout))
    assert sender.pinned and ring.memory.is_pinned()
    batches, rows = 24, 700
    consumer = Consumer(path, batches * 500, tmp_path / "out")
    for number in range(batches):
        output = make_output(rows, 1024, packed, number)
        sender.send([Piece(f"eyas-{number}a", 3, 300, 0), Piece(f"eyas-{number}b", 0, 200, 400)], output)
        wipe(output)
    consumer.join()
    blocks, at = torch.load(tmp_path / "out"), 0
    for number in range(batches):
        output = make_output(rows, 1024, packed, number)
        ours = torch.cat([torch.arange(0, 300), torch.arange(400, 600)]).cuda()
        layers = list(output.aux.split(1024, -1)) if packed else output.aux
        aux = encode(torch.stack([layer[ours] for layer in layers], 1), encodings[0])
        final = encode(output.final[ours], encodings[1])
        done, extents = 0, []
        while done < 500:
            segments, ids, found_aux, found_final = blocks[at]
            cut = slice(done, done + len(ids))
            assert ids.tolist() == (ours[cut] + 10000 * number).tolist()
            assert equal(found_aux, aux, cut) and equal(found_final, final, cut)
            extents += segments
            done, at = done + len(ids), at + 1
        assert sum(length for rid, _, length in extents if rid == f"eyas-{number}a") == 300
        assert {rid for rid, _, _ in extents} == {f"eyas-{number}a", f"eyas-{number}b"}
    assert at == len(blocks) and ring.counters().dropped_rows == 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # of torch, where it is set
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("encodings", ENCODINGS)
def test_the_forward_path_does_not_wait_for_the_gpu(encodings, packed: bool, path: Path, make_sender) -> None:
    """No call in it synchronises, and it returns while the GPU is still busy with what came before."""
    layout = Layout(4096, *encodings)
    sender, ring = make_sender(layout, 1 << 30)
    pieces, rows = [Piece("eyas-a", 0, 2000, 0), Piece("eyas-b", 0, 2096, 2000)], 4096
    consumer = Consumer(path, 3 * rows)
    output = make_output(rows, 4096, packed, 1)
    sender.send(pieces, output)  # loads kernels, grows the allocator's pools
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sender.send(pieces, output)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    slept = torch.cuda.Event()
    slept.record()
    began = time.monotonic()
    sender.send(pieces, output)
    took = time.monotonic() - began
    busy = not slept.query()
    consumer.join()
    assert busy and took < 0.3, f"send took {took:.3f} s"
    assert ring.counters().rows == 3 * rows


def test_a_full_ring_holds_the_forward_up_and_loses_nothing(path: Path, tmp_path: Path, make_sender) -> None:
    layout = Layout(1024, "bf16", "bf16")
    sender, ring = make_sender(layout, 2000 * row_bytes(layout))
    consumer = Consumer(path, 20 * 900, tmp_path / "out", pause=0.05)
    for number in range(20):
        output = make_output(900, 1024, False, number)
        sender.send([Piece(f"eyas-{number}", 0, 900, 0)], output)
        wipe(output)
    consumer.join()
    counters = ring.counters()
    assert counters.waited_s > 0.3 and counters.dropped_rows == 0 and counters.rows == 18000
    found = torch.cat([ids for _, ids, _, _ in torch.load(tmp_path / "out")])
    assert found.tolist() == [row + 10000 * number for number in range(20) for row in range(900)]


def test_without_a_reader_nothing_is_kept_or_waited_for(path: Path, tmp_path: Path, make_sender) -> None:
    sender, ring = make_sender(Layout(1024, "bf16", "bf16"), 64 << 20)
    began = time.monotonic()
    for number in range(50):
        sender.send([Piece("eyas-a", 0, 900, 0)], make_output(900, 1024, False, number))
    assert time.monotonic() - began < 5 and ring.counters().dropped_rows == 45000
    consumer = Consumer(path, 900, tmp_path / "out")
    sender.send([Piece("eyas-b", 0, 900, 0)], make_output(900, 1024, False, 7))
    consumer.join()
    assert torch.load(tmp_path / "out")[0][0][0][0] == "eyas-b"


@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
def test_a_gpu_encodes_as_a_cpu_does(encoding: str) -> None:
    states = torch.randn(2000, 3, 1024).bfloat16() * torch.tensor([1.0, 300.0, 0.01]).view(1, 3, 1)
    states[5, 1] = 0
    states[6, 0, 7] = float("nan")
    states[7, 2, 9] = float("inf")
    gpu, cpu = encode(states.cuda(), encoding), encode(states, encoding, every=1)
    assert torch.equal(gpu.faults.cpu(), cpu.faults) and cpu.faults.count_nonzero() == 3
    fine = cpu.faults == 0
    if encoding == "bf16":
        assert torch.equal(gpu.values.cpu()[fine], cpu.values[fine])
        return
    # 0.4% of these values lie halfway between two codes, where the last bit of a division decides: either is as near.
    given, scales = states[fine].double(), cpu.scales[fine].double()[:, None]
    off, best = ((made.values.cpu()[fine].double() * scales - given).abs() for made in (gpu, cpu))
    torch.testing.assert_close(off, best, rtol=1e-4, atol=0)
    torch.testing.assert_close(gpu.scales.cpu()[fine], cpu.scales[fine], rtol=1e-6, atol=0)
    # Of its own codes: decoded values are rounded to bf16, so two codes that are as near may differ by an eighth there.
    off = decode(gpu.values.cpu(), gpu.scales.cpu()).float() - states.float()
    squares = torch.stack([off.square().sum(-1), states.float().square().sum(-1)], -1)
    torch.testing.assert_close(gpu.error.cpu()[fine], squares[fine], rtol=1e-3, atol=0)


@pytest.mark.parametrize("encodings", [("bf16", "bf16"), ("fp8", "fp8")])
def test_speed(encodings, path: Path, make_sender) -> None:
    """Prints what 8,192 rows of H = 7168 cost the forward's stream and thread, and what goes through in a second."""
    hidden, rows, passes = 7168, 8192, 12
    layout = Layout(hidden, *encodings)
    sender, ring = make_sender(layout, 4 << 30)
    consumer = Consumer(path, (passes + 2) * rows)
    output, pieces = make_output(rows, hidden, True, 1), [Piece("eyas-a", 0, rows, 0)]
    for _ in range(2):
        sender.send(pieces, output)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    sender.send(pieces, output)
    marks[1].record()
    torch.cuda.synchronize()
    stream_ms, peak = marks[0].elapsed_time(marks[1]), torch.cuda.max_memory_allocated() / 2**30
    began, threads = time.monotonic(), []
    for _ in range(passes - 1):
        asked = time.monotonic()
        sender.send(pieces, output)
        threads.append(time.monotonic() - asked)
    consumer.join()
    took = time.monotonic() - began
    size = (passes - 1) * rows * row_bytes(layout) / 1e9
    print(
        f"{encodings}: {stream_ms:.2f} ms of the forward's stream and {min(threads) * 1e3:.2f} ms of its thread "
        f"for {rows:,} rows of H {hidden}; {size / took:.1f} GB/s through the ring; peak {peak:.2f} GiB; "
        f"waited {ring.counters().waited_s:.2f} s"
    )
    assert ring.counters().rows == (passes + 2) * rows and ring.counters().dropped_rows == 0
