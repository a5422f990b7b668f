"""Imports point down only (the contracts stand in pyproject.toml), and the tap imports nothing of Eyas."""

import ast
import subprocess
import sys
from pathlib import Path

from conftest import ROOT


def test_import_contracts() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "2 kept, 0 broken" in checked.stdout


def test_the_tap_imports_only_torch_the_standard_library_and_its_engine() -> None:
    files = sorted((ROOT / "src/eyas/tap").glob("*.py"))
    assert files
    engines = {"plugin.py": {"sglang"}, "vllm.py": {"vllm", "safetensors"}, "vllm_plugin.py": {"vllm"}}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""] if node.level == 0 else ["torch"]  # relative: within the tap
            else:
                continue
            allowed = sys.stdlib_module_names | {"torch"} | engines.get(path.name, set())
            assert {name.split(".")[0] for name in names} <= allowed, f"{path}: {names}"
