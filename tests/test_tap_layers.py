"""Layer ids by model, and layouts that are refused: on classes with the setters of SGLang's models, release by release.

What the real 0.5.23 does is in tests/engines/test_sglang_tap.py; these stand for releases that aren't installed.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from eyas.tap.events import Refused
from eyas.tap.layers import read_back, set_layers
from eyas.tap.refuse import argument, check_layout, check_version

LAYERS = 61


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        self.layers_to_capture: list[int] = []

    def mark(self, ids: list[int]) -> None:
        self.layers_to_capture = ids
        for layer in ids:
            self.layers[layer]._is_layer_to_capture = True


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Body()


class LlamaForCausalLM(Model):  # also qwen2.py, qwen3.py, glm4_moe.py
    def set_eagle3_layers_to_capture(self, layer_ids):
        self.model.layers_to_capture = [layer + 1 for layer in layer_ids]


class Qwen3MoeForCausalLM(Model):
    def set_eagle3_layers_to_capture(self, layer_ids):
        self.model.mark([layer + 1 for layer in layer_ids])


class DeepseekV2ForCausalLM(Model):  # from 0.5.13
    def set_eagle3_layers_to_capture(self, layer_ids):
        plus = 1 if layer_ids and layer_ids[0] == 1 else 0
        self.model.layers_to_capture = [layer + plus for layer in layer_ids]

    def set_dflash_layers_to_capture(self, layer_ids):
        self.model.layers_to_capture = [layer + 1 for layer in layer_ids]


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    pass


class OlderDeepseekV3ForCausalLM(DeepseekV2ForCausalLM):  # up to 0.5.12
    def set_eagle3_layers_to_capture(self, layer_ids):
        self.model.layers_to_capture = [layer + 1 for layer in layer_ids]


class GptOssForCausalLM(Model):  # from 0.5.17
    def set_eagle3_layers_to_capture(self, layer_ids):
        plus = 0 if max(layer_ids) == LAYERS else 1
        self.model.layers_to_capture = [layer + plus for layer in layer_ids]

    def set_dflash_layers_to_capture(self, layer_ids):
        self.model.layers_to_capture = [layer + 1 for layer in layer_ids]


class KimiK25ForConditionalGeneration(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.language_model = DeepseekV3ForCausalLM()

    def set_eagle3_layers_to_capture(self, layer_ids):
        self.language_model.set_eagle3_layers_to_capture(layer_ids)

    def set_dflash_layers_to_capture(self, layer_ids):
        self.language_model.set_dflash_layers_to_capture(layer_ids)


class NemotronHForCausalLM(Model):
    def set_dflash_layers_to_capture(self, layer_ids):
        self.model.layers_to_capture = {layer + 1 for layer in layer_ids}


class BeamForCausalLM(Model):  # 0.5.23
    def set_dflash_layers_to_capture(self, layer_ids):
        self.model.layers_to_capture = layer_ids


class InklingCausalLLM(Model):  # 0.5.17 and later
    def set_dflash_layers_to_capture(self, layer_ids):
        self._dflash_layers_to_capture = set(layer_ids)


class Gemma3ForCausalLM(LlamaForCausalLM):
    pass


RIGHT = [
    LlamaForCausalLM,
    Qwen3MoeForCausalLM,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    OlderDeepseekV3ForCausalLM,
    GptOssForCausalLM,
    KimiK25ForConditionalGeneration,
    NemotronHForCausalLM,
]


@pytest.mark.parametrize("kind", RIGHT)
@given(ids=st.lists(st.integers(0, LAYERS - 1), min_size=3, max_size=3, unique=True).map(sorted))
def test_every_model_collects_what_enters_the_layers(kind, ids) -> None:
    model = kind()
    done = set_layers(model, ids)
    body = next(module for module in model.modules() if isinstance(module, Body))
    assert sorted(body.layers_to_capture) == ids == done.read
    marked = [i for i, layer in enumerate(body.layers) if getattr(layer, "_is_layer_to_capture", False)]
    assert marked == (ids if kind is Qwen3MoeForCausalLM else [])


def test_the_traps_of_deepseek_and_gpt_oss() -> None:
    """Ids of which their EAGLE-3 setters would make others."""
    for kind, ids in (
        (DeepseekV3ForCausalLM, [3, 31, 59]),
        (DeepseekV3ForCausalLM, [1, 31, 59]),
        (GptOssForCausalLM, [2, 30, 61]),
    ):
        wrong = kind()
        wrong.set_eagle3_layers_to_capture([layer - 1 for layer in ids])
        if ids != [2, 30, 61]:
            assert wrong.model.layers_to_capture != ids
        assert set_layers(kind(), ids).setter == "set_dflash_layers_to_capture"


@pytest.mark.parametrize("kind", [BeamForCausalLM, InklingCausalLLM])
def test_a_setter_that_counts_otherwise_is_refused(kind) -> None:
    with pytest.raises(Refused, match="counts layers in another way"):
        set_layers(kind(), [2, 30, 58])


def test_models_without_a_setter_or_with_wrong_states_are_refused() -> None:
    with pytest.raises(Refused, match="neither"):
        set_layers(Model(), [2, 30, 58])
    with pytest.raises(Refused, match="39286"):
        set_layers(Gemma3ForCausalLM(), [2, 30, 58])


def test_ids_off_by_one_are_seen_when_read_back() -> None:
    model = LlamaForCausalLM()
    model.set_eagle3_layers_to_capture([2, 30, 58])  # a start with our ids where SGLang's were wanted
    with pytest.raises(Refused, match=r"\[3, 31, 59\].*expected: the streams that enter layers \[2, 30, 58\]"):
        read_back(model, [2, 30, 58])
    moe = Qwen3MoeForCausalLM()
    set_layers(moe, [3, 31, 59])
    with pytest.raises(Refused, match="marked"):  # its marks stay
        set_layers(moe, [2, 30, 58])


@pytest.mark.parametrize("ids", [[2, 30], [2, 30, 30], [30, 2, 58], [-1, 2, 30], []])
def test_ids_that_rise_not_are_refused(ids) -> None:
    with pytest.raises(Refused, match="rising"):
        set_layers(LlamaForCausalLM(), ids)


@pytest.mark.parametrize("text", ["0.5.11", "0.5.14", "0.5.13.post1", "0.5.23", "0.5.23+cpu"])
def test_releases_that_were_read(text) -> None:
    assert check_version(text) == tuple(int(part) for part in text.replace("+", ".").split(".")[:3])


@pytest.mark.parametrize("text", ["0.5.10", "0.5.24", "0.6.0", "1.0", "0.5.9.post2", "0.0.0.dev0", "main"])
def test_other_releases_are_refused(text) -> None:
    with pytest.raises(Refused, match=r"0\.5\.11 to 0\.5\.23"):
        check_version(text)


def named(name: str) -> nn.Module:
    return type(name, (Model,), {})()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pp_size", 2),
        ("dp_size", 2),
        ("attn_dp_size", 4),
        ("attn_cp_size", 2),
        ("dcp_size", 2),
        ("enable_two_batch_overlap", True),
        ("enable_pdmux", True),
        ("enable_layernorm_sp", True),
        ("enable_attn_tp_input_scattered", True),
        ("enable_prefill_context_parallel", True),
        ("speculative_algorithm", "EAGLE3"),
    ],
)
def test_layouts_with_wrong_states_are_refused(field, value) -> None:
    fine = SimpleNamespace(pp_size=1, dp_size=1, speculative_algorithm=None, enable_pdmux=False)
    check_layout(fine, (0, 5, 23), named("LlamaForCausalLM"))
    wrong = SimpleNamespace(**(vars(fine) | {field: value}))
    with pytest.raises(Refused, match=f"{field}="):
        check_layout(wrong, (0, 5, 23), named("LlamaForCausalLM"))


def test_the_last_decision_on_an_argument_counts() -> None:
    """0.5.23 keeps `--speculative-algorithm DFLASH` as given and decides beside it that there is none."""
    args = SimpleNamespace(speculative_algorithm="DFLASH", dp_size=None, attn_dp_size=property())
    args._resolved_overrides = [("a", {"speculative_algorithm": "EAGLE3"}), ("b", {"speculative_algorithm": None})]
    assert argument(args, "speculative_algorithm", "absent") is None
    check_layout(args, (0, 5, 23), named("LlamaForCausalLM"))
    args._resolved_overrides.append(("c", {"speculative_algorithm": "EAGLE"}))
    with pytest.raises(Refused, match="speculative_algorithm='EAGLE'"):
        check_layout(args, (0, 5, 23), named("LlamaForCausalLM"))


@pytest.mark.parametrize(
    ("model", "wrong_until"),
    [
        ("LlamaForCausalLM", 0),
        ("Qwen2ForCausalLM", 0),
        ("Qwen3ForCausalLM", 0),
        ("Qwen3MoeForCausalLM", 0),
        ("DeepseekV3ForCausalLM", 13),
        ("KimiK25ForConditionalGeneration", 13),
        ("GptOssForCausalLM", 20),
        ("Glm4MoeForCausalLM", 20),
        ("Glm4MoeLiteForCausalLM", 20),
        ("SomethingForCausalLM", 20),
    ],
)
def test_fused_all_reduce_is_refused_where_it_splits_sums(model, wrong_until) -> None:
    for patch in range(11, 24):
        args = SimpleNamespace(tp_size=8, enforce_disable_flashinfer_allreduce_fusion=False)
        if patch <= wrong_until:
            with pytest.raises(Refused, match="enforce-disable-flashinfer-allreduce-fusion"):
                check_layout(args, (0, 5, patch), named(model))
        else:
            check_layout(args, (0, 5, patch), named(model))
        args.enforce_disable_flashinfer_allreduce_fusion = True
        check_layout(args, (0, 5, patch), named(model))
        check_layout(SimpleNamespace(tp_size=1), (0, 5, patch), named(model))
        args.enable_aiter_allreduce_fusion = True
        if patch <= 20:
            with pytest.raises(Refused, match="aiter"):
                check_layout(args, (0, 5, patch), named(model))
