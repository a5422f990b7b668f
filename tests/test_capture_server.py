"""The capture worker against a stand-in of a server, for what a real one can't be made to do: rows that are lost, tries
that fail, states that are bad, answers that change. The real server: tests/engines/test_sglang_capture.py."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers_capture import make_run, random_samples
from helpers_sglang import FakeSGLang, fake_sglang
from helpers_tiny import make_tiny_target

from eyas.capture.run import execute, inputs
from eyas.capture.server import state_flags
from eyas.engine.client import SGLangClient
from eyas.engine.ring import open_ring
from eyas.errors import EngineError, Interrupted, StoreFull
from eyas.run import Run, open_run
from eyas.store.files import Files
from eyas.store.reader import StoreReader
from eyas.tap.block import Layout, row_bytes
from eyas.tap.reader import RingReader
from eyas.tap.writer import RingWriter

SAMPLES = random_samples([30, 64, 17, 5, 150, 32, 33, 90, 6, 41, 12, 77, 65, 129, 200, 8])
SERVER = ['engine.kind="sglang"', "capture.in_flight=4", "engine.patience_s=20"]


@contextmanager
def serve(
    monkeypatch: pytest.MonkeyPatch, target: Path, folder: Path, *overrides: str, **options: Any
) -> Iterator[tuple[Run, FakeSGLang, SimpleNamespace]]:
    """A run and a server for it, in place of one that Eyas starts."""
    folder.mkdir(exist_ok=True)
    run = make_run(folder, target, SAMPLES, overrides=[*SERVER, *overrides])
    with fake_sglang(target, folder, **options) as fake:
        state = SimpleNamespace(url=fake.url, ring=fake.ring.path, version="0.5.23", self_test={}, alive=lambda: True)
        state.log, state.title, state.client = "engine.log", "SGLang", lambda: SGLangClient(fake.url)
        state.open_ring = lambda: open_ring(state.ring, "eyas serve stop t")

        @contextmanager
        def serving(run: Run, *, stop: Any) -> Iterator[Any]:
            yield state

        monkeypatch.setattr("eyas.capture.server.serving", serving)
        monkeypatch.setattr("eyas.capture.server.server_died", lambda run, state: EngineError("it died; log: x"))
        monkeypatch.setattr("eyas.capture.run.server_version", lambda run: "sglang 0.5.23")
        monkeypatch.setattr("eyas.capture.worker._FIRST_PAUSE_S", 0.02)
        yield run, fake, state


def local_store(target: Path, folder: Path, *overrides: str) -> StoreReader:
    folder.mkdir()
    run = make_run(folder, target, SAMPLES, overrides=list(overrides))
    execute(run)
    return StoreReader(run.store_url)


def assert_equal_but_low_bits(ours: StoreReader, local: StoreReader, left_out: tuple[str, ...] = ()) -> None:
    assert ours.manifest.plan == local.manifest.plan
    assert [ref.sample_id for ref in ours.samples()] == [
        ref.sample_id for ref in local.samples() if ref.sample_id not in left_out
    ]
    for ref in ours.samples():
        a, b = ours.read(ref.sample_id), local.read(ref.sample_id)
        assert torch.equal(a.token_ids, b.token_ids) and torch.equal(a.loss_mask, b.loss_mask)
        for mine, theirs in (
            (a.aux_hidden_states, b.aux_hidden_states),
            (a.final_hidden_states, b.final_hidden_states),
        ):
            assert mine.shape == theirs.shape
            assert torch.cosine_similarity(mine.float(), theirs.float(), dim=-1).min() > 0.999


@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
def test_the_store_equals_the_local_engines(
    tiny_target: Path, tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [f"store.encoding={encoding}", f"store.final_encoding={encoding}"]
    local = local_store(tiny_target, tmp_path / "local", *overrides)
    options = {"encoding": encoding, "final_encoding": encoding}
    with serve(monkeypatch, tiny_target, tmp_path / "served", *overrides, **options) as (run, _, state):
        state.self_test = {"logprob_error": 0.01}
        result = execute(run)
    ours = StoreReader(run.store_url)
    assert_equal_but_low_bits(ours, local)
    assert ours.manifest.engine.model_dump() == {"kind": "sglang", "dtype": "float32", "version": "sglang 0.5.23"}
    counts = result.counts
    print(counts)
    assert counts["samples"] == len(SAMPLES) and counts["rejected"] == {} and counts["again"] == {}
    assert counts["self_test"] == {"logprob_error": 0.01}
    shards = ours.plan.shards
    assert shards <= counts["spot_checks"]["samples"] <= 2 * shards
    assert 0 < counts["spot_checks"]["worst"] < (0.05 if encoding == "bf16" else 0.2)
    if encoding == "fp8":
        table = ours.rows.table
        errors = np.array(table["aux_error"].to_pylist())
        assert ((errors > 0.01) & (errors < 0.05)).all()
    assert execute(run).counts["samples"] == len(SAMPLES)  # nothing left to do: no server is asked


def test_lost_rows_and_failed_tries_are_made_again(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = local_store(tiny_target, tmp_path / "local")
    with serve(monkeypatch, tiny_target, tmp_path / "served") as (run, fake, _):
        fake.drop.update({64: 2, 150: 1, 5: 4})
        fake.statuses = [503, 500, 429]
        result = execute(run)
    assert result.counts["again"] == {"rows were lost": 7, "server failed": 3}
    assert_equal_but_low_bits(StoreReader(run.store_url), local)
    assert len(fake.seen) == len(SAMPLES) + 7 + 3 and set(fake.seen.values()) == {1}  # no request id twice


@pytest.mark.parametrize("status", [500, 400])
def test_a_sample_whose_rows_came_is_kept_whatever_is_answered(
    status: int, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its shard is committed by then: the last of each shard is among them."""
    local = local_store(tiny_target, tmp_path / "local")
    with serve(monkeypatch, tiny_target, tmp_path / "served", "capture.attempts=2") as (run, fake, _):
        answer = fake.generate

        def failing(body: dict[str, Any]) -> Any:
            right = answer(body)
            return (status, {"error": "after the rows were made"}) if len(body["input_ids"]) != 150 else right

        monkeypatch.setattr(fake, "generate", failing)
        result = execute(run)
    assert result.counts["rejected"] == {}
    assert result.counts["again"] == ({"server failed": 2 * (len(SAMPLES) - 1)} if status == 500 else {})
    assert_equal_but_low_bits(StoreReader(run.store_url), local)


def test_a_sample_is_given_up_with_its_reason(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = next(sample for sample in SAMPLES if len(sample.token_ids) == 200)
    bad = next(sample for sample in SAMPLES if len(sample.token_ids) == 77)
    lost = next(sample for sample in SAMPLES if len(sample.token_ids) == 33)
    local = local_store(tiny_target, tmp_path / "local")

    def disturb(rid: str, ids: torch.Tensor, aux: torch.Tensor, final: torch.Tensor) -> Any:
        if len(ids) == 77:
            aux[70, 1] = float("nan")
        return ids, aux, final

    with serve(monkeypatch, tiny_target, tmp_path / "served", "capture.attempts=3") as (run, fake, _):
        fake.info["max_req_input_len"] = 151
        fake.drop[33] = 100
        fake.disturb = disturb
        result = execute(run)
    said = capsys.readouterr().err
    print(said)
    assert result.counts["rejected"] == {
        "longer than the server takes (150 tokens)": 1,
        "NaN in aux_hidden_states[1]": 1,
        "rows were lost": 1,
    }
    assert "1 of 16 samples are longer than this server takes (150 tokens): rejected" in said
    assert f"rejected: sample {lost.id}, 33 tokens: rows were lost: 3 times" in said
    assert result.counts["again"] == {"rows were lost": 3}
    assert_equal_but_low_bits(StoreReader(run.store_url), local, (long.id, bad.id, lost.id))
    assert execute(run).counts["samples"] == len(SAMPLES) - 3  # settled is settled


def test_a_server_that_fails_on_everything_rejects_nothing(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(monkeypatch, tiny_target, tmp_path / "served", "capture.attempts=2") as (run, fake, _):
        fake.statuses = [503] * 100
        with pytest.raises(
            EngineError, match="failed 2 times on one prompt, .*503.*; and on one of . tokens"
        ) as caught:
            execute(run)
        assert "goes on" in caught.value.next
        fake.statuses = [400] * 100
        with pytest.raises(EngineError, match="refused a prompt of .* tokens: HTTP 400"):
            execute(run)
        fake.statuses = []
        fake.drop.update({len(sample.token_ids): 100 for sample in SAMPLES} | {8: 100, 5: 100, 6: 100})
        with pytest.raises(EngineError, match="rows were lost; and on one of . tokens: rows were lost"):
            execute(run)
        fake.drop.clear()
        assert execute(run).counts["rejected"] == {}


def test_most_samples_too_long_is_an_error(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(monkeypatch, tiny_target, tmp_path / "served") as (run, fake, _):
        fake.info["max_req_input_len"] = 31
        with pytest.raises(EngineError, match="of 16 samples are longer than this server takes .30 tokens"):
            execute(run)
        assert not fake.seen


def test_samples_that_are_too_long_begin_no_shard_before_its_turn(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(monkeypatch, tiny_target, tmp_path / "served", "capture.in_flight=1") as (run, fake, _):
        fake.info["max_req_input_len"] = 64
        answer, begun = fake.generate, []

        def looking(body: dict[str, Any]) -> Any:
            files = [path.name for path in Path(run.store_url).glob("shards/.partial-*.safetensors")]
            begun.append((body["rid"].split("-")[2], max(files, default="")))
            return answer(body)

        monkeypatch.setattr(fake, "generate", looking)
        result = execute(run)
    assert result.counts["rejected"] == {"longer than the server takes (63 tokens)": 7}
    plan = StoreReader(run.store_url).plan
    turn = {name: f".partial-{plan.shard[plan.find(name)]:06d}.safetensors" for name, _ in begun}
    assert plan.shards >= 5 and all(last <= turn[name] for name, last in begun)


def test_slow_commits_lose_no_rows(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard takes 0.8 s to commit, the server some 0.1 s to make; the tap waits 0.05 s for room in a small ring."""
    samples = random_samples([60 + number for number in range(24)], seed=3)
    monkeypatch.setitem(globals(), "SAMPLES", samples)
    commit, reserve, threads = Files.commit, RingWriter.reserve, set[str]()

    def slow(files: Files, staged: Path, name: str) -> None:
        threads.add(threading.current_thread().name)
        time.sleep(0.8)
        commit(files, staged, name)

    monkeypatch.setattr(Files, "commit", slow)
    monkeypatch.setattr(RingWriter, "reserve", lambda ring, rows, segments, wait_s: reserve(ring, rows, segments, 0.05))
    layout = Layout(48, "bf16", "bf16")
    overrides = ("capture.in_flight=8", "capture.attempts=2")
    with serve(monkeypatch, tiny_target, tmp_path / "served", *overrides, ring_bytes=500 * row_bytes(layout)) as (
        run,
        _,
        _,
    ):
        counts = execute(run).counts
    assert counts["samples"] == len(samples) and counts["rejected"] == {}
    assert (counts["again"], counts["rows_dropped"]) == ({}, 0)
    assert threads == {"eyas-commit_0"}


def test_wrong_tokens_and_positions_stop_the_capture(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(monkeypatch, tiny_target, tmp_path / "served") as (run, fake, _):
        fake.disturb = lambda rid, ids, aux, final: (ids.roll(1), aux, final)
        with pytest.raises(EngineError, match="row 0 came with token id") as caught:
            execute(run)
        assert "the sample's" in caught.value.expected
        fake.disturb = lambda rid, ids, aux, final: tuple(torch.cat([x, x[:1]]) for x in (ids, aux, final))
        with pytest.raises(EngineError, match="row .* came with token id"):
            execute(run)


def test_a_failed_spot_check_stops_the_capture(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(monkeypatch, tiny_target, tmp_path / "served") as (run, fake, _):
        fake.disturb = lambda rid, ids, aux, final: (ids, aux, final.flip(-1))
        with pytest.raises(EngineError, match=r"sample .*: final states through .* are off by \d+\.\d+"):
            execute(run)


def test_rows_of_dead_workers_are_let_go(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(monkeypatch, tiny_target, tmp_path / "served") as (run, fake, _):
        reader = RingReader.attach(fake.ring.path)
        reader.open()  # what a worker that was killed leaves: blocks that nobody released
        body = {"input_ids": SAMPLES[0].token_ids.tolist(), "rid": f"eyas-dead-{SAMPLES[0].id}-1"}
        assert fake.generate(body)[0] == 200 and fake.ring.counters().used_bytes > 0
        reader.close()
        result = execute(run)
        assert result.counts["samples"] == len(SAMPLES) and result.counts["rejected"] == {}
        assert fake.ring.counters().used_bytes == 0


def test_a_ring_that_is_gone_and_one_that_another_reads(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(monkeypatch, tiny_target, tmp_path / "served") as (run, fake, state):
        reader = RingReader.attach(fake.ring.path)
        reader.open()
        with pytest.raises(EngineError, match=f"process {os.getpid()} reads this ring") as error:
            execute(run)
        assert error.value.cause.startswith("another eyas captures from the same server")
        reader.close()
        state.ring = f"{fake.ring.path}-gone"
        with pytest.raises(EngineError, match="No such file or directory") as error:
            execute(run)
        assert error.value.next.startswith("eyas serve stop t ")


def test_a_dead_and_a_silent_server(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(monkeypatch, tiny_target, tmp_path / "served", "engine.patience_s=1") as (run, fake, state):
        answer = fake.generate
        hold = threading.Event()

        def held(body: dict[str, Any]) -> Any:
            hold.wait(20)
            return answer(body)

        monkeypatch.setattr(fake, "generate", held)
        with pytest.raises(EngineError, match=r"no answer and no row for 1\.\d s") as caught:
            execute(run)
        assert "eyas doctor" in caught.value.next
        state.alive = lambda: False
        with pytest.raises(EngineError, match="it died; log: x"):
            execute(run)
        hold.set()


def test_another_server_on_the_port(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(monkeypatch, tiny_target, tmp_path / "served") as (run, fake, _):
        fake.info["dtype"] = "bfloat16"
        with pytest.raises(EngineError, match=r"SGLang 0\.5\.23 in bfloat16"):
            execute(run)


def test_a_signal_stops_at_once_and_keeps_shards(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(monkeypatch, tiny_target, tmp_path / "served", "capture.in_flight=1") as (run, fake, _):
        answer = fake.generate

        def slow(body: dict[str, Any]) -> Any:
            if len(fake.seen) == 12:
                os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)
            return answer(body)

        monkeypatch.setattr(fake, "generate", slow)
        with pytest.raises(Interrupted) as caught:
            execute(run)
        assert caught.value.exit_code == 130
        assert 0 < len(StoreReader(run.store_url).samples()) < len(SAMPLES)
        monkeypatch.setattr(fake, "generate", answer)
        assert execute(run).counts["samples"] == len(SAMPLES)


def test_a_full_disk_ends_it(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = (f"store.min_free_bytes={1 << 60}",)
    with (
        serve(monkeypatch, tiny_target, tmp_path / "served", *overrides) as (run, _, _),
        pytest.raises(StoreFull, match="left free"),
    ):
        execute(run)


def test_random_weights_are_captured_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_tiny_target(tmp_path / "target")
    with serve(monkeypatch, target, tmp_path / "served") as (run, fake, _):
        fake.info["load_format"] = "dummy"
        checks = execute(run).counts["spot_checks"]
    assert checks == {"samples": 0, "worst": 0.0, "unchecked": "the server runs random weights"}


def test_inputs_hold_what_changes_states_only(tiny_target: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path, tiny_target, SAMPLES, overrides=SERVER)
    recipe = tmp_path / "recipe.toml"
    for same in (
        "engine.port=1234",
        "capture.in_flight=7",
        'engine.args=["--tp-size","2"]',
        "capture.ring_bytes=9000000",
    ):
        assert inputs(open_run(recipe, [*SERVER, same])) == inputs(run)
    for other in ("engine.dtype=bfloat16", 'engine.args=["--quantization","fp8"]', 'engine.kind="local"'):
        assert inputs(open_run(recipe, [*SERVER, other])) != inputs(run)
    assert state_flags(["--tp-size", "2", "--quantization=fp8", "--kv-cache-dtype", "fp8_e5m2", "--x"]) == [
        "--quantization=fp8",
        "--kv-cache-dtype",
        "fp8_e5m2",
    ]
