"""The connector's two halves on plain objects in place of vLLM's: which rows a step is told to send, and that they are
read from the right slots, normed as Transformers does it and filed in the ring. The real vLLM: tests/engines/."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eyas.tap.block import Layout
from eyas.tap.reader import RingReader
from eyas.tap.ring import Ring

BLOCK, HIDDEN, BLOCKS = 4, 16, 40
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class Base:
    """vLLM's connector, as much of it as is asked for."""

    def __init__(self, config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._cache_kv_group_id, self._block_size = config, 1, BLOCK
        self._metadata: Any = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.cache_layers = ["states"]
        self._kv_cache = kv_caches["states"]

    def has_connector_metadata(self) -> bool:
        return self._metadata is not None

    def _get_connector_metadata(self) -> Any:
        return self._metadata


def extract(cache: torch.Tensor, slots: torch.Tensor, count: int) -> torch.Tensor:
    """vLLM 0.32.0's `extract_from_kv_cache`: [blocks, layers, slots of a block, H]."""
    return cache[slots // BLOCK, :, slots % BLOCK][:count]


@pytest.fixture(scope="module")
def tap() -> Iterator[Any]:
    """eyas.tap.vllm on stand-ins for the four names that it imports."""
    names = {
        f"{V1}.base": {"KVConnectorMetadata": object, "KVConnectorRole": object},
        f"{V1}.example_hidden_states_connector": {
            "ExampleHiddenStatesConnector": Base,
            "extract_from_kv_cache": extract,
        },
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
    }
    made: dict[str, ModuleType] = {}
    for name, values in names.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        vars(made[name]).update(values)
    sys.modules.update(made)
    module = importlib.import_module("eyas.tap.vllm")
    module.version = lambda package: "0.32.0"  # type: ignore[attr-defined]
    yield module
    for name in [*made, "eyas.tap.vllm"]:
        del sys.modules[name]


def make(tap: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> Any:
    """A connector, its ring and its events; `changed`: values of vLLM's configuration."""
    folder.mkdir(exist_ok=True)
    weight = torch.rand(HIDDEN) + 0.5
    save_file({"model.norm.weight": weight.to(torch.bfloat16)}, folder / "model.safetensors")
    Ring.create(str(folder / "ring"), 1 << 20, Layout(HIDDEN, "bf16", "bf16"))
    told = {
        "ring": str(folder / "ring"),
        "events": str(folder / "events.jsonl"),
        "aux_layer_ids": [1, 2, 3],
        "encoding": "bf16",
        "final_encoding": "bf16",
        "hidden_size": HIDDEN,
        "num_layers": 4,
        "norm_file": str(folder / "model.safetensors"),
        "norm_tensor": "model.norm.weight",
        "norm_eps": 1e-5,
        "patience_s": 1.0,
    }
    (folder / "settings.json").write_text(json.dumps(told))
    monkeypatch.setenv("EYAS_TAP", str(folder / "settings.json"))
    values = {"layers": [1, 2, 3, 4], "hidden": HIDDEN, "pipeline": 1} | changed
    spec = SimpleNamespace(eagle_aux_hidden_state_layer_ids=values["layers"])
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_hidden_size=lambda: values["hidden"],
            get_total_num_hidden_layers=lambda: 4,
            max_model_len=64,
            dtype=torch.float32,
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=values["pipeline"],
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=spec)),
    )
    return tap.EyasConnector(config, None, None)


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def new(req_id: str, rid: str | None, ids: list[int], blocks: list[int], computed: int = 0) -> Any:
    extra = {"kv_transfer_params": {"eyas_rid": rid}} if rid else None
    return SimpleNamespace(
        req_id=req_id,
        prompt_token_ids=ids,
        block_ids=([0], blocks),
        num_computed_tokens=computed,
        sampling_params=SimpleNamespace(extra_args=extra),
    )


def step(
    fresh: list[Any], cached: list[tuple[str, list[int] | None, int]], amounts: dict[str, int], again: Any = ()
) -> Any:
    """A scheduler's output; cached: (request, its new blocks, tokens computed before)."""
    return SimpleNamespace(
        scheduled_new_reqs=fresh,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[one[0] for one in cached],
            new_block_ids=[None if one[1] is None else ([0], one[1]) for one in cached],
            num_computed_tokens=[one[2] for one in cached],
            resumed_req_ids=set(again),
        ),
        num_scheduled_tokens=amounts,
    )


def test_chunks_repeats_prefixes_and_strangers(tap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = make(tap, tmp_path, monkeypatch)
    ids = list(range(100, 110))
    rows = connector.build_connector_meta(
        step([new("a", "eyas-a", ids, [3, 5]), new("x", None, ids, [9])], [], {"a": 6, "x": 8})
    ).rows
    assert rows == [("eyas-a", 0, ids[:6], [3, 5])]
    # The next chunk begins within the second block; what is emitted after the prompt is none of it.
    rows = connector.build_connector_meta(step([], [("a", [7], 6), ("x", None, 8)], {"a": 5, "x": 1})).rows
    assert rows == [("eyas-a", 6, ids[6:], [5, 7])]
    assert connector.build_connector_meta(step([], [("a", None, 10)], {"a": 1})).rows == []
    # Preempted and started again, in other blocks: all over.
    rows = connector.build_connector_meta(step([], [("a", [1, 2], 0)], {"a": 7}, again=["a"])).rows
    assert rows == [("eyas-a", 0, ids[:7], [1, 2])]
    # A prefix that was cached lies in the request's blocks.
    rows = connector.build_connector_meta(step([new("b", "eyas-b", ids, [8, 9, 4], computed=8)], [], {"b": 2})).rows
    assert rows == [("eyas-b", 0, ids, [8, 9, 4])]
    for name in ("a", "b", "x"):
        assert connector.request_finished_all_groups(SimpleNamespace(request_id=name), ([0], [1])) == (False, None)
    assert not connector._requests


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_rows_are_those_of_a_naive_reading(data: Any, tap: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tap")
    with pytest.MonkeyPatch.context() as monkeypatch:
        connector = make(tap, folder, monkeypatch)
    cache = torch.randn(BLOCKS, 4, BLOCK, HIDDEN) * 3
    connector.register_kv_caches({"states": cache})
    reader = RingReader.attach(str(folder / "ring"))
    reader.open()
    free, parts = list(range(BLOCKS)), []
    for number in range(data.draw(st.integers(1, 4))):
        start, count = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 12))
        first, last = start // BLOCK, -(-(start + count) // BLOCK)
        blocks = [free.pop(data.draw(st.integers(0, len(free) - 1))) for _ in range(last - first)]
        parts.append(tap.Rows(f"eyas-{number}", start, list(range(7 * number, 7 * number + count)), blocks))
    connector._metadata = tap.Step(parts)
    connector.save_kv_layer("states", cache, None)
    connector.wait_for_save()
    block = reader.read(1.0)
    assert block is not None
    norm = LlamaRMSNorm(HIDDEN, 1e-5)
    norm.weight.data = connector._norm
    for index, part in enumerate(parts):
        token_ids, aux, final = block.piece(index)
        assert tuple(block.segments[index]) == (part.rid, part.start, len(part.token_ids))
        assert token_ids.tolist() == part.token_ids
        for row in range(len(part.token_ids)):
            place = part.start % BLOCK + row
            states = cache[part.blocks[place // BLOCK], :, place % BLOCK]
            assert torch.equal(aux.values[row], states[:3].to(torch.bfloat16))
            expected = norm(states[3]).detach().to(torch.bfloat16)
            torch.testing.assert_close(final.values[row], expected, rtol=2**-7, atol=0)
    reader.release(block)
    reader.close()


def test_what_it_tells(tap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = make(tap, tmp_path, monkeypatch)
    connector.register_kv_caches({"states": torch.zeros(BLOCKS, 4, BLOCK, HIDDEN)})
    layers, ring = events(tmp_path)
    assert (layers["event"], layers["passed"], layers["rank"]) == ("layers", [1, 2, 3, 4], 0)
    assert (layers["longest_prompt"], layers["chunk_tokens"], layers["dtype"]) == (63, 8, "float32")
    assert ring["event"] == "ring" and not ring["pinned"]
    assert connector.get_finished({"a"}) == (None, None) and not connector.requires_kv_delivery


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        ({"layers": [2, 3, 4, 4]}, "collects at layers [2, 3, 4, 4]"),
        ({"hidden": 32}, "'hidden_size': 32"),
        ({"pipeline": 2}, "pipeline_parallel_size is 2"),
    ],
)
def test_what_is_refused(
    tap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], seen: str
) -> None:
    connector = make(tap, tmp_path, monkeypatch, **changed)
    with pytest.raises(tap.Refused):
        connector.register_kv_caches({"states": torch.zeros(BLOCKS, 4, BLOCK, HIDDEN)})
    (refused,) = events(tmp_path)
    assert refused["event"] == "refused" and seen in refused["seen"] and refused["expected"] and refused["cause"]


def test_a_step_whose_states_were_left_out_ends_the_server(
    tap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = make(tap, tmp_path, monkeypatch)
    connector.register_kv_caches({"states": torch.zeros(BLOCKS, 4, BLOCK, HIDDEN)})
    connector._metadata = tap.Step([tap.Rows("eyas-a", 0, [1, 2], [0])])
    connector.save_kv_layer("another layer", torch.zeros(1), None)
    with pytest.raises(tap.Refused, match="cached no states"):
        connector.wait_for_save()
    assert events(tmp_path)[-1]["event"] == "refused"
