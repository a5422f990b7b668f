"""The serving command of a run as people deploy it: a script, a systemd unit, a Dockerfile."""

import dataclasses
import json
import os
import pwd
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from eyas import fs
from eyas.engine.drafting import Drafting, Kind, find_drafting, serving_kind, serving_run
from eyas.engine.find import find_engine
from eyas.engine.kinds import KINDS
from eyas.engine.launch import Launch
from eyas.run import Run
from eyas.stages import remove_tree
from eyas.target import Target, load_target

_PORTS = {"sglang": 30000, "vllm": 8000}
# The engines' own images on Docker Hub, tagged by release.
_IMAGES = {"sglang": "lmsysorg/sglang:v{}", "vllm": "vllm/vllm-openai:v{}"}
_VLLM = "0.32.0"  # the release that was run here
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SECRET = {"TOKEN", "KEY", "SECRET", "PASSWORD"}
_MODEL, _DRAFTER = Path("/model"), Path("/drafter")


@dataclass(frozen=True)
class Deployment:
    """One engine's serving command in three forms.

    Attributes:
        kind, release: the engine.
        script: for a shell.
        unit: for systemd.
        dockerfile: for `docker build` in the folder that holds the drafter's folder `drafter/`.
    """

    kind: Kind
    release: str
    script: str
    unit: str
    dockerfile: str
    drafter: Path

    @property
    def engine(self) -> str:
        """Its title and release."""
        return f"{KINDS[self.kind].title} {self.release}"

    @property
    def files(self) -> dict[str, str]:
        """Name -> content."""
        return {"serve.sh": self.script, "eyas-drafter.service": self.unit, "Dockerfile": self.dockerfile}

    def write(self, folder: Path) -> None:
        """The files, and a copy of the drafter as `drafter/`, in the place of an earlier one."""
        partial = folder / f"{fs.PARTIAL_PREFIX}drafter"
        remove_tree(partial)
        shutil.copytree(self.drafter, partial)  # makes `folder` too
        for name, content in self.files.items():
            (folder / name).write_text(content, encoding="utf-8")
        (folder / "serve.sh").chmod(0o755)
        remove_tree(folder / "drafter")
        fs.commit_folder(partial, folder / "drafter")


def deployment(run: Run, kind: Kind) -> Deployment:
    """The command with the tuned settings for one engine, with this machine's paths; the image's in the Dockerfile.

    Raises: ExportError where there is no drafter; RecipeError; EngineError where the recipe's interpreter doesn't hold
        its engine.
    """
    run, version = _for_engine(run, kind)
    target, drafting = load_target(run.recipe.target), find_drafting(run)
    launch = _launch(run, drafting, target, version)
    title = f"{KINDS[kind].title} {version}"
    port = run.recipe.serving.port or _PORTS[kind]
    words = launch.command(port)
    inside = _launch(
        run, dataclasses.replace(drafting, folder=_DRAFTER), dataclasses.replace(target, path=_MODEL), version
    )
    return Deployment(
        kind,
        version,
        _script(words, launch.env, title),
        _unit(words, launch.env, f"{run.recipe.name}: {target.path.name} with its EAGLE-3 drafter, {title}"),
        _dockerfile(inside, version, port, target, run),
        drafting.folder,
    )


def _for_engine(run: Run, kind: Kind) -> tuple[Run, str]:
    """The run with [serving] of this engine, and the release: that of the recipe's interpreter, else the one that was
    exported for."""
    recipe, table = run.recipe, run.recipe.serving
    device = "cpu" if recipe.engine.device == "cpu" else "cuda"
    named = (table.kind or recipe.engine.kind) == kind
    python = (table.python or recipe.engine.python) if named else ""
    if not python:
        table = table.model_copy(update={"python": "python3"})
    if not named:  # what the recipe says is for the other engine
        table = table.model_copy(update={"kind": kind, "args": [], "env": {}, "profile": ""})
    engine = recipe.engine.model_copy(update={"device": device})
    run = dataclasses.replace(run, recipe=recipe.model_copy(update={"engine": engine, "serving": table}))
    if python:
        return run, find_engine(serving_run(run, None)).engines[serving_kind(run)]
    return run, (recipe.export.sglang_version or "0.5.23") if kind == "sglang" else _VLLM


def _launch(run: Run, drafting: Drafting, target: Target, version: str) -> Launch:
    serving = serving_run(run, drafting)
    return KINDS[serving.recipe.engine.kind].plan_launch(serving, target, version)


def _parted(env: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """What may be written into a file that goes elsewhere, and a comment that names what may not: by the words of its
    name, a secret."""
    secret = [name for name in env if _SECRET & set(name.upper().split("_"))]
    told = [f"# Not written here, set it yourself (docker run -e, EnvironmentFile=): {', '.join(secret)}"]
    return {name: value for name, value in env.items() if name not in secret}, told if secret else []


def _script(words: list[str], env: dict[str, str], title: str) -> str:
    env, told = _parted(env)
    exports = told + [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    if "/" in words[0]:  # kernels are compiled with the ninja that lies beside the interpreter
        exports.insert(0, f'export PATH={shlex.quote(str(Path(words[0]).parent))}:"$PATH"')
    return "\n".join(["#!/bin/sh", f"# {title}; written by eyas deploy", *exports, f"exec {shlex.join(words)}", ""])


def _unit(words: list[str], env: dict[str, str], about: str) -> str:
    program = ["/usr/bin/env", *words]
    env, told = _parted(env)
    if "/" in words[0]:
        program, env = words, {"PATH": f"{Path(words[0]).parent}:{_PATH}"} | env
    lines = [
        "[Unit]",
        f"Description={about.replace('%', '%%')}",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "Type=exec",
        f"User={_user()}",
        *told,
        *(f"Environment={_systemd(f'{name}={value}', dollar=False)}" for name, value in env.items()),
        f"ExecStart={' '.join(_systemd(word) for word in program)}",
        "Restart=on-failure",
        "RestartSec=10",
        "TimeoutStopSec=60",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=1048576",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]
    return "\n".join(lines)


def _user() -> str:
    """This user's name, or number where it has none, as in containers."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _systemd(word: str, dollar: bool = True) -> str:
    """A word as systemd reads it back: %, $ and quotes mean something to it."""
    text = word.replace("%", "%%")
    text = text.replace("$", "$$") if dollar else text
    if not any(char in text for char in " \t\"'\\;{}"):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _docker(value: str) -> str:
    """A value as ENV reads it back: between quotes $ names a variable."""
    return json.dumps(value, ensure_ascii=False).replace("$", "\\$")


def _dockerfile(launch: Launch, version: str, port: int, target: Target, run: Run) -> str:
    words = ["python3", *launch.command(port)[1:]]
    at = words.index("--host") + 1
    words[at] = "0.0.0.0"
    env, told = _parted(launch.env)
    # Without an address Docker publishes to every network; the server asks for no key.
    host, tag = run.recipe.serving.host.replace("localhost", "127.0.0.1"), run.recipe.name.lower()
    return "\n".join(
        [
            f"# docker build -t {tag} FOLDER   # FOLDER holds this file and the drafter's folder as drafter/",
            f"# docker run --gpus all --ipc=host -p {host}:{port}:{port} -v {target.path}:{_MODEL}:ro {tag}",
            f"FROM {_IMAGES[launch.kind.name].format(version.partition('+')[0])}",
            f"COPY drafter/ {_DRAFTER}/",
            *told,
            *(f"ENV {key}={_docker(value)}" for key, value in env.items()),
            f"EXPOSE {port}",
            f"ENTRYPOINT {json.dumps(words)}",
            "",
        ]
    )
