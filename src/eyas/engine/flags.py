"""A command line as the server's own argument parser reads it, in its own interpreter: nothing is started."""

import difflib
import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.engine.launch import Launch, check_values, engine_env
from eyas.errors import EngineError

_PATIENCE_S = 300  # importing SGLang took 8 s here, 40 s on two busy cores
_ANSWER = "EYAS-FLAGS "
_TELL = f"""
import json, sys

def tell(**told):
    print({_ANSWER!r} + json.dumps(told, default=repr), flush=True)
"""


def read_flags(launch: Launch, port: int, cache: Path | None = None) -> dict[str, Any]:
    """The values of all flags, named as the server's own parser names them.

    Args:
        cache: file in which the last answer is kept: asking takes seconds.
    Raises: EngineError where the engine can't be imported in that interpreter, where it doesn't know a flag or refuses
        a value, and for a value under which states would be wrong.
    """
    key = fs.digest_json([launch.kind.name, launch.python, launch.version, launch.env, launch.flags, launch.host])
    answer = _cached(cache, key) or _ask(launch, launch.arguments(port))
    if cache is not None:
        fs.write_json(cache, {"key": key, "answer": answer})
    if "error" in answer:
        raise EngineError(
            f"{launch.kind.title} {launch.version} refuses its flags: {answer['error']}",
            expected="flags as this release takes them",
            next=f"mend {launch.table}.args; all flags: {_help(launch)}",
        )
    if answer["unknown"]:
        raise _unknown(launch, str(answer["unknown"][0]), answer["known"])
    check_values(answer["values"], launch)
    return dict(answer["values"])


def _cached(cache: Path | None, key: str) -> dict[str, Any] | None:
    if cache is None or not cache.is_file():
        return None
    kept = json.loads(cache.read_text(encoding="utf-8"))
    return kept["answer"] if kept["key"] == key else None


def _ask(launch: Launch, words: Sequence[str]) -> dict[str, Any]:
    try:
        asked = subprocess.run(
            [launch.python, "-c", _TELL + launch.kind.parser, *words],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            env=engine_env(launch.python, launch.env),
        )
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"{launch.python}: {launch.kind.title} was not imported within {_PATIENCE_S} s",
            cause="the environment lies on a slow or network disk",
            next=f"time {launch.python} -c 'import {launch.kind.checked_import}'",
        ) from None
    told = [line for line in asked.stdout.splitlines() if line.startswith(_ANSWER)]
    if not told:
        last = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}, no message"])[-1]
        raise EngineError(
            f"{launch.python}: {launch.kind.title} {launch.version} is installed but can't be imported: {last}",
            expected=f"`import {launch.kind.checked_import}` to work there",
            cause="a library that it needs is missing or of another release",
            next=f"{launch.python} -c 'import {launch.kind.checked_import}'   # shows all of the error",
        )
    return dict(json.loads(told[-1].removeprefix(_ANSWER)))


def _unknown(launch: Launch, word: str, known: Sequence[str]) -> EngineError:
    name = word.partition("=")[0]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    place = next(
        (f"profile {launch.profile.name}" for flag in launch.profile.flags if flag.flag == name),
        f"{launch.table}.args",
    )
    return EngineError(
        f"{launch.kind.title} {launch.version} does not know {word} (in {place})",
        expected=f"a flag of that release{f'; the nearest is {near[0]}' if near else ''}",
        cause="a typing error, or a flag of another release",
        next=f"mend it; all flags: {_help(launch)}",
    )


def _help(launch: Launch) -> str:
    """The command that lists all flags."""
    return shlex.join([launch.python, *launch.kind.entry, "--help=all" if launch.kind.name == "vllm" else "--help"])
