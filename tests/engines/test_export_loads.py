"""Exported folders in the engines' own loaders: every weight arrives, every switch is heeded, and the engines do with
a wrong folder what our check says (vLLM 0.32.0, SGLang 0.5.23; no server is started).
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_tiny import make_tiny_target
from safetensors.torch import load_file, save_file

from eyas.drafter.eagle3 import NORM_SWITCHES, Drafter, DrafterConfig
from eyas.drafter.target import load_target_head
from eyas.drafter.vocab import to_d2t, to_t2d
from eyas.engine.inject import VLLM_STUB
from eyas.export.check import check_folder
from eyas.export.form import file_name, flat_config, folder_tensors, speculators_config
from eyas.settings import Drafter as DrafterTable
from eyas.settings import Target as TargetTable
from eyas.target import Target, load_target

HERE = Path(__file__).resolve().parent
AUX, CPU = [2, 4, 5], torch.device("cpu")
E31 = {"fc_norm": True, "norm_output": True}
# name -> form, draft vocabulary, with embedding, switches
RIGHT: dict[str, tuple[str, int, bool, dict[str, int]]] = {
    "plain": ("flat", 96, False, {}),
    "eagle 3.1": ("flat", 96, False, E31),
    "norm before fc": ("flat", 96, False, {"norm_before_fc": True}),
    "whole vocabulary": ("flat", 259, False, {}),
    "embedding": ("flat", 96, True, {}),
    "for vLLM alone": ("flat", 96, False, {"norm_before_residual": True, "sliding_window": 64}),
    "speculators": ("speculators", 96, True, E31 | {"sliding_window": 32}),
    "speculators' own norms": ("speculators", 96, True, {"norm_before_residual": True, "norm_before_fc": True}),
    "speculators, whole vocabulary": ("speculators", 259, True, {}),
}


class Folders:
    """Exported folders of a tiny target, right and wrong ones."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Heads of 32: vLLM's attention for CPUs has no smaller ones.
        self.target: Target = load_target(TargetTable(path=str(make_tiny_target(root / "target", hidden=128))))
        self.embedding = load_target_head(self.target, torch.bfloat16, CPU).embedding
        self.drafters = {name: self._drafter(spec) for name, spec in RIGHT.items()}
        for name, (form, _, embedding, _) in RIGHT.items():
            self.write(name, self.config(name, form), self.tensors(name, embedding), form)

    def _drafter(self, spec: tuple[str, int, bool, dict[str, int]]) -> Drafter:
        _, size, _, switches = spec
        drafter = Drafter(DrafterConfig.for_target(self.target, DrafterTable(**switches), size, AUX))
        drafter.initialise(1)
        with torch.no_grad():
            for parameter in drafter.parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(parameter.numel()))
        ids = np.arange(0, 2 * size, 2) if size < 259 else np.arange(259)
        drafter.d2t.copy_(torch.from_numpy(to_d2t(ids)))
        drafter.t2d.copy_(torch.from_numpy(to_t2d(ids, 259)))
        return drafter

    def config(self, name: str, form: str) -> dict[str, Any]:
        drafter = self.drafters[name].config
        if form == "speculators":
            return speculators_config(drafter, self.target, dtype="bfloat16", drafts=5)
        version = "" if drafter.norm_before_residual else "0.5.23"
        return flat_config(drafter, self.target, dtype="bfloat16", sglang_version=version)

    def tensors(self, name: str, embedding: bool = False) -> dict[str, torch.Tensor]:
        drafter = self.drafters[name]
        extra = self.embedding if embedding else None
        return folder_tensors(drafter.state_dict(), drafter.config, torch.bfloat16, extra)

    def write(self, name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], form: str = "flat") -> None:
        folder = self.path(name)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        named = {file_name(each, form): tensor.contiguous() for each, tensor in tensors.items()}
        save_file(named, folder / "model.safetensors")

    def path(self, name: str) -> Path:
        return self.root / name.replace(" ", "-").replace("'", "").replace(",", "")

    def faults(self, name: str, of: str = "plain") -> list[str]:
        spec = RIGHT.get(name, RIGHT[of])
        return check_folder(
            self.path(name),
            self.target,
            self.drafters.get(name, self.drafters[of]).config,
            AUX,
            embedding=self.embedding if spec[2] else None,
            for_sglang=not spec[3].get("norm_before_residual", False),
        )


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def _rename(old: str, new: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def _drop(name: str) -> Change:
    return lambda config, tensors: void(tensors.pop(name))


def _add(name: str, tensor: torch.Tensor) -> Change:
    return lambda config, tensors: void(tensors.update({name: tensor}))


def _set(**keys: Any) -> Change:
    return lambda config, tensors: void(config.update(keys))


def void(value: Any) -> None:
    """A statement where an expression stands."""


# What is wrong with a folder -> how, and what vLLM and SGLang make of it: parameters left untouched, or an error.
WRONG: dict[str, tuple[Change, str, str]] = {
    "fc missing": (_drop("fc.weight"), "loads", "model.fc.weight"),
    "norm missing": (_drop("midlayer.hidden_norm.weight"), "loads", "model.layers.0.hidden_norm.weight"),
    "prefixed": (_rename("fc.", "model.fc."), "no module or parameter named", "loads"),
    "unknown tensor": (_add("midlayer.extra.weight", torch.ones(4)), "no module or parameter named", "loads"),
    "fc_norm not heeded": (_set(fc_norm=True), "loads", "model.fc_norm.0.weight"),
    "tables of a whole vocabulary": (
        _add("d2t", torch.zeros(259, dtype=torch.int64)),
        "no module or parameter named 'draft_id_to_target_id'",
        "loads",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made = Folders(tmp_path_factory.mktemp("export"))
    for name, (change, _, _) in WRONG.items():
        of = "whole vocabulary" if "whole" in name else "plain"
        config, tensors = made.config(of, "flat"), made.tensors(of)
        change(config, tensors)
        made.write(name, config, tensors)
    return made


def run_loader(python: Path, script: str, wanted: dict[str, Any], **env: str) -> dict[str, Any]:
    unset = ("PYTHONPATH", "OMP_NUM_THREADS")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | env
    done = subprocess.run(
        [python, HERE / script, json.dumps(wanted)], env=environment, capture_output=True, text=True, timeout=900
    )
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    return dict(json.loads(done.stdout.split("RESULT", 1)[1]))


@pytest.fixture(scope="module")
def vllm(folders: Folders) -> dict[str, Any]:
    venv = os.environ.get("EYAS_VLLM_VENV")
    assert venv, "EYAS_VLLM_VENV is not set: run `make test-engines`"
    target = str(folders.target.path)
    wanted = {name: {"model": target, "draft": str(folders.path(name))} for name in [*RIGHT, *WRONG]}
    wanted["served by its folder"] = {"model": str(folders.path("speculators")), "draft": ""}
    return run_loader(Path(venv) / "bin/python", "load_vllm.py", wanted)


@pytest.fixture(scope="module")
def sglang(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = subprocess.run(["bash", HERE / "sglang_venv.sh"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    stub = tmp_path_factory.mktemp("stub")
    (stub / "vllm").mkdir()
    (stub / "vllm/__init__.py").write_text("")
    (stub / "vllm/_custom_ops.py").write_text(VLLM_STUB)
    target = str(folders.target.path)
    wanted = {name: {"model": target, "draft": str(folders.path(name))} for name in [*RIGHT, *WRONG]}
    python = Path(made.stdout.strip().splitlines()[-1]) / "bin/python"
    return run_loader(python, "load_sglang.py", wanted, PYTHONPATH=str(stub))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def engine_parameters(folder: Path) -> dict[str, str]:
    """Digests of what the engines' parameters must be: q, k, v stacked, and gate, up."""
    held = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    stacks = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    for stacked, parts in stacks.items():
        where = stacked.split(".")[0]
        pieces = [held.pop(f"layers.0.{where}.{part}.weight") for part in parts]
        held[f"layers.0.{stacked}.weight"] = torch.cat(pieces)
    held.pop("t2d", None)
    tables = {"draft_id_to_target_id": held.pop("d2t")} if "d2t" in held else {}
    wide = {name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in held.items()}
    return {name: digest(tensor) for name, tensor in (wide | tables).items()}


@pytest.mark.parametrize("name", RIGHT)
def test_vllm_loads_every_weight_and_heeds_every_switch(name: str, folders: Folders, vllm: dict[str, Any]) -> None:
    assert folders.faults(name) == []
    found, expected = vllm[name], engine_parameters(folders.path(name))
    params = found["params"]
    if not RIGHT[name][2]:  # random until the target's is put there
        params.pop("model.embed_tokens.weight", None)
    assert params == expected
    config = folders.drafters[name].config
    heeded = (*NORM_SWITCHES, "sliding_window")
    assert {switch: found[switch] for switch in heeded} == {switch: getattr(config, switch) for switch in heeded}
    assert found["captures"] == AUX and found["own_embedding"] == RIGHT[name][2]
    assert found["rope"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_vllm_serves_a_speculators_folder_by_itself(folders: Folders, vllm: dict[str, Any]) -> None:
    found = vllm["served by its folder"]
    assert found["target"] == str(folders.target.path) and found["drafts"] == 5
    assert found["params"].items() >= engine_parameters(folders.path("speculators")).items()


@pytest.mark.parametrize("name", [name for name, spec in RIGHT.items() if spec[0] == "flat"])
def test_sglang_loads_every_weight_and_heeds_every_switch(name: str, folders: Folders, sglang: dict[str, Any]) -> None:
    found, drafter = sglang[name], folders.drafters[name]
    if drafter.config.norm_before_residual:
        assert "no model class for ['Eagle3LlamaForCausalLM']" in found["error"]
        return
    # Only the embedding is open: SGLang puts the target's there.
    assert found["left"] == ([] if RIGHT[name][2] else ["model.embed_tokens.weight"])
    expected = engine_parameters(folders.path(name))
    expected.pop("draft_id_to_target_id", None)  # not a parameter there: `hot`
    assert {each: value for each, value in found["params"].items() if each not in found["left"]} == expected
    assert found["hot"] == (drafter.draft_ids.tolist() if drafter.config.draft_vocab_size < 259 else None)
    for switch in ("fc_norm", "norm_output", "norm_before_fc"):
        assert found[switch] == asdict(drafter.config)[switch], switch
    assert found["nested"] == [1, 3, 4] and not found["head_from_target"]


@pytest.mark.parametrize("name", WRONG)
def test_what_the_check_says_is_what_the_engines_do(
    name: str, folders: Folders, vllm: dict[str, Any], sglang: dict[str, Any]
) -> None:
    _, by_vllm, by_sglang = WRONG[name]
    assert folders.faults(name, "whole vocabulary" if "whole" in name else "plain") != []
    assert "error" not in vllm[name] if by_vllm == "loads" else by_vllm in vllm[name]["error"], vllm[name]
    if by_sglang == "loads":
        assert sglang[name]["left"] == ["model.embed_tokens.weight"], "the fault is passed over in silence"
    else:
        assert by_sglang in sglang[name]["left"], "left as it was made, without a word"
