"""`eyas --help`: quick, complete, and without torch."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from eyas.cli import app, commands
from eyas.stages import STAGES

EYAS = Path(sys.executable).with_name("eyas")
commands.register(app)
# `eyas evaluate --engine` does the stage `serving`.
STAGE_COMMANDS = [name for name in STAGES if name != "serving"]


def walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command and sub-command with the words that call it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


ALL = dict(walk(typer.main.get_command(app)))


def test_help_answers_in_a_third_of_a_second() -> None:
    # The processor's time, which is the reader's wait on an idle machine: a busy one only stretches the clock's.
    times = []
    for _ in range(12):  # the best of them: the first reads files
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = subprocess.run([EYAS, "--help"], capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert shown.returncode == 0
        if times[-1] < 0.3:
            break
    assert min(times) < 0.3, times
    listed = [line.split()[0] for line in shown.stdout.partition("Commands:")[2].splitlines() if line.strip()]
    assert {"init", "run", *STAGE_COMMANDS, "status", "report"} <= set(listed)


def test_no_help_page_imports_torch() -> None:
    words = [list(path) for path in ALL]
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from eyas.cli import app, commands\n"
        "commands.register(app)\n"
        f"for words in {words}:\n"
        "    assert CliRunner().invoke(app, [*words, '--help']).exit_code == 0, words\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*path, "--help"])
    assert shown.exit_code == 0 and "Usage:" in shown.output
    command = ALL[path]
    assert command.help and command.help.strip().endswith("."), f"{path} has no sentence of help"
    for parameter in command.params:
        if parameter.name != "help":
            assert getattr(parameter, "help", None), f"{' '.join(path)}: {parameter.name} has no help"


@pytest.mark.parametrize("name", ["run", *STAGE_COMMANDS, "status", "report"])
def test_commands_about_a_run_share_their_options(name: str) -> None:
    options = {option for parameter in ALL[(name,)].params for option in parameter.opts}
    assert {"--set", "--limit"} <= options
    assert "--redo" in options or name in ("status", "report")


def test_the_module_is_the_script() -> None:
    script = subprocess.run([EYAS, "--help"], capture_output=True, text=True, timeout=60)
    module = subprocess.run([sys.executable, "-m", "eyas", "--help"], capture_output=True, text=True, timeout=60)
    assert module.returncode == 0
    assert module.stdout.partition("\n\n")[2] == script.stdout.partition("\n\n")[2]
