"""The target through Transformers, in this process.

    id 0              id i                     id n-1
    embeddings -> ... -> [layer i] -> ... -> [layer n-1] -> final norm -> lm_head
                     ^ aux: residual stream entering layer i       ^ final: post-norm

Batches are padded on the right and run without an attention mask: attention is causal, so no real position can see
padding, and attention kernels keep their fast causal path. The padding's own rows are thrown away.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from eyas import checkpoint
from eyas.cpu import number_type
from eyas.errors import EngineError, TargetError
from eyas.settings import Engine as EngineTable
from eyas.target import Target

# What a plain checkpoint holds (I64 and BOOL: old buffers). Everything else is a quantised or packed form.
_PLAIN_DTYPES = ("F64", "F32", "BF16", "F16", "I64", "BOOL")


@dataclass(frozen=True)
class States:
    """Hidden states of one sample, on the engine's device, in the number type that it runs in.

    Attributes:
        aux_hidden_states: [T, 3, H], the residual stream entering each aux layer, in rising order of ids.
        final_hidden_states: [F, H], what lm_head consumes (post-norm), at the F supervised positions.
    """

    aux_hidden_states: Tensor
    final_hidden_states: Tensor


class LocalEngine:
    """Loads the target and runs prefill over batches of token ids.

    Args:
        target: its folder and shape.
        table: dtype (see `local_dtype`) and device.
        aux_layer_ids: three rising ids; i = residual stream after i decoder layers.
    Raises: TargetError where the weights are cut, missing or quantised; EngineError where the device is absent or
        the model's layout is unknown.
    """

    def __init__(self, target: Target, table: EngineTable, aux_layer_ids: Sequence[int]) -> None:
        check_weights(target)
        self.device = find_device(table.device, "engine.device")
        self.vocab_size = target.vocab_size
        self.aux_layer_ids = tuple(aux_layer_ids)
        model = load_model(target, local_dtype(table))
        self.decoder = find_decoder(model.to(self.device), target)

    def states(
        self, token_ids: Sequence[NDArray[np.int32]], loss_masks: Sequence[NDArray[np.bool_]]
    ) -> Iterator[States]:
        """Run one batch; yields the states of each sample in order.

        Args:
            token_ids: int32 [T] each; lengths may differ, the longest sets the width of the batch.
            loss_masks: bool [T] each.
        Raises: EngineError for token ids outside the vocabulary, or where the device's memory is too small.
        """
        lengths = [len(ids) for ids in token_ids]
        padded = np.zeros((len(lengths), max(lengths)), np.int64)
        for row, ids in enumerate(token_ids):
            padded[row, : len(ids)] = ids
        low, high = int(padded.min()), int(padded.max())
        if low < 0 or high >= self.vocab_size:
            raise EngineError(
                f"token id {low if low < 0 else high} in the tokens",
                expected=f"ids of 0 to {self.vocab_size - 1}, the target's vocabulary",
                cause="the tokens were made with another tokenizer",
            )
        aux, final = self._forward(torch.from_numpy(padded).to(self.device))
        for row, (length, mask) in enumerate(zip(lengths, loss_masks, strict=True)):
            supervised = torch.from_numpy(np.flatnonzero(mask)).to(self.device)
            yield States(
                torch.stack([layer[row, :length] for layer in aux], dim=1), final[row].index_select(0, supervised)
            )

    @torch.inference_mode()
    def _forward(self, padded: Tensor) -> tuple[list[Tensor], Tensor]:
        """Aux states, one [B, T, H] per aux layer, and the final state [B, T, H] of a padded batch."""
        with entering(self.decoder.layers, self.aux_layer_ids) as entered:
            try:
                final = self.decoder(input_ids=padded, use_cache=False).last_hidden_state
            except torch.OutOfMemoryError as error:
                raise EngineError(
                    f"{self.device}: out of memory in a batch of {padded.shape[0]} x {padded.shape[1]} tokens",
                    cause=str(error).splitlines()[0],
                    next="lower it: --set capture.batch_tokens=N (or data.max_tokens, if one sample is too long)",
                ) from None
        return [entered[layer_id] for layer_id in self.aux_layer_ids], final


@contextmanager
def entering(layers: nn.ModuleList, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Keep the first argument of each named layer's forward: the residual stream that enters it."""
    entered: dict[int, Tensor] = {}

    def keeper(layer_id: int) -> Any:
        def keep(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            entered[layer_id] = arguments[0] if arguments else named["hidden_states"]

        return keep

    with ExitStack() as stack:
        for layer_id in layer_ids:
            handle = layers[layer_id].register_forward_pre_hook(keeper(layer_id), with_kwargs=True)
            stack.callback(handle.remove)
        yield entered


def local_dtype(table: EngineTable) -> torch.dtype:
    """What the target runs in: engine.dtype, but float32 for bfloat16 on a CPU that is slow in it.

    Raises: as `find_device`.
    """
    return number_type(getattr(torch, table.dtype), find_device(table.device, "engine.device"))


def find_device(name: str, key: str) -> torch.device:
    """`auto` is CUDA where there is one.

    Args:
        key: of the recipe, that says `name`.
    Raises: EngineError for a device that isn't there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise EngineError(f"{key} = {name!r}", expected="auto, cpu, cuda or cuda:N", next=f"mend {key}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineError(
            f"{key} = {name!r}, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices",
            cause="no GPU here, or a torch build without CUDA",
            next=f"--set {key}=auto",
        )
    return device


def check_weights(target: Target) -> None:
    """Read the header of every weight file. Raises TargetError for a cut file and for quantised or packed weights."""
    for path in sorted(set(target.weight_files.values())):
        with checkpoint.opened(path) as handle:
            dtypes = {name: handle.get_slice(name).get_dtype() for name in handle.keys()}  # noqa: SIM118
        for name, dtype in dtypes.items():
            if dtype not in _PLAIN_DTYPES:
                raise TargetError(
                    f"{path}: {name} is {dtype}",
                    expected='float32, bfloat16 or float16 weights: engine.kind = "local" runs no quantised checkpoint',
                    cause="an int8, 4-bit or fp8 form of the model",
                    next="point target.path to the unquantised checkpoint",
                )


def find_decoder(model: Any, target: Target) -> Any:
    """The decoder stack without lm_head: what has `.layers`, `.norm` and returns the post-norm state.

    Raises: EngineError where the model has another layout.
    """
    decoder = model.get_decoder()
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != target.num_layers or norm is None:
        raise EngineError(
            f"{type(model).__name__}: its decoder {type(decoder).__name__} has no `.layers` of {target.num_layers} "
            "decoder layers and `.norm`",
            expected="the layout of Llama, Qwen, Mistral and DeepSeek: embeddings, layers, final norm, lm_head",
            cause="a family whose states Eyas doesn't know how to read",
        )
    return decoder


def load_model(target: Target, dtype: torch.dtype) -> Any:
    """The whole model in eval mode on the CPU, with SDPA attention where the family has it (Transformers' default).
    Every weight must come from the checkpoint."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            target.path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=target.trust_remote_code,
            output_loading_info=True,
        )
    except (ValueError, OSError, ImportError, RuntimeError, SafetensorError) as error:
        raise TargetError(
            f"{target.path}: Transformers can't load {target.architecture}: {error}",
            cause="a config and weights that don't belong together, or code that target.trust_remote_code must allow",
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    missing = sorted(info["missing_keys"])
    if missing:
        raise TargetError(
            f"{target.path}: the weights lack {len(missing)} tensors of {target.architecture}: {missing[0]}...",
            cause="config.json and the weights are of different models, or the weights are incomplete",
            next="fetch the folder again",
        )
    return model.eval()
