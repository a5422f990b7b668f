"""Every error that a user can cause or meet.

    EyasError                    exit code 1
      RecipeError                2  the recipe, an option, or a finished stage whose input changed
      DataError                  1  source files, templates, masks, token sets
      TargetError                1  the target model's folder: missing, incomplete, unsupported
      EngineError                1  the engine that runs the target
      Busy                       1  another process is at work on the run
      StoreError                 1  the store of hidden states
        CorruptStore             3  what is stored is not what was written
        ManifestMismatch         1  a store of another target, tokenizer, template or layers
        StoreFull                1  no room: disk, budget or quota
      VerificationFailed         3  `verify` found something
      TrainError                 1
      ExportError                1
      Interrupted                129, 130 or 143, after saving

An error says what was seen, what was expected and from where, the likely cause, and the next command.
Tracebacks are for bugs only: anything that is not an EyasError is one.
"""

import errno


class EyasError(Exception):
    """Something a user can act on.

    Args:
        seen: what was found, with path and values.
        expected: what should have been there and who says so.
        cause: the likely reason.
        next: the command or edit that resolves it, saying what is kept.
    """

    exit_code = 1

    def __init__(self, seen: str, *, expected: str = "", cause: str = "", next: str = "") -> None:
        super().__init__(seen)
        self.seen, self.expected, self.cause, self.next = seen, expected, cause, next

    def __str__(self) -> str:
        parts = [("", self.seen), ("expected: ", self.expected), ("likely cause: ", self.cause), ("next: ", self.next)]
        return "\n".join(f"{label}{text}" for label, text in parts if text)


class RecipeError(EyasError):
    """The recipe, an option on the command line, or a changed input under a finished stage."""

    exit_code = 2


class DataError(EyasError):
    """A source file, chat template, loss mask or token set is not usable."""


class TargetError(EyasError):
    """The target model's folder is missing, incomplete or of an unsupported kind."""


class EngineError(EyasError):
    """The engine that runs the target failed."""


class Busy(EyasError):
    """Another process works on the same run."""


class StoreError(EyasError):
    """The store of hidden states can't be used as asked."""


class CorruptStore(StoreError):
    """What is stored is not what was written."""

    exit_code = 3


class ManifestMismatch(StoreError):
    """The store belongs to another target, tokenizer, template or set of layers."""


class StoreFull(StoreError):
    """No room is left on the disk or in the store's budget."""


class VerificationFailed(EyasError):
    """`verify` found faults; they are listed in the message."""

    exit_code = 3


class TrainError(EyasError):
    """Training can't start or go on."""


class ExportError(EyasError):
    """The drafter can't be written in the form an engine loads."""


class Interrupted(EyasError):
    """A signal stopped the stage after its state was saved (129 SIGHUP, 130 SIGINT, 143 SIGTERM)."""

    def __init__(self, signum: int, seen: str, *, next: str) -> None:
        super().__init__(seen, next=next)
        self.exit_code = 128 + signum


_OS_CAUSES = {
    errno.ENOSPC: ("the disk is full", "free some space, then run the same command: finished work is kept"),
    errno.EDQUOT: ("the disk quota is used up", "raise the quota, then run the same command: finished work is kept"),
    errno.EROFS: ("the file system is read-only", "choose a writable folder: --set runs_dir=DIR"),
    errno.EACCES: ("permission denied", "choose a folder you may write: --set runs_dir=DIR, or mend its permissions"),
    errno.EPERM: ("not permitted", "choose a folder you may write: --set runs_dir=DIR, or mend its permissions"),
    errno.EMFILE: ("too many open files", "raise the limit (`ulimit -n 65536`), then run the same command"),
}


def from_os_error(error: OSError) -> EyasError | None:
    """The user's words for an OSError that no code can prevent (full or read-only disk...), or None if it is a bug."""
    known = _OS_CAUSES.get(error.errno or 0)
    if known is None:
        return None
    cause, next_step = known
    where = error.filename if error.filename is not None else "a file of this run"
    kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else EyasError
    return kind(f"{where}: {error.strerror or cause}", cause=cause, next=next_step)
