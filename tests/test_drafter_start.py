"""Starting from an existing drafter: our exports come back bit-equal, other drafters are refused with both values."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_export import AUX_LAYER_IDS, drafter_config, drafter_tensors
from safetensors.torch import load_file, save_file

from eyas.drafter.eagle3 import NORM_SWITCHES, DrafterConfig
from eyas.drafter.published import canonical, folder_digest, read_published
from eyas.drafter.start import Started, read_start
from eyas.drafter.target import TargetHead, load_target_head
from eyas.errors import TrainError
from eyas.export.form import file_name, flat_config, folder_tensors, speculators_config
from eyas.settings import Target as TargetTable
from eyas.target import Target, load_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(TargetTable(path=str(tiny_target)))


@pytest.fixture(scope="module")
def head(target: Target) -> TargetHead:
    return load_target_head(target, torch.float32, CPU)


def weights(drafter: DrafterConfig) -> dict[str, torch.Tensor]:
    """Random, with end of turn (token 2) in the draft vocabulary."""
    generator = torch.Generator().manual_seed(5)
    sizes = {f"fc_norm.{i}.weight": 48 for i in range(3)} if drafter.fc_norm else {}
    sizes |= {"input_norm.weight": 144} if drafter.norm_before_fc else {}
    extra = {name: torch.rand(size, generator=generator) for name, size in sizes.items()}
    tensors = drafter_tensors(drafter.draft_vocab_size) | extra
    targets = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    targets[0] = 2 if 2 not in targets else targets[0]
    targets = targets.sort().values
    tensors["d2t"] = targets - torch.arange(len(targets))
    tensors["t2d"] = torch.zeros(drafter.vocab_size, dtype=torch.bool).index_fill(0, targets, True)
    return tensors


def write(
    folder: Path, form: str, drafter: DrafterConfig, target: Target, embedding: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """A folder in one of the forms; returns its tensors by our names."""
    folder.mkdir(parents=True, exist_ok=True)
    if form == "checkpoint":
        (folder / "drafter.json").write_text(json.dumps(asdict(drafter)))
        save_file(weights(drafter), folder / "model.safetensors")
        return weights(drafter)
    if form == "speculators":
        config = speculators_config(drafter, target, dtype="bfloat16", drafts=3)
    else:
        version = "" if drafter.norm_before_residual else "0.5.23"
        config = flat_config(drafter, target, dtype="bfloat16", sglang_version=version)
    tensors = folder_tensors(weights(drafter), drafter, torch.bfloat16, embedding)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({file_name(name, form): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return tensors


def shape(draft_vocab_size: int = 96, **changes: Any) -> DrafterConfig:
    return DrafterConfig(**drafter_config(draft_vocab_size, **changes))


VARIANTS = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
    {"sliding_window": 64},
]


@pytest.mark.parametrize("switches", VARIANTS, ids=lambda switches: "+".join(switches) or "plain")
@pytest.mark.parametrize("form", ["flat", "speculators", "checkpoint"])
def test_an_export_comes_back_bit_equal(
    form: str, switches: dict[str, bool], tmp_path: Path, target: Target, head: TargetHead
) -> None:
    drafter = shape(**switches)
    written = write(tmp_path, form, drafter, target)
    started = read_start(tmp_path, drafter, target, head)
    assert (started.form, started.left, started.notes) == (form, {}, [])
    found = started.drafter.state_dict()
    assert started.taken == list(found)
    assert started.drafter.config == drafter
    for name, tensor in found.items():
        assert torch.equal(tensor, written[name].float() if tensor.is_floating_point() else written[name]), name
    # ... and is exported to the same bits again.
    again = folder_tensors(found, drafter, torch.bfloat16, None)
    for name, tensor in folder_tensors(weights(drafter), drafter, torch.bfloat16, None).items():
        assert torch.equal(again[name], tensor), name


def test_names_of_other_tools_are_understood(tmp_path: Path, target: Target, head: TargetHead) -> None:
    """`model.layers.0.` as some trainers write it, SGLang's legacy names, an index with two files."""
    drafter = shape(fc_norm=True)
    written = write(tmp_path, "flat", drafter, target, head.embedding)
    legacy = {"fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid.", "fc_norm.2.": "aux_norm_high."}

    def renamed(name: str) -> str:
        for ours, theirs in legacy.items():
            name = name.replace(ours, theirs)
        return "model." + name.replace("midlayer.", "layers.0.") if name.startswith("midlayer.") else name

    names = sorted(written)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({renamed(name): written[name] for name in held}, tmp_path / file)
    weight_map = {renamed(name): file for file, held in files.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model.safetensors").unlink()
    started = read_start(tmp_path, drafter, target, head)
    assert started.left == {"embed_tokens.weight": "the target's is used"}
    for name, tensor in started.drafter.state_dict().items():
        assert torch.equal(tensor, written[name].to(tensor.dtype)), name
    assert canonical("model.layers.0.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v != "gone"}))


def refusal(folder: Path, wanted: DrafterConfig, target: Target, head: TargetHead) -> str:
    with pytest.raises(TrainError) as error:
        read_start(folder, wanted, target, head)
    return str(error.value)


def test_all_differences_are_named_at_once_with_both_values(tmp_path: Path, target: Target, head: TargetHead) -> None:
    write(tmp_path, "flat", shape(), target)
    wanted = shape(64, intermediate_size=128, aux_layer_ids=[1, 3, 5], norm_output=True)
    told = refusal(tmp_path, wanted, target, head)
    for line in (
        "intermediate_size is 96; this run has 128 (drafter.intermediate_size)",
        "draft_vocab_size is 96; this run has 64 (train.draft_vocab_size)",
        "aux_layer_ids is [2, 4, 5]; this run has [1, 3, 5] (drafter.aux_layer_ids, then capture again)",
        "norm_output is False; this run has True (drafter.norm_output)",
    ):
        assert line in told, told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; this drafter has 1"),
        ({"attention_bias": True}, "attention_bias is True; this drafter has False"),
        ({"hidden_size": 64}, "hidden_size is 64; this run has 48 (by the target)"),
        ({"vocab_size": 300}, "vocab_size is 300; this run has 259 (by the target)"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "aux_layer_ids is [1, 3, 4]; this run has [2, 4, 5]"),
        ({"num_attention_heads": "gone"}, "not the config of an EAGLE-3 drafter: KeyError('num_attention_heads')"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash' is not 'eagle3'"),
    ],
)
def test_other_drafters_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path, target: Target, head: TargetHead
) -> None:
    write(tmp_path, "flat", shape(), target)
    edit(tmp_path, **changes)
    assert words in refusal(tmp_path, shape(), target, head)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("midlayer.self_attn.q_norm.weight", torch.ones(12), "q_norm.weight [12]: this drafter has no place for it"),
        ("fc.weight", torch.ones(48, 96), "tensor fc.weight has shape [48, 96]; this run has [48, 144]"),
        ("lm_head.weight", None, "tensor lm_head.weight is missing"),
        ("d2t", "absolute", "d2t holds target ids; expected offsets"),
        ("t2d", torch.zeros(259, dtype=torch.bool), "t2d flags 0 target ids"),
    ],
)
def test_other_tensors_are_refused(
    name: str, tensor: Any, words: str, tmp_path: Path, target: Target, head: TargetHead
) -> None:
    tensors = write(tmp_path, "flat", shape(), target)
    if isinstance(tensor, str):
        tensor = tensors["d2t"] + torch.arange(96)
    tensors = tensors | {name: tensor} if tensor is not None else {k: v for k, v in tensors.items() if k != name}
    save_file(tensors, tmp_path / "model.safetensors")
    assert words in refusal(tmp_path, shape(), target, head)


def test_what_is_taken_over_is_said(tmp_path: Path, target: Target, head: TargetHead) -> None:
    """Its own rope and epsilon stay, its context becomes the target's, its embedding is left."""
    own = replace(shape(), rope_theta=5e5, rms_norm_eps=1e-5, max_position_embeddings=2048)
    write(tmp_path, "flat", own, target, head.embedding + 1)
    started = read_start(tmp_path, shape(), target, head)
    assert started.drafter.config == replace(shape(), rope_theta=5e5, rms_norm_eps=1e-5)
    assert started.left == {"embed_tokens.weight": "the target's is used, which differs"}
    assert any("rope_theta, 500000.0 (the target has 10000.0)" in note for note in started.notes)
    assert any("max_position_embeddings, 2048, become the target's, 512" in note for note in started.notes)


def test_layer_ids_in_eagle_config_alone_are_sglangs(tmp_path: Path, target: Target, head: TargetHead) -> None:
    write(tmp_path, "flat", shape(), target)
    edit(
        tmp_path, eagle_aux_hidden_state_layer_ids="gone", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    )
    started = read_start(tmp_path, shape(), target, head)
    assert started.drafter.config.aux_layer_ids == AUX_LAYER_IDS
    assert "read as SGLang 0.5.23's they are [2, 4, 5]" in started.notes[0]
    edit(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]})
    assert "aux_layer_ids is [3, 5, 6]; this run has [2, 4, 5]" in refusal(tmp_path, shape(), target, head)
    edit(tmp_path, eagle_config="gone")
    started = read_start(tmp_path, shape(), target, head)  # both engines' default for 8 layers is [2, 4, 5]
    assert started.drafter.config.aux_layer_ids == AUX_LAYER_IDS and "names no aux layers" in started.notes[0]


def test_speculators_defaults_are_vllms(tmp_path: Path, target: Target, head: TargetHead) -> None:
    """Without the key, norm_before_residual is on in this form; a sliding window is the recipe's."""
    write(tmp_path, "speculators", shape(), target)
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    edit(
        tmp_path,
        norm_before_residual="gone",
        transformer_layer_config=layer | {"sliding_window": 2048, "layer_types": ["sliding_attention"]},
    )
    assert "norm_before_residual is True; this run has False" in refusal(tmp_path, shape(), target, head)
    started = read_start(tmp_path, shape(norm_before_residual=True), target, head)
    assert started.notes == [
        "its sliding_window, 2048, becomes the recipe's, 0 (0: none); drafter.sliding_window = 2048 keeps it"
    ]
    kept = read_start(tmp_path, shape(norm_before_residual=True, sliding_window=2048), target, head)
    assert kept.notes == [] and kept.drafter.config.sliding_window == 2048


def test_a_whole_vocabulary_needs_no_tables(tmp_path: Path, target: Target, head: TargetHead) -> None:
    whole = shape(259)
    tensors = write(tmp_path, "flat", whole, target)
    assert not {"d2t", "t2d"} & tensors.keys()
    edit(tmp_path, draft_vocab_size=None)
    save_file({k: v for k, v in tensors.items() if k != "lm_head.weight"}, tmp_path / "model.safetensors")
    started: Started = read_start(tmp_path, whole, target, head)
    assert torch.equal(started.drafter.lm_head.weight, head.lm_head)
    assert not started.drafter.d2t.any() and started.drafter.t2d.all()
    assert started.notes == ["it has no lm_head: the target's is taken"]
    assert "lm_head.weight" not in started.taken


def test_a_vocabulary_without_end_of_turn_is_said(tmp_path: Path, target: Target, head: TargetHead) -> None:
    tensors = write(tmp_path, "flat", shape(), target)
    targets = torch.arange(100, 196)
    tables = {"d2t": targets - torch.arange(96)}
    save_file({k: v for k, v in tensors.items() if k != "t2d"} | tables, tmp_path / "model.safetensors")
    started = read_start(tmp_path, shape(), target, head)
    assert torch.equal(started.drafter.draft_ids, targets)
    assert "lacks the end-of-turn tokens [2]" in started.notes[0]


def test_folders_that_are_none(tmp_path: Path, target: Target, head: TargetHead) -> None:
    assert "neither config.json nor drafter.json" in refusal(tmp_path, shape(), target, head)
    write(tmp_path, "flat", shape(), target)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:300])
    assert "not a whole safetensors file" in refusal(tmp_path, shape(), target, head)
    file.unlink()
    assert "pickled .bin files are not read" in refusal(tmp_path, shape(), target, head)
    file.write_bytes(whole)
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in refusal(tmp_path, shape(), target, head)


def test_the_digest_sees_config_and_weights(tmp_path: Path, target: Target) -> None:
    write(tmp_path, "flat", shape(), target)
    first = folder_digest(tmp_path)
    edit(tmp_path, norm_output=True)
    second = folder_digest(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"norm.weight": tensors["norm.weight"] + 1}, tmp_path / "model.safetensors")
    assert len({first, second, folder_digest(tmp_path)}) == 3
    assert set(NORM_SWITCHES) <= asdict(read_published(tmp_path, target).config).keys()
