"""Streams of a real SGLang on CPU, without a drafter: SGLang verifies drafts with Triton, which has no CPU driver
(0.5.23: "0 active drivers" in copy_all_layer_kv_cache_tiled), so its counts of drafts are only measured on a GPU
(benchmarks/serving_sglang.py).
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sglang_runs import sglang_python

from eyas.engine.drafting import serving_run
from eyas.engine.server import start_server, stop_server
from eyas.engine.state import ServerState
from eyas.evaluate.ask import Answer, Asker
from eyas.run import Run, open_run
from eyas.settings import Serving

END, PROMPTS = 2, [[1, 9690, 198], [1, 4093, 198, 504, 6486], [1, 253, 1165, 282, 253, 3365, 28]]


@pytest.fixture(scope="module")
def run(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("streams")
    path = folder / "streams.toml"
    path.write_text(
        f'runs_dir = "{folder}/runs"\n[target]\npath = "{demo_target}"\n[[data.sources]]\npath = "none.jsonl"\n'
        f'[engine]\ndevice = "cpu"\n[serving]\nkind = "sglang"\npython = "{sglang_python()}"\ndtype = "float32"\n'
        'args = ["--max-running-requests", "8"]\n'
    )
    return serving_run(open_run(path), None)


@pytest.fixture(scope="module")
def server(run: Run) -> Iterator[ServerState]:
    state = start_server(run)
    yield state
    print("\n".join(stop_server(run)))


def streamed(url: str, salt: str) -> list[Answer]:
    async def go() -> list[Answer]:
        async with Asker(url, "sglang", Serving(), frozenset([END]), 49152) as asker:
            return list(await asyncio.gather(*(asker.ask(prompt, 24, 1, salt) for prompt in PROMPTS)))

    return asyncio.run(go())


def test_a_streamed_answer_is_the_whole_one(server: ServerState) -> None:
    answers = streamed(server.url, "one")
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        sampling = {"temperature": 0, "max_new_tokens": 24, "stop_token_ids": [END]}
        body = {"input_ids": prompt, "sampling_params": sampling}
        whole = httpx.post(f"{server.url}/generate", json=body, timeout=120).json()
        assert answer.token_ids == whole["output_ids"]
        assert answer.cut == (whole["meta_info"]["finish_reason"]["type"] == "length")
        assert 0 < answer.first_s < answer.wall_s and answer.accepted is None
    print([(len(answer.token_ids), round(answer.first_s, 3), round(answer.wall_s, 3)) for answer in answers])


def test_another_salt_finds_nothing_in_the_prefix_cache(server: ServerState) -> None:
    prompt = list(range(1000, 1200))

    def cached(salt: str) -> int:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, "extra_key": salt}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=120).json()
        return int(answer["meta_info"]["cached_tokens"])

    assert [cached("a"), cached("a"), cached("b")] == [0, len(prompt) - 1, 0]
