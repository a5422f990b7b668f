"""The exported speculators form in speculators 0.9.0 itself: it loads, drafts the same tokens, and what it saves comes
back as the drafter to start from. Forward passes of two codebases agree on every switch."""

import json
from pathlib import Path

import pytest
import torch
from helpers_drafter import Sample
from helpers_peers import run_peer
from helpers_tiny import make_tiny_target
from safetensors.torch import load_file, save_file

from eyas.drafter.eagle3 import Drafter, DrafterConfig
from eyas.drafter.pack import pack_samples
from eyas.drafter.start import read_start
from eyas.drafter.target import load_target_head
from eyas.drafter.ttt import unroll
from eyas.drafter.vocab import to_d2t, to_t2d
from eyas.export.form import file_name, folder_tensors, speculators_config
from eyas.settings import Drafter as DrafterTable
from eyas.settings import Target as TargetTable
from eyas.target import Target, load_target

CPU, STEPS, LENGTH = torch.device("cpu"), 3, 24
VARIANTS: list[dict[str, bool]] = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "norm_before_residual": True},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = make_tiny_target(tmp_path_factory.mktemp("target"))
    return load_target(TargetTable(path=str(folder)))


def make(target: Target, switches: dict[str, bool]) -> Drafter:
    drafter = Drafter(DrafterConfig.for_target(target, DrafterTable(**switches), 100, [2, 4, 5]))
    drafter.initialise(1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
            else:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    ids = torch.randperm(259, generator=generator)[:100].sort().values.numpy()
    drafter.d2t.copy_(torch.from_numpy(to_d2t(ids)))
    drafter.t2d.copy_(torch.from_numpy(to_t2d(ids, 259)))
    return drafter


@pytest.mark.parametrize("switches", VARIANTS, ids=lambda switches: "+".join(switches) or "plain")
def test_speculators_drafts_the_same_tokens(switches: dict[str, bool], target: Target, tmp_path: Path) -> None:
    drafter = make(target, switches)
    folder = tmp_path / "export"
    folder.mkdir()
    config = speculators_config(drafter.config, target, dtype="float32", drafts=3)
    (folder / "config.json").write_text(json.dumps(config))
    head = load_target_head(target, torch.float32, CPU)
    tensors = folder_tensors(drafter.state_dict(), drafter.config, torch.float32, head.embedding)
    save_file({file_name(name, "speculators"): value for name, value in tensors.items()}, folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    aux = torch.randn(LENGTH, 3 * 48, generator=generator)
    ids = torch.randint(259, (LENGTH,), generator=generator)
    save_file({"aux": aux, "ids": ids}, tmp_path / "inputs.safetensors")
    saved, told = tmp_path / "saved", tmp_path / "drafts.safetensors"
    arguments = (folder, tmp_path / "inputs.safetensors", str(STEPS), told, saved)
    run_peer("speculators 0.9", "speculators_drafter.py", *arguments)
    theirs = load_file(told)["drafts"]

    mask = torch.ones(LENGTH, dtype=torch.bool)
    sample = Sample("0" * 32, ids.int(), mask, aux.view(LENGTH, 3, 48), torch.zeros(LENGTH, 48))
    pack = pack_samples([sample], STEPS, torch.float32, CPU)
    compared = 0
    for k, normed in enumerate(unroll(drafter, head.embedding, pack, STEPS)):
        rows = torch.from_numpy(pack.alignment.rows[pack.alignment.steps[k].row])
        ours = drafter.lm_head(normed).argmax(-1)
        assert torch.equal(ours, theirs[k, rows]), k
        compared += len(rows)
    assert compared > 60

    # What speculators saves is the drafter that training starts from, bit for bit.
    started = read_start(saved, drafter.config, target, head)
    assert started.form == "speculators" and set(started.left.values()) == {"the target's is used"}
    for name, value in drafter.state_dict().items():
        assert torch.equal(started.drafter.state_dict()[name], value), name
