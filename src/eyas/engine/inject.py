"""The tap's way into an engine that isn't changed: a folder for its PYTHONPATH.

SGLang asks importlib.metadata for entry points of the group `sglang.srt.plugins` and calls what it finds (0.5.11
`plugins/__init__.py:29`, the same up to 0.5.23), vLLM for those of `vllm.general_plugins` (0.27.0 to 0.33.0,
`plugins/__init__.py`); a `*.dist-info` folder on the path is all that it takes to be found.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from eyas import fs, tap

ENTRY_POINTS = """[sglang.srt.plugins]
eyas_tap = eyas_tap.plugin:register
[vllm.general_plugins]
eyas_tap = eyas_tap.vllm_plugin:register
"""
METADATA = "Metadata-Version: 2.1\nName: eyas_tap\nVersion: 0\n"
# SGLang on a CPU without AMX imports this name where it makes a model's RoPE and then computes it with torch
# (0.5.23 `layers/rotary_embedding/base.py:138`).
VLLM_STUB = '''"""Stands in for vLLM's compiled operators, of which SGLang on a CPU imports one and calls none."""


def rotary_embedding(*arguments):
    raise NotImplementedError("eyas: this SGLang calls vLLM's rotary_embedding, which is not here")
'''


def write_plugin(folder: Path, settings: dict[str, Any], *, vllm_stub: bool) -> dict[str, str]:
    """Write a copy of the tap and its settings, so that an upgrade of Eyas never changes a server that runs.

    Args:
        folder: made anew.
        settings: what the engine's part of the tap takes (`Settings` and what tap/sglang.py and tap/vllm.py add).
        vllm_stub: with `write_stub`.
    Returns: what the engine's environment needs: EYAS_TAP, and PYTHONPATH, to which the caller adds what is there.
    """
    shutil.rmtree(folder, ignore_errors=True)
    files = {path.name: path.read_text() for path in Path(tap.__path__[0]).glob("*.py")}
    info = folder / "eyas_tap-0.dist-info"
    texts = {folder / "eyas_tap" / name: text for name, text in files.items()}
    texts |= {info / "METADATA": METADATA, info / "entry_points.txt": ENTRY_POINTS}
    texts[folder / "settings.json"] = json.dumps(settings, indent=1)
    for path, text in texts.items():
        fs.write_atomic(path, text, durable=False)
    if vllm_stub:
        write_stub(folder)
    return {"EYAS_TAP": str(folder / "settings.json"), "PYTHONPATH": str(folder)}


def write_stub(folder: Path) -> None:
    """Add what SGLang on a CPU imports of vLLM, where no vLLM is installed, to a folder on its PYTHONPATH."""
    for name, text in (("__init__.py", ""), ("_custom_ops.py", VLLM_STUB)):
        fs.write_atomic(folder / "vllm" / name, text, durable=False)
