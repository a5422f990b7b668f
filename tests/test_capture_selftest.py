"""The self-test: what it says of sound states, and that each kind of wrong ones fails it with both values."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_families import make_family
from helpers_sglang import FakeSGLang, fake_sglang
from helpers_tiny import make_tiny_target
from safetensors.torch import load_file, save_file

from eyas.engine.client import SGLangClient
from eyas.engine.selftest import SelfTest, self_test
from eyas.errors import EngineError
from eyas.settings import Target as TargetTable
from eyas.tap.reader import RingReader
from eyas.target import load_target


def run(target: Path, fake: FakeSGLang, ids: tuple[int, ...] = (2, 4, 5), **options: Any) -> SelfTest:
    found = load_target(TargetTable(path=str(target)))
    ring = RingReader.attach(fake.ring.path)
    return self_test(found, ids, "float32", lambda: SGLangClient(fake.url), ring, **options)


@pytest.mark.parametrize("encoding", ["bf16", "fp8"])
def test_sound_states_pass(tiny_target: Path, tmp_path: Path, encoding: str) -> None:
    with fake_sglang(tiny_target, tmp_path, encoding=encoding, final_encoding=encoding) as fake:
        result = run(tiny_target, fake, middle=True)
    print("\n".join(result.lines()))
    assert result.pieces == [64, 64, 54] and result.short_tokens == 64 and not result.unchecked
    assert result.logprob_error is not None and result.logprob_error < result.logprob_limit / 2
    assert [check.layer_id for check in result.aux] == [2, 5, 4]
    for check in result.aux:
        assert check.worst > 0.995 and sorted(check.neighbours) == [check.layer_id - 1, check.layer_id + 1]
        assert max(check.neighbours.values()) < 0.97
    assert json.loads(json.dumps(result.figures()))["version"] == "0.5.23"


@pytest.mark.parametrize("shift", [-1, 1])
def test_ids_off_by_one_fail(tiny_target: Path, tmp_path: Path, shift: int) -> None:
    with fake_sglang(tiny_target, tmp_path) as fake:
        fake.shift = shift
        with pytest.raises(EngineError) as caught:
            run(tiny_target, fake)
    print(caught.value)
    assert f"ids off by {shift}" in caught.value.cause
    assert f"gives the state after {2 + shift} layers under id 2" in caught.value.cause
    assert f"as layer {2 + shift}" in caught.value.seen and "at least 0.999" in caught.value.expected


def test_the_last_and_the_middle_layer_are_told_from_their_neighbours(tiny_target: Path, tmp_path: Path) -> None:
    with fake_sglang(tiny_target, tmp_path, aux_layer_ids=(2, 5, 6)) as fake:
        with pytest.raises(EngineError, match="aux layer 7: ") as caught:
            run(tiny_target, fake, (2, 4, 7))
        assert "state after 6 layers under id 7" in caught.value.cause
        assert run(tiny_target, fake, (2, 4, 6)).aux  # the middle one is looked at on request only
        with pytest.raises(EngineError, match="aux layer 4: "):
            run(tiny_target, fake, (2, 4, 6), middle=True)


def test_the_first_and_last_possible_ids(tiny_target: Path, tmp_path: Path) -> None:
    with fake_sglang(tiny_target, tmp_path, aux_layer_ids=(0, 1, 7)) as fake:
        result = run(tiny_target, fake, (0, 1, 7))
    assert [sorted(check.neighbours) for check in result.aux] == [[1], [6, 8]]
    assert not result.unchecked


@pytest.mark.parametrize("name", ["qwen2-sliding", "qwen3_moe-mixed", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_other_families(tmp_path: Path, name: str) -> None:
    """Random models without a tokenizer: experts, latent attention, windows."""
    folder = tmp_path / name
    make_family(folder, name)
    with fake_sglang(folder, tmp_path, aux_layer_ids=(1, 3, 4)) as fake:
        result = run(folder, fake, (1, 3, 4), middle=True)
        assert [check.layer_id for check in result.aux] == [1, 4, 3] and not result.unchecked
        fake.shift = 1
        with pytest.raises(EngineError, match="self-test: aux layer 1"):
            run(folder, fake, (1, 3, 4))


def reversed_rows(rid: str, ids: Any, aux: Any, final: Any) -> Any:
    return (ids, aux, final) if "short" in rid else (ids, aux.flip(0), final)


DISTURBED = {
    "wrong ids": (lambda rid, ids, aux, final: (ids + 1, aux, final), "came with token ids"),
    "rows in another order": (reversed_rows, "aux 2: a row of the canary has cosine"),
    "not what lm_head consumes": (lambda rid, ids, aux, final: (ids, aux, aux[:, 2] * 3), "are off by"),
    "NaN": (
        lambda rid, ids, aux, final: (ids, aux, final * float("nan")),
        "final states at position 0 of the canary: NaN",
    ),
    "half of the rows": (
        lambda rid, ids, aux, final: (ids[:100], aux[:100], final[:100]),
        "100 of 182 rows came, 0 were dropped",
    ),
}


@pytest.mark.parametrize("name", DISTURBED)
def test_wrong_states_fail(tiny_target: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.engine.canary._LOST_AFTER_S", 0.5)
    disturb, words = DISTURBED[name]
    with fake_sglang(tiny_target, tmp_path) as fake:
        fake.disturb = disturb
        with pytest.raises(EngineError, match=words) as caught:
            run(tiny_target, fake)
    print(caught.value)
    assert caught.value.expected


def test_a_server_of_other_weights_fails(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = make_tiny_target(tmp_path / "other", seed=1)
    with fake_sglang(other, tmp_path) as fake, pytest.raises(EngineError, match="off by") as caught:
        run(tiny_target, fake)
    assert "other weights than target.path" in caught.value.cause


def test_a_tap_that_never_fired(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.engine.canary._LOST_AFTER_S", 0.5)
    with fake_sglang(tiny_target, tmp_path) as fake:
        fake.drop[182] = 1
        with pytest.raises(EngineError, match="the tap never fired: a prompt of 182 tokens was answered"):
            run(tiny_target, fake)


def test_failing_and_vanishing_servers(tiny_target: Path, tmp_path: Path) -> None:
    with fake_sglang(tiny_target, tmp_path) as fake:
        fake.statuses = [503]
        with pytest.raises(EngineError, match="self-test: .*HTTP 503"):
            run(tiny_target, fake)
        fake.info["disable_radix_cache"] = False
        with pytest.raises(EngineError, match="prefix cache is on"):
            run(tiny_target, fake)
        fake.info.pop("disable_radix_cache")
        with pytest.raises(EngineError, match="KeyError: 'disable_radix_cache'"):
            run(tiny_target, fake)
    with pytest.raises(EngineError, match="ConnectError"):
        run(tiny_target, fake)

    def give_up() -> None:
        raise EngineError("the server's process ended")

    (tmp_path / "ring").unlink()
    with fake_sglang(tiny_target, tmp_path) as fake, pytest.raises(EngineError, match="process ended"):
        run(tiny_target, fake, watch=give_up)


def test_a_server_that_wants_a_key(tiny_target: Path, tmp_path: Path) -> None:
    with fake_sglang(tiny_target, tmp_path) as fake:
        fake.statuses = [401]
        with pytest.raises(EngineError, match="HTTP 401") as error:
            run(tiny_target, fake)
        assert error.value.cause.startswith("--api-key in engine.args")


def test_what_cannot_be_checked_says_so(tiny_target: Path, tmp_path: Path) -> None:
    """Random weights in the server, packed weights in the checkpoint, layers that are all alike, and no chunks."""
    with fake_sglang(tiny_target, tmp_path) as fake:
        fake.info["load_format"] = "dummy"
        result = run(tiny_target, fake)
        assert result.logprob_error is None and not result.aux
        assert result.unchecked["aux"] == "the server runs random weights (--load-format dummy)"
        assert "aux: unchecked: the server runs random weights (--load-format dummy)" in result.lines()
        fake.info |= {"load_format": "auto", "chunked_prefill_size": 8192}
        fake.chunk = 8192
        result = run(tiny_target, fake)
        assert result.unchecked == {"chunks": "the server takes no prompt longer than its chunks of 8192 tokens"}

        folder = Path(shutil.copytree(tiny_target, tmp_path / "packed"))
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2, dtype=torch.uint8)
        save_file(tensors, folder / "model.safetensors")
        result = run(folder, fake)
        assert [check.layer_id for check in result.aux] == [2] and result.logprob_error is not None
        assert "up_proj.weight is U8" in result.unchecked["aux layer 5"]


def test_layers_that_are_alike_are_unchecked_not_passed(tiny_target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "flat"))
    tensors = load_file(folder / "model.safetensors")
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.2.{name}.weight"].zero_()  # layer 2 adds nothing: its input is its output
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with fake_sglang(folder, tmp_path) as fake:
        result = run(folder, fake)
    assert result.unchecked == {"aux layer 2": "aux layers 2 and 3 of this checkpoint are too alike to be told apart"}
