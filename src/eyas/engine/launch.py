"""What is started: one server of one kind of engine, and what tells the kinds apart."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.engine.client import EngineClient
from eyas.engine.profile import Profile
from eyas.errors import EngineError, RecipeError
from eyas.run import Run
from eyas.settings import Engine
from eyas.tap.releases import Release, Releases
from eyas.target import Target


@dataclass(frozen=True)
class Kind:
    """An engine, as those who start, watch and ask its servers need to know it.

    Attributes:
        name: as engine.kind and as its package is named.
        releases: in which what the tap stands on is known.
        entry: words after the interpreter that start a server.
        model_after: the word of a command line after which the model's folder stands.
        wrong_for_capture: values under which a row's states are wrong or missing, as the server's own parser names
            them: what is allowed, why.
        parser: Python that reads sys.argv with that parser and calls tell(values=..., unknown=..., known=...), or
            tell(error=...).
        checked_import: the module that it imports first.
        ranks, stages, memory_share: the parser's names of tensor parallel, pipeline parallel and the share of a GPU.
        loaded_event: of the tap: every rank tells it once its model is loaded, before the first forward pass.
        weights_line, ready_line: what the log says once weights are loaded, and once it is ready for requests.
        client: made of a server's URL and its tap's events file.
        plan_launch: the command of a run's server, of its target and the engine's version.
    """

    name: str
    releases: Releases
    entry: tuple[str, ...]
    model_after: str
    wrong_for_capture: Mapping[str, tuple[Any, str]]
    parser: str
    checked_import: str
    ranks: str
    stages: str
    memory_share: str
    loaded_event: str
    weights_line: str
    ready_line: str
    client: Callable[[str, Path], EngineClient]
    plan_launch: "Callable[[Run, Target, str], Launch]"

    @property
    def title(self) -> str:
        """As it is written."""
        return self.releases.title

    def check_release(self, version: str, table: str) -> Release:
        """The version's three numbers.

        Args:
            table: of the recipe, whose `python` holds it.
        Raises: EngineError outside `releases`.
        """
        release = self.releases.find(version)
        if release is None:
            raise EngineError(
                f"{self.title} {version} in {table}.python",
                expected=f"{self.releases}: where what the tap stands on is known",
                cause="older releases lack some of it, newer ones were not looked at",
                next=f"name an environment with one of those: --set {table}.python=PATH",
            )
        return release

    def model_of(self, command: list[str]) -> str:
        """The model's folder in a command line of this kind."""
        return command[command.index(self.model_after) + 1]


@dataclass(frozen=True)
class Launch:
    """How a server is started.

    Attributes:
        version, release: of the engine in `python`.
        profile: flags and variables with their reasons.
        device: "cpu", "cuda", or "" where the engine finds it.
        flags: all arguments but host and port.
        env: variables on top of `engine_env`, without the tap's.
        tap_settings: what the tap of this kind is told beside what all are.
        cache_bytes: main memory for the KV cache on a CPU, as far as it is set by `env`.
        table: of the recipe, that says all this: engine or serving.
    """

    kind: Kind
    python: str
    version: str
    release: Release
    profile: Profile
    device: str
    host: str
    flags: list[str]
    env: dict[str, str] = field(default_factory=dict)
    tap_settings: dict[str, Any] = field(default_factory=dict)
    cache_bytes: int = 0
    table: str = "engine"

    @property
    def tap(self) -> bool:
        return self.profile.purpose == "capture"

    def command(self, port: int) -> list[str]:
        """All words, as they are executed."""
        return [self.python, *self.kind.entry, *self.arguments(port)]

    def arguments(self, port: int) -> list[str]:
        """The words after `entry`."""
        return [*self.flags, "--host", self.host, "--port", str(port)]


# Flags that neither engine is to be given for capturing: argument -> what says it.
NO_CAPTURE_FLAGS = {"--api-key": "engine.host: only this machine reaches 127.0.0.1, and Eyas sends no key"}


def profile_flags(profile: Profile, kind: str, release: Release) -> list[str]:
    """The profile's flags for one release of one kind of engine, as words."""
    return [word for entry in profile.flags_for(kind, release) for word in (entry.flag, entry.value) if word]


def check_own_flags(own_flags: Mapping[str, str], args: Iterable[str], table: str) -> None:
    """Raises RecipeError for a flag of `args` that a key of the recipe says.

    Args:
        own_flags: argument -> key; `{table}` in it stands for `table`, whose `args` these are.
    """
    for word in args:
        # argparse takes any unique beginning of a flag for the flag; vLLM takes --a_b for --a-b, and --a.key for a key
        # of a JSON value.
        name = word.partition("=")[0].partition(".")[0].replace("_", "-")
        own = next((flag for flag in own_flags if len(name) > 3 and flag.startswith(name)), "")
        if own:
            raise RecipeError(
                f"{table}.args holds {name}",
                expected="flags that no other key of the recipe sets",
                next=f"take it out, and say it with {own_flags[own].format(table=table)}",
            )


def check_values(values: Mapping[str, Any], launch: Launch) -> None:
    """Look at the flags as the server's own parser read them.

    Raises: EngineError for a value under which states would be wrong or rows missing.
    """
    if not launch.tap:
        return
    for name, (allowed, reason) in launch.kind.wrong_for_capture.items():
        # None is a default that the engine fills in later, with what is allowed.
        if name in values and values[name] not in (allowed, None):
            flag = "--" + name.replace("_", "-")
            raise EngineError(
                f"{flag} is {values[name]!r} on this command line",
                expected=f"{allowed!r} while hidden states are captured",
                cause=reason,
                next=f"take {flag} out of engine.args or the profile",
            )


def engine_env(python: str | Path, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine's interpreter: that of this process without what belongs to its own one, then
    `extra`, which the recipe says.

    The engine's bin folder goes first on PATH: kernels are compiled with the `ninja` that lies there.
    """
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    env = {name: value for name, value in os.environ.items() if name not in ours}
    env["PATH"] = f"{Path(python).parent}:{env.get('PATH', os.defpath)}"
    return env | {"PYTHONUNBUFFERED": "1"} | dict(extra)


def has_gpu() -> bool:
    """Whether the kernel shows an accelerator that an engine could take: NVIDIA's or AMD's device files."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()


def server_device(table: Engine) -> str:
    """engine.device as a server takes it: "cpu", "cuda", or "" where the engine finds it.

    Raises: RecipeError.
    """
    if table.device in ("cpu", "cuda"):
        return table.device
    if table.device == "auto":
        return "" if has_gpu() else "cpu"
    raise RecipeError(
        f"engine.device = {table.device!r}",
        expected="auto, cpu or cuda: a server takes several GPUs",
        next='--set engine.device=cuda; which GPUs: engine.env = { CUDA_VISIBLE_DEVICES = "0,1" }',
    )
