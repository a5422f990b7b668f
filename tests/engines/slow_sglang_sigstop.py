"""The capture worker stopped for six minutes in mid-capture: longer than SGLang's own watchdog (300 s) would allow a
forward pass to wait for it. Run by `make test-sigstop`; test_sglang_capture.py does the same for 25 s."""

from pathlib import Path

import pytest
from test_sglang_capture import captured, run, stop_and_go_on  # noqa: F401  fixtures

from eyas.run import Run


@pytest.mark.timeout(1800)
def test_six_minutes(run: Run, captured: Path) -> None:  # noqa: F811
    stop_and_go_on(run, captured, 360)
