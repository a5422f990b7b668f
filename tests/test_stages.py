"""The rule that all stages follow: skip what a record proves, refuse what changed, note what failed."""

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from helpers_export import make_recipe

from eyas import stages
from eyas.errors import Busy, DataError, EngineError, EyasError, Interrupted, RecipeError, StoreFull
from eyas.record import Inputs, load_record
from eyas.run import Run, open_run
from eyas.stages import Result, last_error, run_all, run_stage

NAMES = ["first", "second", "third"]


class FakeStage(ModuleType):
    """A stage that writes one file and counts its executions."""

    def __init__(self, name: str) -> None:
        super().__init__(f"fake_stage_{name}")
        self.short, self.executed, self.output = name, 0, "same"
        self.fails: Callable[[], BaseException] | None = None
        self.pairs: Inputs = {"lr": 1}
        self.record_was_there: bool | None = None

    def inputs(self, run: Run) -> Inputs:
        return self.pairs

    def execute(self, run: Run) -> Result:
        self.executed += 1
        self.record_was_there = load_record(run.dir, self.short) is not None
        if self.fails:
            raise self.fails()
        (run.dir / f"{self.short}.out").write_text("made")
        return Result(f"{self.short} {self.output}", {"made": self.executed})

    def discard(self, run: Run) -> None:
        assert load_record(run.dir, self.short) is None, "the record must go first"
        (run.dir / f"{self.short}.out").unlink(missing_ok=True)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeStage]:
    made = {name: FakeStage(name) for name in NAMES}
    for fake in made.values():
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(stages, "STAGES", {name: fake.__name__ for name, fake in made.items()})
    return made


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_run(make_recipe(tmp_path, tmp_path / "target"))


def test_all_stages_run_once_and_are_skipped_after(
    run: Run, fakes: dict[str, FakeStage], capsys: pytest.CaptureFixture[str]
) -> None:
    first = run_all(run)
    assert [record.stage for record in first.values()] == NAMES
    assert all(fake.record_was_there is False for fake in fakes.values())
    assert (run.dir / "recipe.toml").is_file()
    capsys.readouterr()
    assert run_all(run) == first
    told = capsys.readouterr().err
    assert told.count("done already") == 3 and first["first"].finished in told
    assert [fake.executed for fake in fakes.values()] == [1, 1, 1]


def test_the_output_of_the_stage_before_is_an_input(run: Run, fakes: dict[str, FakeStage]) -> None:
    records = run_all(run)
    assert records["second"].inputs == {"lr": 1, "output of first": "first same"}
    assert "output of first" not in records["third"].inputs


def test_a_changed_input_is_refused_with_the_way_on(run: Run, fakes: dict[str, FakeStage]) -> None:
    run_all(run)
    fakes["second"].pairs = {"lr": 2}
    with pytest.raises(RecipeError, match="second is finished in .*, but lr was 1 and is now 2") as caught:
        run_all(run)
    assert caught.value.exit_code == 2 and caught.value.next.startswith(f"eyas run {run.arguments} --redo second")
    assert [fake.executed for fake in fakes.values()] == [1, 1, 1]


def test_what_has_to_pass_before_a_stage_is_asked_when_it_is_executed_and_not_when_it_is_skipped(
    run: Run, fakes: dict[str, FakeStage]
) -> None:
    asked: list[list[int]] = []

    def refuse(asking: Run) -> None:
        asked.append([fake.executed for fake in fakes.values()])
        raise EngineError("another release")

    with pytest.raises(EngineError, match="another release"):
        run_all(run, before={"third": refuse})
    assert asked == [[1, 1, 0]], "after the stages before it, and it was not executed"
    run_all(run)
    run_all(run, before={"third": refuse})
    with pytest.raises(EngineError, match="another release"):
        run_all(run, redo="second", before={"third": refuse})
    assert asked == [[1, 1, 0], [1, 2, 1]]


def test_redo_does_a_stage_and_all_after_it(run: Run, fakes: dict[str, FakeStage]) -> None:
    run_all(run)
    fakes["second"].pairs = {"lr": 2}
    run_all(run, redo="second")
    assert [fake.executed for fake in fakes.values()] == [1, 2, 2]
    run_all(run)
    assert [fake.executed for fake in fakes.values()] == [1, 2, 2]


def test_redo_of_one_stage_with_another_result_is_seen_by_the_next(run: Run, fakes: dict[str, FakeStage]) -> None:
    run_all(run)
    fakes["first"].output = "other"
    run_stage(run, "first", redo=True)
    with pytest.raises(RecipeError, match='output of first was "first same" and is now "first other"'):
        run_stage(run, "second")


def test_a_stage_without_the_one_before_is_refused(run: Run, fakes: dict[str, FakeStage]) -> None:
    with pytest.raises(RecipeError, match="the stage before it, first, is not finished") as caught:
        run_stage(run, "second")
    assert "eyas run" in caught.value.next


def test_a_failed_redo_leaves_no_record_and_no_output(run: Run, fakes: dict[str, FakeStage]) -> None:
    run_all(run)
    fakes["second"].fails = lambda: DataError("line 7 is not JSON")
    with pytest.raises(DataError):
        run_stage(run, "second", redo=True)
    assert load_record(run.dir, "second") is None and not (run.dir / "second.out").exists()
    fakes["second"].fails = None
    run_all(run)  # goes on from there; the third stage's input is as it was
    assert [fake.executed for fake in fakes.values()] == [1, 3, 1]


def test_an_error_is_noted_for_status(run: Run, fakes: dict[str, FakeStage]) -> None:
    fakes["first"].fails = lambda: DataError("line 7 is not JSON", next="mend it")
    with pytest.raises(DataError):
        run_all(run)
    error = last_error(run)
    assert error is not None
    assert (error["stage"], error["error"]) == ("first", "line 7 is not JSON\nnext: mend it")


def test_two_processes_are_not_at_one_run(run: Run, fakes: dict[str, FakeStage]) -> None:
    run_stage(run, "first")
    held = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", held, run.dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"1\n"
        for redo, name in ((True, "first"), (False, "second")):
            with pytest.raises(Busy, match="another process is at a stage of this run"):
                run_stage(run, name, redo=redo)
        assert run_stage(run, "first").counts == {"made": 1}  # what is done needs nobody to itself
        assert last_error(run) is None and (run.dir / "first.out").is_file()
        other.communicate(b"\n")
    assert run_stage(run, "second").counts == {"made": 1}


def test_an_interruption_is_no_error(run: Run, fakes: dict[str, FakeStage]) -> None:
    fakes["first"].fails = lambda: Interrupted(signal.SIGTERM, "saved at step 3", next="run again")
    with pytest.raises(Interrupted) as caught:
        run_all(run)
    assert caught.value.exit_code == 143 and last_error(run) is None and load_record(run.dir, "first") is None


@pytest.mark.parametrize(
    ("code", "kind", "cause"),
    [
        (errno.ENOSPC, StoreFull, "the disk is full"),
        (errno.EDQUOT, StoreFull, "the disk quota is used up"),
        (errno.EROFS, EyasError, "the file system is read-only"),
        (errno.EACCES, EyasError, "permission denied"),
        (errno.EMFILE, EyasError, "too many open files"),
    ],
)
def test_what_the_disk_says_becomes_the_users_words(
    run: Run, fakes: dict[str, FakeStage], code: int, kind: type[EyasError], cause: str
) -> None:
    fakes["second"].fails = lambda: OSError(code, "what the kernel says", "/runs/x/file")
    with pytest.raises(kind) as caught:
        run_all(run)
    told = caught.value
    assert type(told) is kind and told.exit_code == 1
    assert told.seen == "/runs/x/file: what the kernel says" and told.cause == cause and told.next
    assert isinstance(told.__cause__, OSError)
    assert load_record(run.dir, "first") is not None and load_record(run.dir, "second") is None
    error = last_error(run)
    assert error is not None and cause in error["error"]


def test_other_os_errors_are_bugs_and_pass(run: Run, fakes: dict[str, FakeStage]) -> None:
    fakes["first"].fails = lambda: FileNotFoundError(errno.ENOENT, "No such file", "x")
    with pytest.raises(FileNotFoundError):
        run_all(run)
    assert last_error(run) is None


def test_a_disk_too_full_to_note_the_error_says_so(
    run: Run, fakes: dict[str, FakeStage], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eyas import fs

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(run.dir))

    monkeypatch.setattr(fs, "pwrite_all", full)
    with pytest.raises(StoreFull, match="No space left on device"):
        run_all(run)
    assert "this error could not be noted" in capsys.readouterr().err
    assert not list(run.dir.rglob("*.json")) and not list(run.dir.rglob(".partial-*"))


def test_stages_have_what_the_rule_needs() -> None:
    import importlib

    for name, module in stages.STAGES.items():
        stage = importlib.import_module(module)
        assert callable(stage.inputs) and callable(stage.execute), name
