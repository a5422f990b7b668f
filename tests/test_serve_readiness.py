"""Layers of readiness, each provoked: reached, never reached, died in, spun in; a stand-in server does it on demand."""

import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_serve import stand_in_run
from test_serve_preflight import SMI
from typer.testing import CliRunner

from eyas.cli import app, commands
from eyas.engine import find, process, readiness, server
from eyas.engine.drafting import serving_run
from eyas.engine.server import attach, serving, start_server, stop_server
from eyas.engine.state import ServerState, load_state, save_state
from eyas.engine.status import doctor_lines, server_died, status_lines
from eyas.errors import EngineError, ExportError, Interrupted, RecipeError
from eyas.run import Run
from eyas.signals import Stop

commands.register(app)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_FIRE_PATIENCE_S", 1.0)
    monkeypatch.setattr(readiness, "_SAY_EVERY_S", 2.0)


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[list[Run]]:
    """Runs whose server is stopped whatever happens."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        state = load_state(run)
        if state is not None:
            process.end(state.session, state.mark, 0.2)
            Path(state.ring or "/nowhere").unlink(missing_ok=True)


def gone(state: ServerState) -> None:
    """Nothing of it is left."""
    assert process.members(state.pid, state.mark) == state.members() == []
    assert process.port_holder(state.port) is None
    assert not state.ring or not Path(state.ring).exists()
    assert not Path(state.plugin).exists()


def failing(run: Run, ended: list[Run]) -> tuple[EngineError, ServerState]:
    """The error of a start that fails; by then its server is gone."""
    ended.append(run)
    with pytest.raises(EngineError) as raised:
        start_server(run)
    state = load_state(run)
    assert state is not None and state.stopped
    gone(state)
    return raised.value, state


def test_a_plain_server_from_start_to_stop(
    tmp_path: Path, tiny_target: Path, ended: list[Run], capfd: pytest.CaptureFixture[str]
) -> None:
    run = stand_in_run(tmp_path, tiny_target, profile="serving")
    ended.append(run)
    state = start_server(run)
    assert list(state.layers) == ["process alive", "weights loaded", "listening", "warm"]
    assert list(state.layers.values()) == sorted(state.layers.values())
    assert state.ready and state.ring == "" and "serve: weights loaded (" in capfd.readouterr().err

    assert start_server(run).pid == state.pid  # it runs already
    again = attach(run)
    assert again is not None and again.pid == state.pid
    told = "\n".join(status_lines(run))
    assert f"{state.url}, pid {state.pid}: ready, started" in told and state.log in told
    lines, healthy = doctor_lines(run)
    assert healthy and any(line.startswith(f"process   {state.pid} ") for line in lines)

    lines = stop_server(run)
    assert lines == ["1 processes ended", f"port {state.port} is free"]
    gone(state)
    assert "stopped" in status_lines(run)[0] and attach(run) is None
    with socket.socket() as taken:  # what happens to its port since then is none of its business
        taken.bind(("127.0.0.1", state.port))
        taken.listen()
        assert stop_server(run) == ["its server was stopped before"]


def test_a_dead_servers_session_that_another_has_now_is_left_alone(
    tmp_path: Path, tiny_target: Path, ended: list[Run]
) -> None:
    """After a restart of the machine: server.json says that it lives, its pid is a user's shell."""
    run = stand_in_run(tmp_path, tiny_target, profile="serving")
    state = start_server(run)
    stop_server(run)
    ended.append(run)
    shell = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        save_state(run, replace(state, pid=shell.pid, created=state.created - 86400, family=[], stopped=0.0))
        again = start_server(run)
        assert again.pid != shell.pid and shell.poll() is None
        stop_server(run)
        save_state(run, replace(state, pid=shell.pid, created=state.created - 86400, family=[], stopped=0.0))
        assert stop_server(run) == [f"port {state.port} is free"]
        assert shell.poll() is None
    finally:
        shell.kill()
        shell.wait()


def test_a_server_with_other_settings_is_not_used(tmp_path: Path, tiny_target: Path, ended: list[Run]) -> None:
    run = stand_in_run(tmp_path, tiny_target, profile="serving")
    ended.append(run)
    state = start_server(run)
    other = stand_in_run(tmp_path, tiny_target, "", 'engine.args=["--tp-size", "1"]', profile="serving")
    for call in (attach, start_server):
        with pytest.raises(EngineError, match="with flags \\[\\]") as error:
            call(other)
        assert "--tp-size" in error.value.expected and "eyas serve stop" in error.value.next
    assert state.alive()


def test_capture_takes_no_plain_server(tmp_path: Path, tiny_target: Path) -> None:
    with (
        pytest.raises(RecipeError, match="without the tap"),
        serving(stand_in_run(tmp_path, tiny_target, profile="serving")),
    ):
        pass


@pytest.mark.parametrize("layer", ["plugin loaded", "weights loaded", "listening"])
def test_a_server_that_dies_in_a_layer(tmp_path: Path, tiny_target: Path, ended: list[Run], layer: str) -> None:
    error, state = failing(stand_in_run(tmp_path, tiny_target, f"die at {layer}"), ended)
    assert f"(pid {state.pid}) ended while waiting for: {layer}" in error.seen
    assert "RuntimeError: it broke" in error.seen and state.log in error.seen
    assert "eyas doctor" in error.next


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB", "the GPU's memory is too small"),
        ("[Errno 98] error while attempting to bind: address already in use", "a port is held"),
    ],
)
def test_last_words_are_recognised(tmp_path: Path, tiny_target: Path, ended: list[Run], words: str, cause: str) -> None:
    run = stand_in_run(tmp_path, tiny_target, "die at weights loaded", f"engine.env.LAST_WORDS={words}")
    error, _ = failing(run, ended)
    assert error.cause.startswith(cause) and words in error.cause and error.next


@pytest.mark.parametrize("table", ["engine", "serving"])
def test_what_to_try_next_names_the_servers_own_table(
    tmp_path: Path, tiny_target: Path, ended: list[Run], table: str
) -> None:
    words = "engine.env.LAST_WORDS=bind: address already in use"
    run = stand_in_run(tmp_path, tiny_target, "die at weights loaded", words)
    error, _ = failing(run if table == "engine" else serving_run(run, None), ended)
    assert f"--set {table}.port=0" in error.next


@pytest.mark.parametrize("layer", ["plugin loaded", "weights loaded", "listening", "warm"])
def test_a_layer_without_a_sign_of_work_is_given_up(
    tmp_path: Path, tiny_target: Path, ended: list[Run], layer: str
) -> None:
    began = time.monotonic()
    error, _ = failing(stand_in_run(tmp_path, tiny_target, f"idle at {layer}"), ended)
    assert f"gives no sign of work while waiting for: {layer}" in error.seen
    assert time.monotonic() - began > 3


def test_spinning_is_diagnosed_first_and_given_up_later(
    tmp_path: Path, tiny_target: Path, ended: list[Run], capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    failing(stand_in_run(tmp_path, tiny_target, "spin at listening", "engine.patience_s=2.5"), ended)
    assert time.monotonic() - began > 3 * 2.5
    told = capfd.readouterr().err
    assert told.count("serve: listening: nothing moved for") == 1


def test_work_is_waited_for_and_said(
    tmp_path: Path, tiny_target: Path, ended: list[Run], capfd: pytest.CaptureFixture[str]
) -> None:
    """4.2 s of log lines with a patience of 3 s."""
    run = stand_in_run(tmp_path, tiny_target, "work at weights loaded", profile="serving")
    ended.append(run)
    assert start_server(run).ready
    told = capfd.readouterr().err
    assert "serve: waiting for: weights loaded," in told and "log: step" in told


def test_the_taps_refusal_is_the_cause(tmp_path: Path, tiny_target: Path, ended: list[Run]) -> None:
    error, _ = failing(stand_in_run(tmp_path, tiny_target, "refuse"), ended)
    assert error.cause.startswith("the tap refused this server: SGLang runs with pp_size=2")


@pytest.mark.parametrize(
    ("does", "seen"),
    [
        ("", "answered a request of 8 tokens, but not all their rows"),
        ("refuse requests", "HTTP 400: "),
        ("lose the ring", ".ring: [Errno 2] No such file or directory"),
    ],
)
def test_a_tap_that_never_fires(tmp_path: Path, tiny_target: Path, ended: list[Run], does: str, seen: str) -> None:
    error, state = failing(stand_in_run(tmp_path, tiny_target, does), ended)
    assert "tap fired" not in state.layers and "warm" in state.layers
    assert seen in error.seen and error.next


@pytest.mark.parametrize(
    ("version", "flags"),
    [("0.5.23", '"--tp-size", "2"'), ("0.5.23", '"--skip-server-warmup"'), ("0.5.22", '"--tp-size", "2"')],
)
def test_weights_are_loaded_once_every_rank_says_so(
    tmp_path: Path, tiny_target: Path, ended: list[Run], version: str, flags: str
) -> None:
    """Layers can't be waited for: under 0.5.23's own flag they are read back at the first forward pass, by rank 0."""
    run = stand_in_run(tmp_path, tiny_target, "", f"engine.args=[{flags}]", version=version)
    error, state = failing(run, ended)
    assert list(state.layers) == ["process alive", "plugin loaded", "weights loaded", "listening", "warm"]
    assert "not all their rows came through the tap" in error.seen  # the stand-in sends none
    assert ("--enable-return-aux-hidden-states" in state.command) == (version == "0.5.23")


def test_an_unforeseen_failure_while_starting_ends_what_was_started(
    tmp_path: Path, tiny_target: Path, ended: list[Run]
) -> None:
    run = stand_in_run(tmp_path, tiny_target, "write nonsense")
    ended.append(run)
    with pytest.raises(ValueError, match="Expecting value"):
        start_server(run)
    state = load_state(run)
    assert state is not None and state.pid
    gone(state)


def test_a_start_asks_the_interpreter_once(
    tmp_path: Path, tiny_target: Path, ended: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, probe = [], find.probe
    monkeypatch.setattr(find, "probe", lambda *given: asked.append(given) or probe(*given))
    run = stand_in_run(tmp_path, tiny_target, profile="serving")
    ended.append(run)
    assert start_server(run).ready and len(asked) == 1


def test_only_the_memory_of_gpus_that_the_server_sees_is_compared(
    tmp_path: Path, tiny_target: Path, ended: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may work on the rest of the machine meanwhile."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.format(used=90000, pid=1))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sees = 'engine.env.CUDA_VISIBLE_DEVICES="1"'
    run = stand_in_run(tmp_path, tiny_target, "", "engine.device=cuda", sees, profile="serving")
    ended.append(run)
    assert start_server(run).gpu_bytes == {"GPU-bb": 4 << 20}


def test_the_status_of_a_server_whose_ring_is_gone(tmp_path: Path, tiny_target: Path, ended: list[Run]) -> None:
    run = stand_in_run(tmp_path, tiny_target, profile="serving")
    ended.append(run)
    state = start_server(run)
    save_state(run, replace(state, ring="/dev/shm/eyas-gone.ring"))
    (ring,) = (line for line in status_lines(run) if line.startswith("ring      "))
    assert "No such file" in ring and f"next: eyas serve stop {run.dir}   #" in ring


def test_ctrl_c_while_starting_ends_what_was_started(tmp_path: Path, tiny_target: Path, ended: list[Run]) -> None:
    run, stop = stand_in_run(tmp_path, tiny_target, "idle at weights loaded", "engine.patience_s=60"), Stop()
    ended.append(run)
    threading.Timer(3.0, lambda: setattr(stop, "signum", signal.SIGINT)).start()
    with pytest.raises(Interrupted) as raised:
        start_server(run, stop=stop)
    assert raised.value.exit_code == 130
    state = load_state(run)
    assert state is not None
    gone(state)


def _start(run: Run) -> None:
    os.setsid()
    start_server(run)


def test_a_kill_of_eyas_while_starting_leaves_a_server_that_the_next_command_takes_over(
    tmp_path: Path, tiny_target: Path, ended: list[Run]
) -> None:
    run = stand_in_run(tmp_path, tiny_target, "work at weights loaded", profile="serving")
    ended.append(run)
    starter = multiprocessing.get_context("fork").Process(target=_start, args=(run,))
    starter.start()
    deadline = time.monotonic() + 30
    while (state := load_state(run)) is None or not state.alive():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert starter.pid is not None
    os.kill(starter.pid, signal.SIGKILL)
    starter.join()
    assert state.alive() and not state.ready
    assert f"pid {state.pid}: starting" in status_lines(run)[0]
    taken = start_server(run)
    assert taken.pid == state.pid and taken.ready


def test_a_kill_between_note_and_launch_is_cleared(
    tmp_path: Path, tiny_target: Path, ended: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """server.json is written before the process is there; ring and process are found by what it says."""
    run = stand_in_run(tmp_path, tiny_target, "idle at plugin loaded")
    ended.append(run)

    def killed(command: list[str], env: dict[str, str], log: Path) -> None:
        subprocess.Popen(command, env=env, start_new_session=True).returncode = 0
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(process, "launch", killed)
        start_server(run)
    first = load_state(run)
    assert first is not None and first.pid == 0 and Path(first.ring).exists()
    # A process has no environment for a moment while it is executed.
    deadline = time.monotonic() + 10
    while not process.members(0, first.mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(process.members(0, first.mark)) == 1
    failing(run, ended)
    assert not Path(first.ring).exists() and process.members(0, first.mark) == []


def test_a_server_that_ended_by_itself(tmp_path: Path, tiny_target: Path, ended: list[Run]) -> None:
    run = stand_in_run(tmp_path, tiny_target, profile="serving")
    ended.append(run)
    state = start_server(run)
    os.kill(state.pid, signal.SIGKILL)
    while state.alive():
        time.sleep(0.05)
    assert "ended by itself" in status_lines(run)[0] and attach(run) is None
    error = server_died(run, state)
    assert "SIGKILL" in error.cause and state.log in error.seen
    assert start_server(run).pid != state.pid


def test_commands(tmp_path: Path, tiny_target: Path, ended: list[Run]) -> None:
    run = stand_in_run(tmp_path, tiny_target, profile="serving")
    ended.append(run)

    def eyas(*words: str) -> tuple[int, str]:
        arguments = [str(tmp_path / "recipe.toml"), "--set", "engine.profile=serving"]
        shown = CliRunner().invoke(app, [*words, *arguments], catch_exceptions=False)
        return shown.exit_code, shown.output

    assert "none was started" in eyas("serve", "status")[1]
    assert eyas("doctor")[0] == 0
    assert "ready    http://127.0.0.1:" in eyas("serve", "start")[1]
    assert "ready to roll" in eyas("serve", "logs")[1]
    assert "ready, started" in eyas("serve", "status")[1]
    state = load_state(run)
    assert state is not None
    os.kill(state.pid, signal.SIGSTOP)
    code, told = eyas("doctor")
    assert code == 1 and "a process was stopped (SIGSTOP, or ^Z)" in told and f"kill -CONT {state.pid}" in told
    shown = CliRunner().invoke(app, ["doctor", "--pid", str(state.pid)])
    assert shown.exit_code == 1 and f"kill -CONT {state.pid}" in shown.output
    assert state.alive()  # it ends nothing
    assert "1 processes ended" in eyas("serve", "stop")[1]
    assert "1 of" not in eyas("serve", "stop")[1]


def test_a_server_is_stopped_whatever_became_of_the_recipe(tmp_path: Path, tiny_target: Path, ended: list[Run]) -> None:
    """No drafter is left, the settings are wrong by now, the engine is another: its server.json is enough."""
    run = stand_in_run(tmp_path, tiny_target, profile="serving")
    ended += [run, replace(run, engine_folder="serving")]

    def eyas(*words: str) -> tuple[int, str]:
        shown = CliRunner().invoke(app, words, catch_exceptions=False)
        return shown.exit_code, shown.output

    recipe = str(tmp_path / "recipe.toml")
    for options, one in (
        (["--set", "engine.kind=local"], ended[0]),
        (["--with-drafter", "--set", "serving.top_k=2"], ended[1]),
    ):
        state = start_server(one)
        assert "ready, started" in eyas("serve", "status", recipe, *options)[1]
        assert "ready to roll" in eyas("serve", "logs", recipe, *options)[1]
        assert eyas("doctor", recipe, *options)[0] == 0
        assert "1 processes ended" in eyas("serve", "stop", recipe, *options)[1]
        gone(state)
    with pytest.raises(ExportError, match="no config.json"):
        eyas("serve", "start", recipe, "--with-drafter")


def test_the_state_of_another_version_is_told(tmp_path: Path, tiny_target: Path) -> None:
    run = stand_in_run(tmp_path, tiny_target)
    path = run.dir / "engine" / "server.json"
    path.parent.mkdir(parents=True)
    for text in ('{"pid": 1, "warmth": 3}', "{", "[]"):
        path.write_text(text)
        for call in (start_server, attach, stop_server, status_lines, doctor_lines):
            with pytest.raises(EngineError, match="server.json: ") as error:
                call(run)
            assert error.value.next.endswith(f"rm {path}")


def test_a_local_engine_has_no_server(tmp_path: Path, tiny_target: Path) -> None:
    stand_in_run(tmp_path, tiny_target)
    words = ["serve", "start", str(tmp_path / "recipe.toml"), "--set", "engine.kind=local"]
    with pytest.raises(RecipeError, match="there is no server"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_server_that_another_started_meanwhile_is_left_running(
    tmp_path: Path, tiny_target: Path, ended: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen by nobody at first, and there once the lock is free: it is the other's."""
    run = stand_in_run(tmp_path, tiny_target)
    ended.append(run)
    monkeypatch.setattr(server, "_layers", lambda watched, facts, state, watch: [("listening", watched.listening)])
    starter = multiprocessing.get_context("fork").Process(target=_start, args=(run,))
    starter.start()
    deadline = time.monotonic() + 30
    while not _locked(run):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert load_state(run) is None
    with serving(run) as state:
        assert state.pid
    starter.join()
    assert starter.exitcode == 0 and state.alive()


def _locked(run: Run) -> bool:
    path = run.dir / "engine" / "lock"
    if not path.exists():
        return False
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_who_waits_for_another_start_can_be_stopped(tmp_path: Path, tiny_target: Path, ended: list[Run]) -> None:
    run = stand_in_run(tmp_path, tiny_target, "idle at weights loaded", "engine.patience_s=30")
    ended.append(run)
    starter = multiprocessing.get_context("fork").Process(target=_start, args=(run,))
    starter.start()
    deadline = time.monotonic() + 30
    while (state := load_state(run)) is None or not state.alive():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stop = Stop()
    stop.signum = signal.SIGTERM
    with pytest.raises(Interrupted):
        attach(run, stop=stop)
    assert starter.pid is not None
    os.kill(starter.pid, signal.SIGKILL)
    starter.join()
    assert sys.executable == state.command[0]
