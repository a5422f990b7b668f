"""The entry point that SGLang calls in each of its processes, and the wrapping of its methods.

SGLang only logs what fails in a plugin (0.5.11 plugins/__init__.py:139 and hook_registry.py:166, the same in 0.5.23)
and resolves its own hooks' targets in every process; so the methods are wrapped here, in the processes that run the
model alone, and what goes wrong ends the process. An exception within a scheduler ends the whole server (scheduler.py,
`run_scheduler_process`: SIGQUIT to its parent).
"""

import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .events import Events, Refused
from .refuse import check_version
from .sglang import Ranks, SGLangSettings, Tap


def register() -> None:
    """Called by SGLang's `load_plugins()`. Does nothing without EYAS_TAP."""
    path = os.environ.get("EYAS_TAP")
    if not path:
        return
    try:
        settings = SGLangSettings(**json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"eyas: {path}: {error}") from error
    events = Events(settings.events)
    try:
        with telling(events):
            version = check_version(_version())
            runs_model = _within("run_scheduler_process")
            events.write("plugin", role="scheduler" if runs_model else "other", version=_version())
            if runs_model:
                install(Tap(settings, version, _ranks))
    except Refused as refused:
        raise SystemExit(str(refused)) from refused  # an Exception would only be logged


def install(tap: Tap) -> None:
    """Wrap SGLang's methods; before a ModelRunner is made.

    Raises: Refused where one of them is missing.
    """
    try:
        from sglang.srt.layers.logits_processor import LogitsProcessor
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch
        from sglang.srt.model_executor.model_runner import ModelRunner

        load, forward, logits = ModelRunner.load_model, ModelRunner.forward, LogitsProcessor.forward
        init_new = ForwardBatch.__dict__["init_new"].__func__
    except (ImportError, AttributeError, KeyError) as error:
        raise Refused(
            f"{type(error).__name__}: {error}", "SGLang's methods", "a broken or changed installation"
        ) from error

    @functools.wraps(load)
    def load_model(runner: Any, *more: Any, **named: Any) -> Any:
        result = load(runner, *more, **named)
        with telling(tap.events):
            tap.after_load(runner)
        return result

    @functools.wraps(init_new)
    def new_batch(cls: Any, batch: Any, *more: Any, **named: Any) -> Any:
        made = init_new(cls, batch, *more, **named)
        tap.note_lengths(batch, made)
        return made

    @functools.wraps(forward)
    def run_forward(runner: Any, *more: Any, **named: Any) -> Any:
        with telling(tap.events):
            return tap.around_forward(forward, runner, *more, **named)

    @functools.wraps(logits)
    def make_logits(
        self: Any,
        input_ids: Any,
        hidden_states: Any,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        tap.before_logits(input_ids, hidden_states, aux_hidden_states)
        return logits(self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, *more, **named)

    ModelRunner.load_model, ModelRunner.forward = load_model, run_forward
    ForwardBatch.init_new = classmethod(new_batch)
    if not tap.settings.official_flag:
        LogitsProcessor.forward = make_logits


@contextmanager
def telling(events: Events) -> Iterator[None]:
    """A refusal is told to the outside before it ends the process."""
    try:
        yield
    except Refused as refused:
        events.refuse(refused)
        raise


def _version() -> str:
    import sglang

    return str(sglang.__version__)


def _ranks() -> Ranks:
    """0.5.14 put them into `runtime_context`; before, they are functions (0.5.13 dp_attention.py:326)."""
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        from sglang.srt.distributed import get_tensor_model_parallel_rank
        from sglang.srt.layers.dp_attention import get_attention_tp_rank

        return Ranks(get_tensor_model_parallel_rank(), get_attention_tp_rank())
    parallel = get_parallel()
    return Ranks(parallel.tp_rank, parallel.attn_tp_rank)


def _within(function: str) -> bool:
    """Whether a function of this name is being run."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
