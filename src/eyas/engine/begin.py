"""A start: what a server's states depend on, and the ring, plugin folder and process of one, made in this order."""

import contextlib
import os
import random
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from eyas import fs
from eyas.engine import process
from eyas.engine.gpu import gpus, visible
from eyas.engine.inject import write_plugin, write_stub
from eyas.engine.launch import engine_env
from eyas.engine.leftovers import ring_path
from eyas.engine.preflight import Facts
from eyas.engine.state import ServerState, engine_dir, save_state
from eyas.errors import EngineError
from eyas.progress import say
from eyas.run import Run, save_recipe
from eyas.tap.ring import Ring

_PORTS = range(20000, 30000)
_TAP_PATIENCE_S = 30.0


def settings_of(facts: Facts) -> dict[str, Any]:
    """What the states of a server depend on, by the keys that say so."""
    recipe, target, launch = facts.run.recipe, facts.target, facts.launch
    settings: dict[str, Any] = {
        f"{launch.table}.python": launch.python,
        launch.kind.title: launch.version,
        "flags": launch.flags,
    }
    settings |= {f"{launch.table}.host": launch.host, f"{launch.table}.env": launch.env, "target": target.model_digest}
    if launch.tap:
        settings |= {
            "capture.ring_bytes": recipe.capture.ring_bytes,
            "store.encoding": recipe.store.encoding,
            "store.final_encoding": recipe.store.final_encoding,
            "drafter.aux_layer_ids": target.aux_layer_ids(recipe.drafter.aux_layer_ids),
        }
    return settings


def begin(run: Run, facts: Facts) -> ServerState:
    """Start a server and note it: state, ring, plugin folder, process, in this order; a kill at any moment leaves
    nothing that the next command doesn't find."""
    target, launch = facts.target, facts.launch
    folder, token = engine_dir(run), uuid.uuid4().hex[:8]
    fs.make_folder(run.logs_dir)
    fs.make_folder(folder)
    if not (run.dir / "recipe.toml").exists():
        save_recipe(run)
    port = run.recipe.engine.port or free_port(launch.host, launch.table)
    ring = ring_path(run.dir.name, token) if launch.tap else ""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    env = engine_env(launch.python, launch.env)
    state = ServerState(
        engine=launch.kind.name,
        url=f"http://{launch.host}:{port}",
        port=port,
        ring=ring,
        log=str(run.logs_dir / f"engine-{stamp}-{token}.log"),
        events=str(folder / f"events-{token}.jsonl"),
        plugin=str(folder / f"plugin-{token}"),
        command=launch.command(port),
        version=launch.version,
        profile=launch.profile.name,
        device=launch.device,
        aux_layer_ids=target.aux_layer_ids(run.recipe.drafter.aux_layer_ids),
        settings=settings_of(facts),
        mark=f"{folder}:{token}",
        started=time.time(),
        gpu_bytes={} if launch.device == "cpu" else {gpu.uuid: gpu.used_bytes for gpu in visible(gpus(), env)},
    )
    save_state(run, state)
    env |= {process.MARK: state.mark}
    if launch.tap:
        Ring.create(ring, run.recipe.capture.ring_bytes, facts.layout)
        env |= _inject(state, facts, env.get("PYTHONPATH", ""))
    elif _needs_stub(facts):
        write_stub(Path(state.plugin))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [state.plugin, env.get("PYTHONPATH", "")]))
    started = process.launch(state.command, env, Path(state.log))
    state.pid, state.created = started.pid, started.create_time()
    state.layers["process alive"] = round(time.time() - state.started, 2)
    save_state(run, state)
    say(f"serve: {launch.kind.title} {launch.version} started, pid {state.pid}, {state.url}; log: {state.log}")
    return state


def _inject(state: ServerState, facts: Facts, path: str) -> dict[str, str]:
    """Make the plugin folder; returns EYAS_TAP and PYTHONPATH, the folder before what `path` says."""
    target, launch, layout = facts.target, facts.launch, facts.layout
    settings = {
        "ring": state.ring,
        "events": state.events,
        "aux_layer_ids": state.aux_layer_ids,
        "encoding": layout.encoding,
        "final_encoding": layout.final_encoding,
        "hidden_size": target.hidden_size,
        "num_layers": target.num_layers,
        "patience_s": _TAP_PATIENCE_S,
        **launch.tap_settings,
    }
    added = write_plugin(Path(state.plugin), settings, vllm_stub=_needs_stub(facts))
    return added | {"PYTHONPATH": os.pathsep.join(filter(None, [added["PYTHONPATH"], path]))}


def _needs_stub(facts: Facts) -> bool:
    """SGLang on a CPU imports vLLM's operators."""
    return (
        facts.launch.kind.name == "sglang" and facts.launch.device == "cpu" and "vllm" not in facts.interpreter.engines
    )


def free_port(host: str, table: str = "engine") -> int:
    """A port that nobody listens on, below those that the system deals out (from 32768 on Linux): another program's
    connection can't take it meanwhile, and SGLang adds 10000 to it for a port of its own (0.5.14: "SGLANG_GRPC_PORT
    (70927) must be between 1 and 65535")."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind((host, port))
            return port
    raise EngineError(
        f"no free port from {_PORTS.start} to {_PORTS.stop - 1} on {host}",
        cause=f"{table}.host is no address of this machine, or thousands of servers run",
        next=f"name one: --set {table}.port=PORT",
    )
