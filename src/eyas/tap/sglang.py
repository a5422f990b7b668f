"""Where the tap sits in SGLang: four methods of an unchanged server, wrapped.

`ModelRunner.load_model`: afterwards auxiliary layers are set and read back, before graphs are captured.
`ForwardBatch.init_new(batch, model_runner, ...)`: afterwards the lengths of the prompts are noted on what it returns;
  `batch.reqs[i].origin_input_ids` is there in all versions (0.5.11 forward_batch_info.py:444 to 0.5.23 :958).
`ModelRunner.forward(forward_batch, ...)`: on entry it is noted whose rows the batch holds, from `rids`,
  `extend_seq_lens_cpu` and `extend_prefix_lens_cpu` (0.5.11 :441, :333 to 0.5.23 :636, :669); inside, the batch is
  copied, padded and rewritten.
`LogitsProcessor.forward(input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None, ...)`, called
  within that, gets the states: aux as a list of [rows, H], or (DeepSeek from 0.5.17) packed as [rows, 3H]; its
  signature is the same in 0.5.11 to 0.5.23. What is captured into CUDA graphs, warmed up or tuned calls it outside of
  `ModelRunner.forward`, and is left alone.

0.5.23 collects by itself under --enable-return-aux-hidden-states; then the states are read from what
`ModelRunner.forward` returns: `logits_output.hidden_states` [rows, 3H] and `.last_hidden_states` [rows, H], after the
norm (0.5.23 logits_processor.py:226-235).

Rows are filed by request and position, so chunks, batches and repeated prefills need no special case. Kept are rows of
requests whose id begins with the prefix, of EXTEND and MIXED batches, at positions within their prompt: a mixed batch's
decode tails and what is recomputed of generated tokens lie behind it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .block import AUX_LAYERS
from .events import Events, Refused
from .layers import read_back, set_layers
from .refuse import check_layout
from .send import Output, Piece, Sender, connect
from .settings import Settings

_LENGTHS = "eyas_prompt_lengths"
Aux = list[Tensor] | Tensor


@dataclass(frozen=True, kw_only=True)
class SGLangSettings(Settings):
    """What SGLang's tap is to do.

    Attributes:
        rid_prefix: what ids of requests to be captured begin with.
        official_flag: the server was started with --enable-return-aux-hidden-states.
    """

    rid_prefix: str
    official_flag: bool


class Ranks(NamedTuple):
    """This process's place: in the tensor-parallel group, and in its attention group."""

    tp: int
    attention_tp: int


class Batch(NamedTuple):
    """What is known of a batch when its forward pass begins.

    Attributes:
        pieces: rows to be kept.
        rows: rows of all its requests; padding may follow.
        token_ids: [rows or more].
    """

    pieces: list[Piece]
    rows: int
    token_ids: Tensor


class Tap:
    """The wrappers, and what they share. `ranks` is asked once the model is loaded."""

    def __init__(self, settings: SGLangSettings, version: tuple[int, int, int], ranks: Callable[[], Ranks]) -> None:
        self.settings, self.events = settings, Events(settings.events)
        self._version, self._ranks = version, ranks
        self._sender: Sender | None = None
        self._sends = self._fired = self._checked = False
        self._now = threading.local()

    def after_load(self, runner: Any) -> None:
        """Set the layers of a target model, and connect to the ring on the rank that sends.

        Raises: Refused.
        """
        if runner.is_draft_worker:
            return
        model, ids = runner.model, self.settings.aux_layer_ids
        rank = self._ranks()
        self.events.rank = rank.tp
        self.events.write("weights", model=type(model).__name__)
        self._check_size(runner.model_config)
        check_layout(runner.server_args, self._version, model)
        if not self.settings.official_flag:  # else SGLang sets them, later: read back when the first batch comes
            done = set_layers(model, ids)
            self.events.write("layers", **done._asdict())
        self._sends = rank.attention_tp == 0
        if self._sends:
            self._sender = connect(self.settings, self.events, _device(runner))

    def note_lengths(self, batch: Any, forward_batch: Any) -> None:
        """Keep the lengths of the prompts with the batch that is made of these requests."""
        setattr(forward_batch, _LENGTHS, [len(request.origin_input_ids) for request in batch.reqs or ()])

    def around_forward(
        self, original: Callable[..., Any], runner: Any, forward_batch: Any, *more: Any, **named: Any
    ) -> Any:
        if not self._sends or runner.is_draft_worker:
            return original(runner, forward_batch, *more, **named)
        if self.settings.official_flag and not self._checked:
            read = read_back(runner.model, self.settings.aux_layer_ids)
            self.events.write("layers", setter="--enable-return-aux-hidden-states", passed=[], read=read)
            self._checked = True
        batch = snapshot(forward_batch, self.settings.rid_prefix)
        self._now.batch = None if self.settings.official_flag else batch
        try:
            output = original(runner, forward_batch, *more, **named)
            missed = self._now.batch
        finally:
            self._now.batch = None
        if batch is not None and self.settings.official_flag:
            logits = output.logits_output
            self._take(batch, batch.token_ids, logits.hidden_states, logits.last_hidden_states)
        elif missed is not None:
            raise Refused(
                f"a batch of {missed.rows} rows never came to the logits processor",
                "LogitsProcessor.forward within ModelRunner.forward",
                f"model {type(runner.model).__name__} makes its logits elsewhere",
            )
        return output

    def before_logits(self, token_ids: Tensor, final: Tensor, aux: Aux | None) -> None:
        """Take the states of the batch that is under way, if there is one to be kept."""
        batch = getattr(self._now, "batch", None)
        if batch is not None:
            self._now.batch = None
            self._take(batch, token_ids, aux, final)

    def _take(self, batch: Batch, token_ids: Tensor, aux: Aux | None, final: Tensor | None) -> None:
        output = checked(batch, token_ids, aux, final, self.settings.hidden_size)
        if not self._fired:
            self._fired = True
            self.events.write("fired", rows=batch.rows, rid=batch.pieces[0].rid)
        if self._sender is not None:
            self._sender.send(batch.pieces, output)

    def _check_size(self, config: Any) -> None:
        text = config.hf_text_config
        seen = {"hidden_size": int(config.hidden_size), "num_hidden_layers": int(text.num_hidden_layers)}
        wanted = {"hidden_size": self.settings.hidden_size, "num_hidden_layers": self.settings.num_layers}
        if seen != wanted:
            raise Refused(f"SGLang loaded a model with {seen}", f"{wanted}", "the server runs another model's folder")


def snapshot(forward_batch: Any, prefix: str) -> Batch | None:
    """Whose rows a batch holds, or None where none are to be kept.

    Raises: Refused where the batch doesn't tell.
    """
    rids: Sequence[str] = forward_batch.rids or ()
    if forward_batch.forward_mode.name not in ("EXTEND", "MIXED") or not any(rid.startswith(prefix) for rid in rids):
        return None
    lengths, starts = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    prompts = getattr(forward_batch, _LENGTHS, None)
    if (
        lengths is None
        or starts is None
        or prompts is None
        or not len(rids) == len(lengths) == len(starts) == len(prompts)
    ):
        raise Refused(
            f"a batch of {len(rids)} requests with extents {lengths}, prefixes {starts}, prompts {prompts}",
            "one number for each request",
            "a scheduler that Eyas doesn't know: overlap or a plugin that makes batches of its own",
        )
    pieces, row = [], 0
    for rid, length, start, prompt in zip(rids, map(int, lengths), map(int, starts), prompts, strict=True):
        kept = min(length, prompt - start)
        if kept > 0 and rid.startswith(prefix):
            pieces.append(Piece(rid, start, kept, row))
        row += length
    return Batch(pieces, row, forward_batch.input_ids) if pieces else None


def checked(batch: Batch, token_ids: Tensor, aux: Aux | None, final: Tensor | None, hidden: int) -> Output:
    """What a model gave, if it has the shapes of this batch.

    Raises: Refused.
    """
    layers = list(aux.split(hidden, -1)) if isinstance(aux, Tensor) else list(aux or ())
    states = [*layers, final] if final is not None else layers
    shapes = [tuple(state.shape) for state in states]
    right = all(len(shape) == 2 and shape[0] >= batch.rows and shape[1] == hidden for shape in shapes)
    if aux is None or final is None or len(layers) != AUX_LAYERS or not right or len(token_ids) < batch.rows:
        raise Refused(
            f"a batch of {batch.rows} rows has {len(layers)} auxiliary states and "
            f"{'a' if final is not None else 'no'} final state of shapes {shapes}, and {len(token_ids)} token ids",
            f"{AUX_LAYERS} auxiliary states and a final one of {hidden} values for each row",
            "the model doesn't collect at all three layers (most can't at their last), or spreads rows over ranks",
        )
    return Output(token_ids, aux, final)


def _device(runner: Any) -> torch.device:
    return torch.device("cuda", int(runner.gpu_id)) if runner.device == "cuda" else torch.device(runner.device)
