"""What a user sees when something is wrong: one clear error, the promised exit code, no traceback."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from helpers_export import make_recipe

from eyas import cli, fs, stages
from eyas.errors import (
    CorruptStore,
    DataError,
    EngineError,
    ExportError,
    EyasError,
    Interrupted,
    ManifestMismatch,
    RecipeError,
    StoreFull,
    TargetError,
    TrainError,
    VerificationFailed,
)


class Shown:
    """What one call of `eyas` printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Call = Callable[..., Shown]


@pytest.fixture
def eyas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the console entry in this process."""

    def call(*words: object) -> Shown:
        monkeypatch.setattr(sys, "argv", ["eyas", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        code = left.value.code
        return Shown(code if isinstance(code, int) else 0 if code is None else 1, *capsys.readouterr())

    return call


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The only stage, `prepare`, raises what the test sets."""
    fake = ModuleType("fake_failing_stage")
    fake.inputs = lambda run: {}

    def execute(run: object) -> None:
        raise fake.error

    fake.execute = execute
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(stages, "STAGES", {"prepare": fake.__name__})
    return fake


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_recipe(tmp_path, tmp_path / "no-such-target")


CODES = [
    (EyasError("x"), 1),
    (RecipeError("x"), 2),
    (DataError("x"), 1),
    (TargetError("x"), 1),
    (EngineError("x"), 1),
    (CorruptStore("x"), 3),
    (ManifestMismatch("x"), 1),
    (StoreFull("x"), 1),
    (VerificationFailed("x"), 3),
    (TrainError("x"), 1),
    (ExportError("x"), 1),
    (Interrupted(signal.SIGINT, "x", next="y"), 130),
    (Interrupted(signal.SIGTERM, "x", next="y"), 143),
    (OSError(errno.ENOSPC, "No space left on device", "/runs/f"), 1),
    (OSError(errno.EROFS, "Read-only file system", "/runs/f"), 1),
]


@pytest.mark.parametrize(("error", "code"), CODES, ids=[f"{type(error).__name__}-{code}" for error, code in CODES])
def test_exit_codes(eyas: Call, failing: ModuleType, recipe: Path, error: Exception, code: int) -> None:
    failing.error = error
    shown = eyas("run", recipe)
    assert shown.code == code
    assert shown.err.startswith("error: ") and "Traceback" not in shown.err and shown.out == ""


def test_an_error_has_its_four_parts(eyas: Call, failing: ModuleType, recipe: Path) -> None:
    failing.error = DataError("a.jsonl, line 7: cut", expected="one object", cause="a copy", next="mend it")
    lines = eyas("prepare", recipe).err.splitlines()
    assert lines == ["error: a.jsonl, line 7: cut", "expected: one object", "likely cause: a copy", "next: mend it"]


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="pipes that keep writes apart are Linux's")
def test_an_error_is_written_in_one_piece(tmp_path: Path) -> None:
    """As torchrun starts it, unbuffered: the words of several processes go to one file, and lines must stay whole."""
    ours, its = os.pipe2(os.O_DIRECT)  # each write is read by itself
    words = [sys.executable, "-u", "-m", "eyas", "train", str(tmp_path / "no.toml")]
    assert subprocess.run(words, stderr=its).returncode == 2
    os.close(its)
    with os.fdopen(ours, "rb", buffering=0) as pipe:
        told = pipe.read(1 << 16)
        assert told.startswith(b"error: ") and told.endswith(b"\n") and not pipe.read(1 << 16)


def test_a_bug_keeps_its_traceback(failing: ModuleType, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing.error = ZeroDivisionError("a bug")
    monkeypatch.setattr(sys, "argv", ["eyas", "run", str(recipe)])
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_folder_that_can_not_be_made_is_told(
    eyas: Call, recipe: Path, failing: ModuleType, monkeypatch: pytest.MonkeyPatch, code: int, tmp_path: Path
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(code, "what the kernel says", str(folder))

    monkeypatch.setattr(fs, "make_folder", refuse)
    shown = eyas("run", recipe)
    assert shown.code == 1 and "what the kernel says" in shown.err and "next: " in shown.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("run",),
        ("run", "r.toml", "--nonsense"),
        ("run", "r.toml", "--limit", "-1"),
        ("train", "--limit"),
    ],
)
def test_wrong_usage_is_2(eyas: Call, words: tuple[str, ...]) -> None:
    shown = eyas(*words)
    assert shown.code == 2 and "Traceback" not in shown.err and "rror: " in shown.err


def test_recipe_mistakes_are_2_and_make_nothing(eyas: Call, recipe: Path, tmp_path: Path) -> None:
    for words, told in [
        (("run", tmp_path / "none.toml"), "no such recipe"),
        (("run", tmp_path), "no recipe.toml in this folder"),
        (("run", recipe, "--set", "train.lrr=1"), "did you mean `train.lr`?"),
        (("run", recipe, "--set", "train.lr=quick"), "`train.lr`"),
        (("run", recipe, "--redo", "trian"), "no such stage"),
        (("report", recipe), "no such run yet"),
        (("evaluate", recipe), "the stage before it, train, is not finished"),
    ]:
        shown = eyas(*words)
        assert shown.code == 2 and told in shown.err, (words, shown.err)
    made = [path for path in (tmp_path / "runs").rglob("*") if path.is_file() and path.name != "last_error.json"]
    assert made == []


def test_a_missing_target_is_1_and_status_remembers_it(eyas: Call, recipe: Path, tmp_path: Path) -> None:
    shown = eyas("prepare", recipe)
    assert shown.code == 1 and "no-such-target: no such folder" in shown.err and "next: " in shown.err
    status = eyas("status", recipe)
    assert status.code == 0
    assert "prepare    not finished" in status.out and "last error, prepare" in status.out
    assert "no-such-target: no such folder" in status.out and "disk left" in status.out


def test_status_tells_of_the_disk_that_the_store_is_on(eyas: Call, recipe: Path) -> None:
    shown = eyas("status", recipe, "--set", "store.url=/dev/shm/eyas-none").out
    assert shown.count("disk left") == 2 and " at /dev/shm\n" in shown


def test_options_of_verify_that_would_do_nothing_are_refused(eyas: Call, recipe: Path) -> None:
    for words in (("--workers", "2"), ("--redo", "--sample", "0.5"), ("--redo", "--repair")):
        shown = eyas("verify", recipe, *words)
        assert shown.code == 2 and words[0] in shown.err, shown


def test_limit_has_a_run_of_its_own(eyas: Call, recipe: Path, tmp_path: Path) -> None:
    assert f"{tmp_path}/runs/tiny-limit50\n" in eyas("status", recipe, "--limit", "50").out
    assert f"{tmp_path}/runs/tiny\n" in eyas("status", recipe).out
