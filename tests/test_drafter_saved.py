"""Checkpoints as stages find and read them: whole, or refused in words."""

import json
from pathlib import Path

import pytest
import torch
from helpers_export import drafter_config, make_run, write_checkpoint

from eyas.drafter.saved import checkpoints, load_drafter, newest, step_of
from eyas.errors import TrainError
from eyas.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path, tmp_path / "target")


def test_a_drafter_comes_back_as_it_was_saved(run: Run) -> None:
    written = write_checkpoint(run, 7)
    for name, tensor in load_drafter(run.train_dir / "step-7").state_dict().items():
        assert torch.equal(tensor, written[name]), name


def test_the_newest_is_that_of_most_steps(run: Run) -> None:
    assert newest(run.train_dir) is None
    for step in (9, 100, 20):
        write_checkpoint(run, step)
    (run.train_dir / "step-20" / "state.json").unlink()  # cut by hand: no whole one
    (run.train_dir / "step-300.bak").mkdir()
    assert [step_of(folder) for folder in checkpoints(run.train_dir)] == [9, 100]
    assert newest(run.train_dir) == run.train_dir / "step-100"


def test_what_is_not_whole_is_refused_in_words(run: Run) -> None:
    write_checkpoint(run, 7)
    folder = run.train_dir / "step-7"
    shape, weights = folder / "drafter.json", folder / "model.safetensors"
    faults = {
        "drafter.json: not readable": lambda: shape.write_text('{"hidden_size": 48,'),
        "drafter.json: missing": shape.unlink,
        "not the weights of drafter.json": lambda: shape.write_text(json.dumps(drafter_config(intermediate_size=64))),
        "model.safetensors: not readable": lambda: weights.write_bytes(weights.read_bytes()[:500]),
        "model.safetensors: missing": weights.unlink,
    }
    for told, damage in faults.items():
        damage()
        with pytest.raises(TrainError, match=told) as error:
            load_drafter(folder)
        assert f"rm -r {folder}" in error.value.next
