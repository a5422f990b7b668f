"""Which rows of a batch are kept, how they are gathered, cut and sent: on plain objects in place of SGLang's."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.tap.encode import encode
from eyas.tap.events import Events, Refused
from eyas.tap.reader import RingReader
from eyas.tap.ring import Layout, Ring, least_capacity
from eyas.tap.send import Output, Piece, Sender, gather, split
from eyas.tap.sglang import checked, snapshot
from eyas.tap.writer import RingWriter

HIDDEN = 16


def make_batch(requests, mode="EXTEND", **more):
    """A batch as `ForwardBatch.init_new` makes it, of (rid, prefix, extent, prompt length)."""
    rids, starts, lengths, prompts = (list(column) for column in zip(*requests, strict=True)) if requests else ([],) * 4
    rows = sum(lengths)
    fields = {
        "forward_mode": SimpleNamespace(name=mode),
        "rids": rids,
        "extend_prefix_lens_cpu": starts,
        "extend_seq_lens_cpu": lengths,
        "eyas_prompt_lengths": prompts,
        "input_ids": torch.arange(rows),
    }
    return SimpleNamespace(**(fields | more))


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["eyas-", "HEALTH_CHECK_", ""]), st.integers(0, 50), st.integers(1, 20), st.integers(1, 60)
    ),
    min_size=1,
    max_size=8,
)


@given(requests=REQUESTS, mode=st.sampled_from(["EXTEND", "MIXED"]))
def test_kept_are_prompt_positions_of_our_requests(requests, mode) -> None:
    requests = [(f"{rid}{number}", *extent) for number, (rid, *extent) in enumerate(requests)]
    batch = snapshot(make_batch(requests, mode), "eyas-")
    found = [] if batch is None else [(p.rid, p.start + i, p.row + i) for p in batch.pieces for i in range(p.length)]
    naive, row = [], 0
    for rid, start, length, prompt in requests:
        for position in range(start, start + length):
            if rid.startswith("eyas-") and position < prompt:
                naive.append((rid, position, row))
            row += 1
    assert found == naive and (batch is None or batch.rows == row)


def test_decode_tails_of_a_mixed_batch_are_left() -> None:
    requests = [("eyas-a", 64, 20, 84), ("eyas-b", 90, 1, 90), ("eyas-c", 5, 1, 6)]
    batch = snapshot(make_batch(requests, "MIXED"), "eyas-")
    assert [piece.rid for piece in batch.pieces] == ["eyas-a", "eyas-c"]


@pytest.mark.parametrize("mode", ["DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "DLLM_EXTEND", "SPLIT_PREFILL"])
def test_other_batches_are_left(mode) -> None:
    assert snapshot(make_batch([("eyas-a", 0, 5, 5)], mode), "eyas-") is None
    assert snapshot(make_batch([], mode, rids=None), "eyas-") is None


def test_a_batch_that_doesnt_tell_is_refused() -> None:
    for lacking in ({"extend_seq_lens_cpu": None}, {"eyas_prompt_lengths": [5, 5]}, {"extend_prefix_lens_cpu": []}):
        with pytest.raises(Refused, match="one number for each request"):
            snapshot(make_batch([("eyas-a", 0, 5, 5)], **lacking), "eyas-")
    unknown = make_batch([("eyas-a", 0, 5, 5)])
    del unknown.eyas_prompt_lengths
    with pytest.raises(Refused, match="prompts None"):
        snapshot(unknown, "eyas-")


def make_output(rows: int, packed: bool, dtype=torch.float32) -> Output:
    layers = [torch.randn(rows, HIDDEN).to(dtype) for _ in range(3)]
    return Output(
        torch.arange(rows) + 100, torch.cat(layers, -1) if packed else layers, torch.randn(rows, HIDDEN).to(dtype)
    )


PIECES = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=7)


def place(extents) -> tuple[list[Piece], int]:
    pieces, row = [], 0
    for number, (start, length, gap) in enumerate(extents):
        row += gap
        pieces.append(Piece(f"eyas-{number}", start, length, row))
        row += length
    return pieces, row


@given(extents=PIECES, most=st.integers(1, 40))
def test_split_keeps_rows_and_their_order(extents, most) -> None:
    pieces, _ = place(extents)
    parts = split(pieces, most)

    def rows(some):
        return [(p.rid, p.start + i, p.row + i) for p in some for i in range(p.length)]

    assert rows([piece for part in parts for piece in part]) == rows(pieces)
    sizes = [sum(piece.length for piece in part) for part in parts]
    assert all(size == most for size in sizes[:-1]) and 0 < sizes[-1] <= most


@given(extents=PIECES, packed=st.booleans())
def test_gather_takes_these_rows_in_memory_of_their_own(extents, packed) -> None:
    pieces, rows = place(extents)
    output = make_output(rows + 5, packed)
    wanted = [row for piece in pieces for row in range(piece.row, piece.row + piece.length)]
    layers = list(output.aux.split(HIDDEN, -1)) if packed else output.aux
    naive = torch.stack([layer[wanted] for layer in layers], 1), output.final[wanted].clone()
    ids, aux, final = gather(pieces, output)
    for tensor in (output.token_ids, output.final, *layers):
        tensor.zero_()  # the engine's next batch
    assert ids.dtype == torch.int32 and ids.tolist() == [row + 100 for row in wanted]
    assert torch.equal(aux, naive[0]) and torch.equal(final, naive[1]) and aux.is_contiguous()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("encodings", [("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")])
def test_what_is_sent_is_what_comes_out(encodings, packed, tmp_path) -> None:
    """A batch larger than a quarter of the ring, with a foreign request in it, read back and put together."""
    layout = Layout(HIDDEN, *encodings)
    Ring.create(str(tmp_path / "ring"), 256 << 10, layout)
    ring, reader = RingWriter.attach(str(tmp_path / "ring")), RingReader.attach(str(tmp_path / "ring"))
    reader.open()
    sender = Sender(ring, Events(str(tmp_path / "events")), torch.device("cpu"), 1.0)
    requests = [("eyas-a", 64, 300, 400), ("other", 0, 7, 7), ("eyas-b", 0, 500, 450)]
    batch, output = snapshot(make_batch(requests), "eyas-"), make_output(820, packed)
    sender.send(batch.pieces, output)
    got: dict[str, list] = {"eyas-a": [], "eyas-b": []}
    while (block := reader.read(0.0)) is not None:
        for i, segment in enumerate(block.segments):
            ids, aux, final = block.piece(i)
            assert segment.start == 64 * (segment.rid == "eyas-a") + sum(len(part[0]) for part in got[segment.rid])
            got[segment.rid].append([ids.clone(), aux.values.clone(), final.values.clone()])
        reader.release(block)
    assert len(got["eyas-a"]) + len(got["eyas-b"]) > 2
    for rid, rows in (("eyas-a", slice(0, 300)), ("eyas-b", slice(307, 757))):
        ids, aux, final = (
            torch.cat([part.view(torch.uint8) for part in parts]) for parts in zip(*got[rid], strict=True)
        )
        layers = list(output.aux.split(HIDDEN, -1)) if packed else output.aux
        states = torch.stack([layer[rows] for layer in layers], 1)
        assert ids.view(torch.int32).tolist() == output.token_ids[rows].tolist()
        assert torch.equal(aux, encode(states, encodings[0]).values.view(torch.uint8))
        assert torch.equal(final, encode(output.final[rows], encodings[1]).values.view(torch.uint8))
    reader.close()


def test_many_short_requests_go_through_the_smallest_ring(tmp_path) -> None:
    """Their names alone would fill a quarter of it."""
    layout = Layout(HIDDEN, "bf16", "bf16")
    Ring.create(str(tmp_path / "ring"), least_capacity(layout), layout)
    ring, reader = RingWriter.attach(str(tmp_path / "ring")), RingReader.attach(str(tmp_path / "ring"))
    reader.open()
    sender = Sender(ring, Events(str(tmp_path / "events")), torch.device("cpu"), 1.0)
    pieces = [Piece(f"eyas-{'x' * 80}-{number}", 0, 2, 2 * number) for number in range(500)]
    taken = []

    def take() -> None:
        while len(taken) < 1000:
            block = reader.read(5.0)
            taken.extend((rid, start + row) for rid, start, length in block.segments for row in range(length))
            reader.release(block)

    thread = threading.Thread(target=take)
    thread.start()
    sender.send(pieces, make_output(1000, False))
    thread.join()
    assert taken == [(piece.rid, row) for piece in pieces for row in (0, 1)] and ring.counters().dropped_rows == 0
    with pytest.raises(ValueError, match="too small for a row"):
        sender.send([Piece("eyas-" + "x" * 50_000, 0, 1, 0)], make_output(1, False))


def test_one_event_for_each_stretch_of_drops(tmp_path) -> None:
    Ring.create(str(tmp_path / "ring"), 1 << 20, Layout(HIDDEN, "bf16", "bf16"))
    ring, reader = RingWriter.attach(str(tmp_path / "ring")), RingReader.attach(str(tmp_path / "ring"))
    sender = Sender(ring, Events(str(tmp_path / "events"), 0), torch.device("cpu"), 1.0)
    pieces = [Piece("eyas-a", 0, 9, 0)]
    for _ in range(3):
        sender.send(pieces, make_output(9, False))
    reader.open()
    for _ in range(3):
        sender.send(pieces, make_output(9, False))
    reader.close()
    sender.send(pieces, make_output(9, False))
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event["event"] for event in events] == ["dropped", "flowing", "dropped"]
    assert events[0]["why"] == "nobody reads the ring" and events[0]["rows"] == 9 and events[1]["dropped_rows"] == 27


def test_a_gpu_that_is_full_drops_rows_and_lives(tmp_path, monkeypatch) -> None:
    Ring.create(str(tmp_path / "ring"), 1 << 20, Layout(HIDDEN, "bf16", "bf16"))
    ring, reader = RingWriter.attach(str(tmp_path / "ring")), RingReader.attach(str(tmp_path / "ring"))
    reader.open()
    sender = Sender(ring, Events(str(tmp_path / "events")), torch.device("cpu"), 1.0)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    with monkeypatch.context() as patch:
        patch.setattr("eyas.tap.send.gather", full)
        sender.send([Piece("eyas-a", 0, 9, 0)], make_output(9, False))
    sender.send([Piece("eyas-a", 0, 9, 0)], make_output(9, False))
    assert reader.read(0.0).rows == 9
    assert (ring.counters().dropped_rows, ring.counters().rows, ring.counters().reserved_rows) == (9, 9, 9)
    assert "CUDA out of memory. Tried to allocate 2 GiB." in (tmp_path / "events").read_text()


def test_states_of_another_shape_are_refused() -> None:
    batch = snapshot(make_batch([("eyas-a", 0, 9, 9)]), "eyas-")
    good = make_output(12, False)
    assert checked(batch, *good, HIDDEN) == good
    assert checked(batch, *make_output(9, True), HIDDEN).aux.shape == (9, 3 * HIDDEN)
    bad = {
        "two layers": good._replace(aux=good.aux[:2]),
        "none": good._replace(aux=None),
        "no final": good._replace(final=None),
        "rows spread over ranks": good._replace(final=good.final[:5]),
        "aux rows spread over ranks": good._replace(aux=[layer[:5] for layer in good.aux]),
        "another width": good._replace(aux=[layer[:, 1:] for layer in good.aux]),
        "packed, two layers": good._replace(aux=torch.cat(good.aux[:2], -1)),
        "too few ids": good._replace(token_ids=good.token_ids[:5]),
    }
    for name, output in bad.items():
        with pytest.raises(Refused, match="a batch of 9 rows has"):
            pytest.fail(f"{name}: {checked(batch, *output, HIDDEN)}")
