"""Layer ids: what each engine, family and release must be told so that it captures the layers that were trained on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.drafter.layer_ids import sglang_captures, sglang_layer_ids, vllm_layer_ids
from eyas.errors import ExportError
from eyas.target import SUPPORTED_MODEL_TYPES

# ours, model_type, SGLang release, layers of the target -> what the config must say
TABLE = [
    ([2, 15, 27], "llama", "0.5.11", 30, [1, 14, 26]),
    ([2, 15, 27], "llama", "0.5.23", 30, [1, 14, 26]),
    ([2, 15, 27], "mistral", "0.5.14", 30, [1, 14, 26]),
    ([2, 14, 25], "qwen2", "0.5.14", 28, [1, 13, 24]),
    ([2, 18, 33], "qwen3", "0.5.20", 36, [1, 17, 32]),
    ([2, 24, 45], "qwen3_moe", "0.5.23", 48, [1, 23, 44]),
    ([2, 30, 58], "deepseek_v3", "0.5.11", 61, [1, 29, 57]),
    ([2, 30, 58], "deepseek_v3", "0.5.12", 61, [1, 29, 57]),
    ([2, 30, 58], "deepseek_v3", "0.5.13", 61, [2, 30, 58]),
    ([2, 30, 58], "deepseek_v3", "0.5.13.post1", 61, [2, 30, 58]),
    ([2, 30, 58], "kimi_k2", "0.5.12", 61, [1, 29, 57]),
    ([2, 30, 58], "kimi_k25", "0.5.14", 61, [2, 30, 58]),
    ([2, 30, 58], "kimi_k25", "0.5.23.post1", 61, [2, 30, 58]),
    ([1, 29, 57], "kimi_k25", "0.5.12", 61, [0, 28, 56]),
    ([1, 29, 57], "kimi_k25", "0.5.14", 61, [29, 57, 1]),  # a list that starts with 1 would be shifted
    ([2, 13, 24], "deepseek_v2", "0.5.23", 27, [2, 13, 24]),
    ([2, 12, 21], "gpt_oss", "0.5.14", 24, [1, 11, 20]),
    ([2, 12, 21], "gpt_oss", "0.5.17", 24, [1, 11, 20]),
    ([2, 12, 24], "gpt_oss", "0.5.16", 24, [1, 11, 23]),
    ([2, 12, 24], "gpt_oss", "0.5.17", 24, [2, 12, 24]),
    ([0, 15, 27], "llama", "0.5.23", 30, [-1, 14, 26]),
]


@pytest.mark.parametrize(("ours", "model_type", "version", "layers", "told"), TABLE)
def test_sglang_is_told(ours: list[int], model_type: str, version: str, layers: int, told: list[int]) -> None:
    assert sglang_layer_ids(ours, model_type, version, layers) == told
    assert sglang_captures(told, model_type, version, layers) == ours


def test_vllm_reads_our_meaning() -> None:
    assert vllm_layer_ids((2, 15, 27)) == [2, 15, 27]


# SGLang's own lines, 0.5.23, as facts to test against (deepseek_v2.py:3470, gpt_oss.py:1349, llama.py:941).
def _engine(listed: list[int], model_type: str, layers: int) -> set[int]:
    if model_type in ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25"):
        return {i + 1 for i in listed} if listed[0] == 1 else set(listed)
    if model_type == "gpt_oss" and max(listed) == layers:
        return set(listed)
    return {i + 1 for i in listed}


@given(
    ids=st.lists(st.integers(0, 60), min_size=3, max_size=3, unique=True).map(sorted),
    model_type=st.sampled_from(SUPPORTED_MODEL_TYPES),
)
def test_every_family_captures_what_was_trained(ids: list[int], model_type: str) -> None:
    told = sglang_layer_ids(ids, model_type, "0.5.23", 61)
    assert _engine(told, model_type, 61) == set(ids)
    assert sglang_captures(told, model_type, "0.5.23", 61) == ids


@pytest.mark.parametrize("version", ["0.5.10", "0.5.24", "0.6.0", "1.0", "0.4.10.post2", "newest", "0.5.131"])
def test_unknown_releases_are_refused(version: str) -> None:
    with pytest.raises(ExportError, match=r"0\.5\.11 to 0\.5\.23") as caught:
        sglang_layer_ids([2, 15, 27], "llama", version, 30)
    assert version in caught.value.seen and "--set export.sglang_version=0.5.23" in caught.value.next


def test_unknown_family_is_refused() -> None:
    with pytest.raises(ExportError, match="'gemma4'"):
        sglang_layer_ids([2, 15, 27], "gemma4", "0.5.23", 30)
    with pytest.raises(ExportError, match="'gemma4'"):
        sglang_captures([1, 14, 26], "gemma4", "0.5.23", 30)
