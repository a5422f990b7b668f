"""The entry point that vLLM calls in each of its processes, long before it makes a connector (group
`vllm.general_plugins`, 0.27.0 to 0.33.0 `plugins/__init__.py`): says that the tap's folder was found."""

import json
import multiprocessing
import os
from pathlib import Path

from .events import Events


def register() -> None:
    """Called by vLLM's `load_general_plugins()`. Does nothing without EYAS_TAP."""
    path = os.environ.get("EYAS_TAP")
    if path:
        child = multiprocessing.parent_process() is not None
        events = Events(json.loads(Path(path).read_text())["events"])
        events.write("plugin", role="scheduler" if child else "other")
