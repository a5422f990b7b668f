"""The tap in vLLM: a KV connector beside the official `extract_hidden_states` method, rows going into the ring.

vLLM runs a drafter that drafts nothing: it puts the auxiliary states of each step into a KV cache of their own, one
slot a token, and vLLM's connector, of which this is a subclass, writes a prompt's slots to a file when the request has
ended. Here the rows of each step are taken when it is over instead, before the request is answered, so that a prompt
that is prefilled in chunks comes in pieces, and no file is made.

  scheduler's process   `build_connector_meta(scheduler_output)`, before a step: which rows of which requests it
                        computes, and the blocks that they lie in. A request that starts, or starts again after it was
                        preempted, counts from its first row: what is there from a cached prefix lies in its blocks too.
  each worker           `save_kv_layer`: the step's states have been cached; `wait_for_save`, after target and drafter:
                        rows are read from the cache and sent.

Asked for are the three auxiliary layers and, as a fourth, the stream after the last layer. vLLM gives that before the
final norm; the norm is applied here, in float32, with the checkpoint's own weight.

What vLLM gives to a connector, and where, was read in 0.27.0 to 0.33.0 (`distributed/kv_transfer/kv_connector/v1/
example_hidden_states_connector.py`, `v1/worker/gpu_model_runner.py`, `v1/worker/gpu/model_runner.py`): the same in all.
A request is captured if its `kv_transfer_params` hold `eyas_rid`, the name that its rows are filed under.
"""

import json
import os
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from .block import AUX_LAYERS
from .events import Events, Refused
from .send import Output, Piece, Sender, connect
from .settings import Settings

RID = "eyas_rid"


@dataclass(frozen=True, kw_only=True)
class VLLMSettings(Settings):
    """What vLLM's tap is to do.

    Attributes:
        norm_file, norm_tensor: where the final norm's weight [H] stands in the checkpoint.
        norm_eps: of the final norm.
    """

    norm_file: str
    norm_tensor: str
    norm_eps: float


@dataclass
class Request:
    """A request to be captured, as the scheduler's process knows it.

    Attributes:
        rid: name of its rows.
        blocks: blocks of the hidden states' cache that hold its rows, in order.
    """

    rid: str
    token_ids: list[int]
    blocks: list[int]


class Rows(NamedTuple):
    """Rows of one request that a step computes: positions start..start+len(token_ids), in these blocks from the first
    block of `start` on."""

    rid: str
    start: int
    token_ids: list[int]
    blocks: list[int]


@dataclass
class Step(KVConnectorMetadata):
    """What the scheduler's process tells the workers about a step."""

    rows: list[Rows] = field(default_factory=list)


class EyasConnector(ExampleHiddenStatesConnector):
    """Made in the scheduler's process and in each worker; which methods are called depends on that."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = VLLMSettings(**json.loads(Path(os.environ["EYAS_TAP"]).read_text()))
        self._events = Events(self._settings.events)
        self._requests: dict[str, Request] = {}
        self._sender: Sender | None = None
        self._norm = torch.empty(0)
        self._cached = self._fired = False

    @property
    def requires_kv_delivery(self) -> bool:
        """Rows go with their step: a request that has ended leaves nothing to be handed over."""
        return False

    # In the scheduler's process.

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step, starts = Step(), {}
        for new in scheduler_output.scheduled_new_reqs:
            rid = _rid(new.sampling_params)
            if rid:
                blocks = list(new.block_ids[self._cache_kv_group_id])
                self._requests[new.req_id] = Request(rid, list(new.prompt_token_ids or ()), blocks)
                starts[new.req_id] = (0, new.num_computed_tokens)
        going_on = scheduler_output.scheduled_cached_reqs
        for req_id, added, computed in zip(
            going_on.req_ids, going_on.new_block_ids, going_on.num_computed_tokens, strict=True
        ):
            request = self._requests.get(req_id)
            if request is None:
                continue
            again = req_id in going_on.resumed_req_ids
            if again:
                request.blocks.clear()
            if added is not None:
                request.blocks += added[self._cache_kv_group_id]
            starts[req_id] = (0 if again else computed, computed)
        for req_id, (start, computed) in starts.items():
            request = self._requests[req_id]
            end = min(computed + scheduler_output.num_scheduled_tokens[req_id], len(request.token_ids))
            if start < end:
                first, last = start // self._block_size, -(-end // self._block_size)
                step.rows.append(Rows(request.rid, start, request.token_ids[start:end], request.blocks[first:last]))
        return step

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # In each worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Called once the model is loaded and its caches are made: connect to the ring on the rank that sends.

        Raises: Refused.
        """
        super().register_kv_caches(kv_caches)
        self._events.rank = get_tensor_model_parallel_rank()
        try:
            self._check()
            if self._events.rank == 0:
                self._connect()
        except Refused as refused:
            self._events.refuse(refused)
            raise

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **more: Any) -> None:
        if layer_name in self.cache_layers:
            self._cached = True

    def wait_for_save(self) -> None:
        """Send the rows of the step that is over. What is queued on a GPU reads the cache before the next step writes.

        Raises: Refused where states were not cached in a step that should have been.
        """
        cached, self._cached = self._cached, False
        if self._sender is None or not self.has_connector_metadata():
            return
        rows = self._get_connector_metadata().rows
        if not rows:
            return
        if not cached:
            refused = Refused(
                f"a step with {sum(len(part.token_ids) for part in rows)} rows to be captured cached no states",
                "the extract_hidden_states drafter to run in every step",
                "vLLM leaves it out of steps with a sequence that reaches --max-model-len",
            )
            self._events.refuse(refused)
            raise refused
        if not self._fired:
            self._fired = True
            self._events.write("fired", rows=sum(len(part.token_ids) for part in rows), rid=rows[0].rid)
        self._send(rows)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    @torch.inference_mode()
    def _send(self, rows: list[Rows]) -> None:
        assert self._sender is not None
        slots, pieces, count = [], [], 0
        for part in rows:
            blocks = torch.tensor(part.blocks)[:, None] * self._block_size
            inside = (blocks + torch.arange(self._block_size)).flatten()
            first = part.start % self._block_size
            slots.append(inside[first : first + len(part.token_ids)])
            pieces.append(Piece(part.rid, part.start, len(part.token_ids), count))
            count += len(part.token_ids)
        cache = self._kv_cache
        places = torch.cat(slots)
        if cache.is_cuda:  # from other memory the copy might wait for the GPU
            places = places.pin_memory()
        states = extract_from_kv_cache(cache, places.to(cache.device, non_blocking=True), count)  # [n, 4, H]
        hidden = states.shape[-1]
        final = torch.nn.functional.rms_norm(
            states[:, AUX_LAYERS].float(), (hidden,), self._norm, self._settings.norm_eps
        )
        token_ids = torch.tensor([token for part in rows for token in part.token_ids], dtype=torch.int32)
        self._sender.send(pieces, Output(token_ids, list(states[:, :AUX_LAYERS].unbind(1)), final))

    def _check(self) -> None:
        """Compare what vLLM runs with what Eyas wants."""
        config, wanted = self._vllm_config, self._settings
        model, parallel, scheduler = config.model_config, config.parallel_config, config.scheduler_config
        shape = {"hidden_size": model.get_hidden_size(), "num_hidden_layers": model.get_total_num_hidden_layers()}
        expected = {"hidden_size": wanted.hidden_size, "num_hidden_layers": wanted.num_layers}
        if shape != expected:
            raise Refused(f"vLLM loaded a model with {shape}", f"{expected}", "the server runs another model's folder")
        ids = list(config.speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
        if ids != [*wanted.aux_layer_ids, wanted.num_layers]:
            raise Refused(
                f"vLLM collects at layers {ids}",
                f"{[*wanted.aux_layer_ids, wanted.num_layers]}: the auxiliary layers and the last one",
                "--speculative-config was changed",
            )
        for name in ("pipeline", "data", "prefill_context", "decode_context"):
            size = getattr(parallel, f"{name}_parallel_size")
            if size != 1:
                raise Refused(
                    f"{name}_parallel_size is {size}", "1", "the rows of a prompt would be spread over processes"
                )
        self._events.write(
            "layers",
            passed=ids,
            version=version("vllm"),
            longest_prompt=model.max_model_len - 1,
            chunk_tokens=scheduler.max_num_batched_tokens,
            dtype=str(model.dtype).removeprefix("torch."),
            load_format=str(config.load_config.load_format),
        )

    def _connect(self) -> None:
        device = self._kv_cache.device
        self._sender = connect(self._settings, self._events, device)
        with safe_open(self._settings.norm_file, framework="pt") as handle:
            self._norm = handle.get_tensor(self._settings.norm_tensor).float().to(device)


def _rid(sampling_params: Any) -> str:
    """The name that a request's rows are filed under; "" where it is not to be captured."""
    extra = (sampling_params and sampling_params.extra_args) or {}
    return str((extra.get("kv_transfer_params") or {}).get(RID, ""))
