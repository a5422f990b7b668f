"""Interpreters that hold an inference engine. Engines live in environments of their own and are never imported here."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from eyas.engine.launch import engine_env
from eyas.errors import EngineError, RecipeError
from eyas.run import Run
from eyas.tap.releases import RELEASES

_USUAL_PLACES = ("/opt", "/opt/conda/envs", "~", "~/.venvs", "~/miniconda3/envs", "~/.cache/eyas/venvs")
_MOST_PROBES = 20
_PROBE_S = 10
# find_spec as well as the version: metadata alone may be left over from an uninstalled package.
_PROBE = f"""
import importlib.metadata as metadata, importlib.util as util, json
found = {{}}
for name in {tuple(RELEASES)!r}:
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


def probe(python: Path, extra: Mapping[str, str] = MappingProxyType({})) -> Interpreter:
    """Run one interpreter as an engine is run there (`engine_env`), and ask which engines it could import; it has 10 s
    to answer."""
    asking, env = [str(python), "-c", _PROBE], engine_env(python, extra)
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


def find_engine(run: Run) -> Interpreter:
    """engine.python, if it holds engine.kind; else an error that shows where the engines of this machine are.

    Raises: EngineError, RecipeError.
    """
    engine, table = run.recipe.engine, run.engine_table
    name, title = engine.kind, RELEASES[engine.kind].title
    if not engine.python:
        raise RecipeError(
            f"{table}.python is empty",
            expected=f"the interpreter of the environment that holds {title}",
            next=_elsewhere(name, table),
        )
    if "/" not in engine.python:
        python = Path(shutil.which(engine.python) or engine.python)
    else:
        # abspath, not resolve(): a virtual environment's python is a link to the one it was made from.
        python = Path(os.path.abspath(Path(engine.python).expanduser()))  # noqa: PTH100
    found = probe(python, engine.env)
    if found.fault:
        raise EngineError(
            f"{table}.python = {python}: {found.fault}",
            expected="a Python interpreter",
            next=_elsewhere(name, table, python),
        )
    if name not in found.engines:
        holds = ", ".join(f"{other} {version}" for other, version in found.engines.items()) or "no engine"
        path = (
            f" PYTHONPATH of this shell is not passed on: say it in {table}.env." if "PYTHONPATH" in os.environ else ""
        )
        raise EngineError(
            f"{python}: No module named {name} (it holds {holds})",
            expected=f"the interpreter of the environment that {title} is installed in",
            cause=f"another environment's or the system's Python.{path}",
            next=_elsewhere(name, table, python),
        )
    return found


def _elsewhere(name: str, table: str, asked: Path | None = None) -> str:
    """Which release of an engine other interpreters of this machine hold, as the next step."""
    usual = [path for place in _USUAL_PLACES for path in Path(place).expanduser().glob("*/bin/python")]
    places = [*find_interpreters(), *(probe(path) for path in usual[:_MOST_PROBES])]
    holders = {str(other.path): other.engines[name] for other in places if name in other.engines}
    holders.pop(str(asked), None)
    title = RELEASES[name].title
    if not holders:
        return f"no interpreter on PATH or in the usual places holds {title}; name one: --set {table}.python=PATH"
    found = "; ".join(f"{path} holds {title} {version}" for path, version in holders.items())
    return f"--set {table}.python={next(iter(holders))}   ({found})"
