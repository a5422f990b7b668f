"""An existing EAGLE-3 drafter as the start of training (`train.start`).

Taken from it: all weights, the draft vocabulary, rope and the norms' epsilon (its weights were trained with them).
To be as the recipe, the target and the store have it: layers, shapes, vocabulary, aux layers, norm switches. All that
differs is named in one error, both values each. The embedding and the context length are the target's, the sliding
window is the recipe's.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.eagle3 import NORM_SWITCHES, Drafter, DrafterConfig
from eyas.drafter.published import Published, canonical, read_published
from eyas.drafter.target import TargetHead
from eyas.drafter.vocab import check_vocabulary
from eyas.errors import TrainError
from eyas.target import Target

_ITS_OWN = ("rope_theta", "rope_scaling", "rms_norm_eps")
# The target's own tensors, which some folders repeat.
_REPEATED = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
_MEND = {
    "intermediate_size": "drafter.intermediate_size",
    "num_attention_heads": "drafter.num_attention_heads",
    "num_key_value_heads": "drafter.num_key_value_heads",
    "draft_vocab_size": "train.draft_vocab_size",
    "aux_layer_ids": "drafter.aux_layer_ids, then capture again",
} | {switch: f"drafter.{switch}" for switch in NORM_SWITCHES}


@dataclass(frozen=True)
class Started:
    """A drafter that was taken over.

    Attributes:
        drafter: fp32, on the CPU.
        form: "flat", "speculators" or "checkpoint" (eyas.drafter.published).
        taken: names of the tensors that came from the folder, ours.
        left: name in the file -> why that tensor was not taken.
        notes: what else a user should know, a line each.
    """

    drafter: Drafter
    form: str
    taken: list[str]
    left: dict[str, str]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        return {"form": self.form, "taken": self.taken, "left": self.left, "notes": self.notes}


def read_start(folder: Path, wanted: DrafterConfig, target: Target, head: TargetHead) -> Started:
    """Take a drafter over.

    Args:
        wanted: what the recipe, the target and the store ask for.
        head: the target's tensors, for what a folder leaves to the target.
    Raises: TrainError where the folder can't be read, or holds another drafter than is asked for.
    """
    found = read_published(folder, target)
    faults = found.faults + _differences(found.config, wanted)
    if faults:
        raise _refused(folder, faults)
    own = {key: getattr(found.config, key) for key in _ITS_OWN}
    config = replace(wanted, **own)
    notes = found.notes + [
        f"it keeps its own {key}, {value} (the target has {getattr(wanted, key)})"
        for key, value in own.items()
        if value != getattr(wanted, key)
    ]
    if found.config.max_position_embeddings != wanted.max_position_embeddings:
        notes.append(
            f"its max_position_embeddings, {found.config.max_position_embeddings}, "
            f"become the target's, {wanted.max_position_embeddings}"
        )
    window = found.config.sliding_window
    if window != wanted.sliding_window:
        notes.append(
            f"its sliding_window, {window}, becomes the recipe's, {wanted.sliding_window} (0: none); "
            f"drafter.sliding_window = {window} keeps it"
        )
    drafter = Drafter(config)
    taken, left = _take(found, drafter, head, notes)
    missing_eos = [token for token in target.eos_token_ids if not bool(drafter.t2d[token])]
    if missing_eos:
        notes.append(f"its draft vocabulary lacks the end-of-turn tokens {missing_eos}: stopping is never drafted")
    return Started(drafter, found.form, taken, left, notes)


def _differences(found: DrafterConfig, wanted: DrafterConfig) -> list[str]:
    """Both values of all that must be equal, and the key that sets ours."""
    return [
        f"{field.name} is {getattr(found, field.name)}; this run has {getattr(wanted, field.name)} "
        f"({_MEND.get(field.name, 'by the target')})"
        for field in fields(DrafterConfig)
        if field.name not in (*_ITS_OWN, "max_position_embeddings", "sliding_window")
        and getattr(found, field.name) != getattr(wanted, field.name)
    ]


def _take(found: Published, drafter: Drafter, head: TargetHead, notes: list[str]) -> tuple[list[str], dict[str, str]]:
    """Load the folder's tensors into the drafter; returns the names taken, and those left with the reason."""
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    state: dict[str, Tensor] = {}
    left: dict[str, str] = {}
    faults: list[str] = []
    for file_name, tensor in found.tensors():
        name = canonical(file_name)
        if name in _REPEATED:
            left[file_name] = "the target's is used" + _difference(name, tensor, head)
        elif name not in shapes:
            faults.append(f"tensor {file_name} {list(tensor.shape)}: this drafter has no place for it")
        elif tuple(tensor.shape) != shapes[name]:
            faults.append(f"tensor {file_name} has shape {list(tensor.shape)}; this run has {list(shapes[name])}")
        else:
            state[name] = tensor
    taken = [name for name in shapes if name in state]
    if drafter.config.draft_vocab_size == drafter.config.vocab_size:
        _complete_whole_vocabulary(state, drafter.config.vocab_size, head, notes)
    elif "d2t" in state and "t2d" not in state:
        flags = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
        targets = state["d2t"].long() + torch.arange(len(state["d2t"]))
        inside = (targets >= 0) & (targets < len(flags))
        state["t2d"] = flags.index_fill(0, targets[inside], True)
    faults += [f"tensor {name} is missing" for name in shapes if name not in state]
    if not faults:
        faults = check_vocabulary(state["d2t"].long(), state["t2d"].bool())
    if faults:
        raise _refused(found.folder, faults)
    drafter.load_state_dict(state)  # copies into fp32 masters
    return taken, left


def _complete_whole_vocabulary(state: dict[str, Tensor], size: int, head: TargetHead, notes: list[str]) -> None:
    """A drafter of the target's whole vocabulary may leave its tables out, and its lm_head to the target."""
    state.setdefault("d2t", torch.zeros(size, dtype=torch.int64))
    state.setdefault("t2d", torch.ones(size, dtype=torch.bool))
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = head.lm_head
        notes.append("it has no lm_head: the target's is taken")


def _difference(name: str, tensor: Tensor, head: TargetHead) -> str:
    """Whether a repeated tensor is the target's, where that can be seen."""
    theirs = {"embed_tokens.weight": head.embedding, "verifier_norm.weight": head.norm}.get(name)
    if theirs is None or torch.equal(tensor, theirs.to(tensor.device, tensor.dtype)):
        return ""
    return ", which differs"


def _refused(folder: Path, faults: list[str]) -> TrainError:
    return TrainError(
        f"{folder} is not the drafter that this run trains:\n  " + "\n  ".join(faults),
        expected="the layers, shapes, vocabulary and aux layers of the recipe, the target and the store",
        cause="a drafter of another target, or recipe keys that were not set to its shape",
        next="set the keys named above to its values, or leave train.start out for a new drafter",
    )
