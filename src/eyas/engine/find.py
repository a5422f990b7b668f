"""Interpreters that hold an inference engine. Engines live in environments of their own and are never imported here."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ENGINES = ("sglang", "vllm")
_PROBE_S = 10
# find_spec as well as the version: metadata alone may be left over from an uninstalled package.
_PROBE = f"""
import importlib.metadata as metadata, importlib.util as util, json
found = {{}}
for name in {ENGINES!r}:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        continue
    if util.find_spec(name) is not None:
        found[name] = version
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python that was asked for engines.

    Attributes:
        path: the executable.
        engines: name -> version of the engines installed there.
        fault: why it couldn't be asked, or "".
    """

    path: Path
    engines: dict[str, str]
    fault: str = ""


def find_interpreters(engine_python: Path | None = None) -> list[Interpreter]:
    """Ask the candidates in order: `engine_python`, $VIRTUAL_ENV, then python3 and python on PATH."""
    candidates = [engine_python] if engine_python else []
    if environment := os.environ.get("VIRTUAL_ENV"):
        candidates.append(Path(environment) / "bin" / "python")
    candidates += [Path(found) for name in ("python3", "python") if (found := shutil.which(name))]
    # Not resolve(): a virtual environment's python is a link to the one it was made from, which has other packages.
    unique = dict.fromkeys(Path(os.path.abspath(path)) for path in candidates)  # noqa: PTH100
    return [probe(path) for path in unique]


def probe(python: Path, env: Mapping[str, str] | None = None) -> Interpreter:
    """Run one interpreter, with `env` where given, and ask which engines it could import; it has 10 s to answer."""
    asking = [str(python), "-c", _PROBE]
    try:
        answer = subprocess.run(asking, capture_output=True, text=True, timeout=_PROBE_S, check=True, env=env)
        return Interpreter(python, dict(json.loads(answer.stdout)))
    except subprocess.TimeoutExpired:
        return Interpreter(python, {}, f"no answer within {_PROBE_S} s")
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        return Interpreter(python, {}, f"exit code {error.returncode}: {last}")
    except OSError as error:
        return Interpreter(python, {}, error.strerror or str(error))
    except ValueError:
        return Interpreter(python, {}, "its answer is not a Python interpreter's")
