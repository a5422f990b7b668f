"""The command line: one command per file; each parses, calls and prints.

Nothing here imports torch at import time, so that `eyas --help` answers at once.
"""

import os
import sys

import typer

from eyas.errors import EyasError, from_os_error

app = typer.Typer(
    name="eyas",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train an EAGLE-3 drafter for a model you serve: capture its hidden states, train, measure, export.",
)


def main() -> None:
    """Console entry: expected errors are printed without a traceback and set the exit code (see errors.py)."""
    from eyas.cli import commands

    commands.register(app)
    try:
        app()
    except EyasError as error:
        fail(error)
    except OSError as error:
        told = from_os_error(error)
        if told is None or os.environ.get("EYAS_TRACEBACK"):
            raise
        fail(told)


def fail(error: EyasError) -> None:
    # In one piece: torchrun starts processes unbuffered, where print writes the end of the line apart, and another
    # process's words came between.
    sys.stderr.write(f"error: {error}\n")
    sys.exit(error.exit_code)
