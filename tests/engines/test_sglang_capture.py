"""Capture from a real SGLang on CPU in float32: 40 samples in chunks of 64 tokens, 8 in flight, whatever is killed.

Run by `make test-engines`. The tests of this file follow one another on one run: a server costs half a minute to start.
"""

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_runs import (
    SAMPLES,
    eyas,
    finish,
    kill_server,
    left_of,
    make_run,
    samples_of,
    server_of,
    shards_of,
    start,
    wait_for_shards,
)

from eyas.engine import sglang
from eyas.engine.inject import write_plugin
from eyas.engine.server import start_server
from eyas.errors import EngineError
from eyas.record import load_record
from eyas.run import Run
from eyas.store.reader import StoreReader

AUX = (2, 15, 27)
pytestmark = pytest.mark.timeout(1800)  # on a machine that does much else a server takes minutes to start


@pytest.fixture(scope="module")
def run(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = make_run(tmp_path_factory.mktemp("sglang"), demo_target)
    eyas(run, "prepare")
    yield run
    eyas(run, "serve", "stop")


@pytest.fixture(scope="module")
def captured(run: Run) -> Path:
    """A copy of the store that a capture made which nothing disturbed; its server runs on."""
    print(eyas(run, "serve", "start"))
    print(eyas(run, "capture"))
    return Path(shutil.copytree(run.store_url, run.dir / "undisturbed"))


@pytest.fixture(scope="module")
def model(demo_target: Path) -> Any:
    """The target through Transformers, float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.float32).eval()


def cosines(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.cosine_similarity(first.double(), second.double(), dim=-1)


def test_every_row_is_transformers_state_of_its_layer(captured: Path, model: Any) -> None:
    store = StoreReader(str(captured))
    refs = store.samples()
    lengths = [ref.tokens for ref in refs]
    pieces = [-(-length // 64) for length in lengths]
    print(
        f"{len(refs)} samples of {min(lengths)} to {max(lengths)} tokens, cut into up to {max(pieces)} pieces and more"
    )
    assert len(refs) == SAMPLES and max(pieces) == 5 and store.manifest.aux_layer_ids == list(AUX)
    names = [*(f"layer {layer}" for layer in AUX), "final"]
    found: dict[str, dict[str, list[torch.Tensor]]] = {name: {"own": [], "before": [], "after": []} for name in names}
    for ref in refs:
        stored = store.read(ref.sample_id)
        with torch.inference_mode():
            states = model(stored.token_ids.long()[None], output_hidden_states=True).hidden_states
            without_last = model.model.norm(states[-2])[0]
        entering, final = [state[0] for state in states[:-1]], states[-1][0]
        for place, layer in enumerate(AUX):
            for side, other in (("own", layer), ("before", layer - 1), ("after", layer + 1)):
                value = cosines(stored.aux_hidden_states[:, place], entering[other])
                found[f"layer {layer}"][side].append(value)
        found["final"]["own"].append(cosines(stored.final_hidden_states, final[stored.loss_mask]))
        found["final"]["before"].append(cosines(stored.final_hidden_states, without_last[stored.loss_mask]))
    print(f"{'cosine per row':16}{'worst':>10}{'median':>10}   neighbours' medians: one layer before, one after")
    for name, sides in found.items():
        own = torch.cat(sides["own"])
        beside = [float(torch.cat(sides[side]).median()) for side in ("before", "after") if sides[side]]
        told = "".join(f"{value:10.5f}" for value in beside)
        print(f"{name:16}{float(own.min()):10.6f}{float(own.median()):10.6f}   {told}")
        assert own.min() >= 0.999
        assert max(beside) < 0.995 and max(beside) < float(own.min())


def test_the_store_equals_the_local_engines(run: Run, captured: Path, demo_target: Path) -> None:
    local_run = make_run(run.dir.parent.parent, demo_target, "local", "engine.kind=local")
    eyas(local_run, "prepare")
    eyas(local_run, "capture")
    served, local = StoreReader(str(captured)), StoreReader(local_run.store_url)
    ours, theirs = served.manifest.identity(), local.manifest.identity()
    assert {key for key in ours if ours[key] != theirs[key]} == {"engine.kind"}
    versions = [store.manifest.engine.version for store in (served, local)]
    assert versions[0] != versions[1]
    print(f"engine.version {versions}")
    assert (captured / "plan.parquet").read_bytes() == Path(local_run.store_url, "plan.parquet").read_bytes()
    assert [ref.sample_id for ref in served.samples()] == [ref.sample_id for ref in local.samples()]
    worst = 1.0
    for ref in served.samples():
        a, b = served.read(ref.sample_id), local.read(ref.sample_id)
        assert torch.equal(a.token_ids, b.token_ids) and torch.equal(a.loss_mask, b.loss_mask)
        for name in ("aux_hidden_states", "final_hidden_states"):
            one, other = getattr(a, name).float(), getattr(b, name).float()
            # Two units of bf16's last place, of the value or of what its row is made of.
            size = torch.maximum(one.abs(), other.abs())
            typical = other.square().mean(-1, keepdim=True).sqrt()
            assert ((one - other).abs() <= 2**-6 * torch.maximum(size, typical)).all()
            worst = min(worst, float(cosines(one, other).min()))
    print(f"worst cosine between the two stores: {worst:.6f}")
    assert worst > 0.9999


def test_the_record_tells_how_it_was_checked(run: Run, captured: Path) -> None:
    record = load_record(run.dir, "capture")
    assert record is not None
    counts = record.counts
    print({key: counts[key] for key in ("spot_checks", "again", "rows_dropped", "server_waited_s", "rejected")})
    assert counts["samples"] == SAMPLES and counts["rejected"] == {}
    test = counts["self_test"]
    assert test["logprob_error"] < 0.05 and test["pieces"] == [64, 64, 54] and not test["unchecked"]
    assert [check["layer_id"] for check in test["aux"]] == [2, 27, 15]
    assert all(check["worst"] > 0.999 and max(check["neighbours"].values()) < 0.995 for check in test["aux"])
    shards = StoreReader(run.store_url).plan.shards
    assert shards <= counts["spot_checks"]["samples"] <= 2 * shards and counts["spot_checks"]["worst"] < 0.05


def assert_undisturbed(run: Run, captured: Path) -> None:
    """The store holds what the undisturbed one does: nothing lost, nothing doubled, nothing else."""
    assert samples_of(run) == [ref.sample_id for ref in StoreReader(str(captured)).samples()]
    assert len(StoreReader(run.store_url).rows) == SAMPLES
    first, second = StoreReader(run.store_url), StoreReader(str(captured))
    for ref in first.samples():
        a, b = first.read(ref.sample_id), second.read(ref.sample_id)
        assert torch.equal(a.token_ids, b.token_ids)
        assert cosines(a.aux_hidden_states.float(), b.aux_hidden_states.float()).min() > 0.9999
        assert cosines(a.final_hidden_states.float(), b.final_hidden_states.float()).min() > 0.9999
    eyas(run, "verify", "--redo")


def test_kill_9_of_the_worker(run: Run, captured: Path) -> None:
    process = start(run, "capture", "--redo")
    wait_for_shards(run, 0, process)
    while shards_of(run):  # the old store is removed first
        time.sleep(0.01)
    wait_for_shards(run, 2, process)
    process.kill()
    process.communicate()
    kept = {path: path.stat().st_mtime_ns for path in shards_of(run)}
    assert 2 <= len(kept) < StoreReader(str(captured)).plan.shards
    state = server_of(run)
    assert state.alive()
    said = eyas(run, "capture")
    assert f"using the server that runs at {state.url}" in said
    assert all(path.stat().st_mtime_ns == made for path, made in kept.items())
    print(f"worker killed with {len(kept)} shards committed; the server lived on")
    assert_undisturbed(run, captured)


def stop_and_go_on(run: Run, captured: Path, seconds: float) -> None:
    """SIGSTOP the worker in mid-capture for so long, then let it go on."""
    process = start(run, "capture", "--redo")
    while shards_of(run):
        time.sleep(0.01)
    wait_for_shards(run, 2, process)
    process.send_signal(signal.SIGSTOP)
    before = len(shards_of(run))
    time.sleep(seconds)
    state = server_of(run)
    assert state.alive()
    assert "lives" in eyas(run, "serve", "status") or state.ready
    assert len(shards_of(run)) == before
    process.send_signal(signal.SIGCONT)
    finish(process)
    assert state.alive() and server_of(run).pid == state.pid
    record = load_record(run.dir, "capture")
    assert record is not None
    again, dropped = record.counts["again"], record.counts["rows_dropped"]
    print(f"stopped for {seconds:.0f} s: {dropped} rows were dropped, tries made again: {again}")
    assert_undisturbed(run, captured)


def test_a_stopped_worker_costs_nothing(run: Run, captured: Path) -> None:
    """25 s: longer than the tap waits for a reader that is silent. Six minutes: slow_sglang_sigstop.py."""
    stop_and_go_on(run, captured, 25)


def test_kill_9_of_the_server_and_then_of_both(run: Run, captured: Path) -> None:
    process = start(run, "capture", "--redo")
    while shards_of(run):
        time.sleep(0.01)
    wait_for_shards(run, 1, process)
    dead = kill_server(run)
    said = finish(process, 1)
    print(said)
    assert f"pid {dead.pid}" in said and dead.log in said and "Traceback" not in said
    committed = len(shards_of(run))
    assert 1 <= committed < StoreReader(str(captured)).plan.shards

    process = start(run, "capture")  # starts a server of its own
    wait_for_shards(run, committed + 1, process)
    second = kill_server(run)
    process.kill()
    process.communicate()
    assert second.pid != dead.pid and not left_of(dead)
    committed = len(shards_of(run))
    assert committed < StoreReader(str(captured)).plan.shards

    said = eyas(run, "capture")
    assert_undisturbed(run, captured)
    last = server_of(run)
    print(
        f"servers {dead.pid}, {second.pid} and {last.pid}; left of them: {[left_of(x) for x in (dead, second, last)]}"
    )
    assert not any(left_of(state) for state in (dead, second, last))


def test_ids_off_by_one_fail_the_start(run: Run, demo_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that collects the layers after those of the recipe: its flags and the tap's settings say so."""
    shifted = make_run(run.dir.parent.parent, demo_target, "shifted")
    flags, plugin = sglang.aux_flags, write_plugin

    def next_flags(ids: list[int], *more: Any) -> list[str]:
        return flags([layer + 1 for layer in ids], *more)

    def next_plugin(folder: Path, settings: dict[str, Any], **more: Any) -> dict[str, str]:
        return plugin(folder, settings | {"aux_layer_ids": [layer + 1 for layer in settings["aux_layer_ids"]]}, **more)

    monkeypatch.setattr(sglang, "aux_flags", next_flags)
    monkeypatch.setattr("eyas.engine.begin.write_plugin", next_plugin)
    with pytest.raises(EngineError) as caught:
        start_server(shifted)
    print(caught.value)
    assert "self-test: aux layer 2: cosine" in caught.value.seen and "as layer 3" in caught.value.seen
    assert "the server gives the state after 3 layers under id 2: ids off by 1" in caught.value.cause
    assert not left_of(server_of(shifted))
