"""Successive halving over configurations whose rates are known: servers and the clock are pretended."""

import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from helpers_export import make_run

from eyas.engine.choices import Choices, load_choices
from eyas.engine.profile import load_profile
from eyas.errors import EngineError, Interrupted
from eyas.evaluate import tune as module
from eyas.evaluate.tune import tune
from eyas.evaluate.tuned import Tuned
from eyas.run import Run
from eyas.signals import Stop
from eyas.stages import remove_tree

FLAG = "--max-running-requests"


@dataclass
class Living:
    text: str

    def alive(self) -> bool:
        return True


@dataclass
class Passed:
    world: "Pretended"
    text: str

    def figures(self) -> dict[str, Any]:
        return self.world.figures(self.text)


class Pretended:
    """Servers and passes of known rates, drifting from round to round, with noise of 1%.

    Attributes:
        rates: text of a configuration -> tokens/s; others have 100.
        broken: texts of configurations whose server can't be started.
        fail: text -> how many passes it makes before one fails.
        starts: how often each was started.
        asked: names of the servers asked, in order.
        stop_after: passes until a signal comes.
        now, start_s, pass_s: the clock, and what a start and a pass take, seconds.
    """

    def __init__(
        self, rates: dict[str, float], broken: tuple[str, ...] = (), stop_after: int = 0, seed: int = 0
    ) -> None:
        self.rates, self.broken, self.stop_after = rates, broken, stop_after
        self.starts: Counter[str] = Counter()
        self.asked: list[str] = []
        self.random = np.random.default_rng(seed)
        self.now = self.start_s = self.pass_s = 0.0
        self.fail: dict[str, int] = {}
        self.guard = Lock()

    def text(self, run: Run) -> str:
        return load_profile(run.recipe.engine.profile).about.partition("; ")[2]

    def start(self, run: Run) -> Any:
        text = self.text(run)
        with self.guard:  # some start at the same time
            self.starts[text] += 1
            self.now += self.start_s
        if text in self.broken:
            raise EngineError(f"{text} ended by itself")
        return Living(text)

    def figures(self, text: str) -> dict[str, Any]:
        self.now += self.pass_s
        if text in self.fail and self.asked.count(text) >= self.fail[text]:
            raise EngineError(f"http://127.0.0.1: {text} gave no answer")
        self.asked.append(text)
        if self.stop_after and len(self.asked) > self.stop_after:
            raise Interrupted(2, "stopped", next="again")
        drift = 1 - 0.1 * len(self.asked) / 100  # a machine that gets slower all the time
        rate = self.rates.get(text, 100.0) * drift * (1 + 0.01 * self.random.standard_normal())
        told = {"tokens": 1000, "wall_s": 1000 / rate, "first_token_s": {}, "tokens_per_s_per_stream": rate}
        return told | {"accepted_at": [50, 20], "verifications": 100}


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_target: Path) -> Run:
    made = make_run(tmp_path, tiny_target, '[serving]\nkind = "sglang"\nprompts = ["p.jsonl"]\nrepeats = 2')
    (tmp_path / "p.jsonl").write_text('{"id": "0", "prompt": "hello"}\n')
    made.export_dir.mkdir(parents=True)
    (made.export_dir / "config.json").write_text("{}")
    return made


@pytest.fixture
def go(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(
        world: Pretended,
        choices: Choices,
        *,
        minutes: float = 1e6,
        most: int = 99,
        servers: int = 1,
        start_s: float = 0,
        pass_s: float = 0,
        redo: bool = False,
    ) -> Tuned:
        if redo:
            remove_tree(tiny_run.dir / "tune")
        world.start_s, world.pass_s = start_s, pass_s
        monkeypatch.setattr("eyas.evaluate.pool.start_server", lambda run, *, stop: world.start(run))
        monkeypatch.setattr("eyas.evaluate.pool.stop_server", lambda run: [])
        monkeypatch.setattr(module, "load_state", lambda run: None)
        monkeypatch.setattr(module.time, "monotonic", lambda: world.now)
        monkeypatch.setattr(module.Bench, "warm_up", lambda *_: True)
        monkeypatch.setattr(module.Bench, "measure", lambda bench, state, *_: Passed(world, state.text))
        table = tiny_run.recipe.serving.model_copy(update={"servers": servers})
        run = Run(tiny_run.recipe.model_copy(update={"serving": table}), "run")
        return tune(run, choices, minutes=minutes, streams=0, most=most, stop=Stop())

    return start


def choices(tmp_path: Path, text: str) -> Choices:
    path = tmp_path / "own.toml"
    path.write_text('about = "mine"\n' + text)
    return load_choices(str(path))


DRAFTS = "[[choices]]\ndrafter = [{ drafts = 3 }, { drafts = 2 }, { drafts = 4 }, { drafts = 5 }, { drafts = 6 }, "
DRAFTS += '{ drafts = 7 }]\nreason = "r"\n'


def test_the_fastest_wins_and_is_written_with_its_evidence(go: Any, tmp_path: Path) -> None:
    world = Pretended({"drafts 5": 130.0, "drafts 4": 120.0})
    tuned = go(world, choices(tmp_path, DRAFTS))
    assert tuned.best.configuration.text == "drafts 5" and not tuned.evidence["kept_first"]
    profile = load_profile(str(tuned.path))
    assert profile.drafter is not None and profile.drafter.drafts == 5
    listed = profile.evidence["configurations"]
    assert [one["settings"] for one in listed[:2]] == ["drafts 5", "drafts 4"]
    assert listed[0]["of_first"] == pytest.approx(1.3, abs=0.02), "what drifts is taken out"
    assert [one["rounds"] for one in listed[:2]] == [4, 3], "five others, three, two, and the best once more"
    assert next(one["rounds"] for one in listed if one["settings"] == "drafts 3") == 4, "the first with each"
    assert tomllib.loads(tuned.path.read_text())["evidence"]["best"] == "drafts 5"


def test_noise_alone_changes_nothing(go: Any, tmp_path: Path) -> None:
    kept = []
    for seed in range(10):
        world = Pretended({}, seed=seed)
        kept.append(go(world, choices(tmp_path, f"# {seed}\n" + DRAFTS), redo=True).evidence["kept_first"])
    assert sum(kept) >= 9, kept


def test_servers_that_live_together_are_asked_in_turn_and_started_once(go: Any, tmp_path: Path) -> None:
    world = Pretended({"drafts 5": 130.0})
    go(world, choices(tmp_path, DRAFTS), servers=6)
    assert set(world.starts.values()) == {1}
    assert Counter(world.asked[:6]) == Counter(world.asked[6:12]) and len(set(world.asked[:6])) == 6


def test_a_configuration_that_is_up_is_measured_before_another_is_started(go: Any, tmp_path: Path) -> None:
    world = Pretended({"drafts 5": 130.0})
    go(world, choices(tmp_path, DRAFTS))
    assert sum(world.starts.values()) == 6 + 4 + 3 + 2 - 3, "each round begins with the last one's server"


def test_a_call_that_was_stopped_goes_on(go: Any, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        go(Pretended({"drafts 5": 130.0}, stop_after=7), choices(tmp_path, DRAFTS))
    world = Pretended({"drafts 5": 130.0})
    tuned = go(world, choices(tmp_path, DRAFTS))
    whole = Pretended({"drafts 5": 130.0})
    assert tuned.best.configuration.text == "drafts 5"
    assert sum(len(rates) for one in tuned.candidates for rates in one.rounds.values()) == len(world.asked) + 7
    again = go(whole, choices(tmp_path, DRAFTS))
    assert not whole.asked, "all is in the journal"
    assert again.evidence["configurations"] == tuned.evidence["configurations"]


def test_a_journal_that_tells_no_starts_is_gone_on_from(go: Any, tiny_run: Run, tmp_path: Path) -> None:
    first = go(Pretended({"drafts 5": 130.0}), choices(tmp_path, DRAFTS), start_s=20, pass_s=3)
    journal = tiny_run.dir / "tune/journal.jsonl"
    told = journal.read_text()
    journal.write_text(re.sub(r',"start_s":[0-9.]+', "", told))
    assert journal.read_text() != told
    world = Pretended({})
    assert go(world, choices(tmp_path, DRAFTS)).evidence["configurations"] == first.evidence["configurations"]
    assert not world.asked, "all is in the journal"


def test_a_journal_that_tells_a_fault_without_its_time_is_gone_on_from(go: Any, tiny_run: Run, tmp_path: Path) -> None:
    first = go(Pretended({"drafts 5": 130.0}, broken=("drafts 4",)), choices(tmp_path, DRAFTS))
    journal = tiny_run.dir / "tune/journal.jsonl"
    told = journal.read_text()
    journal.write_text(re.sub(r'\{"seen":("[^"]*"),"seconds":[0-9.]+\}', r"\1", told))
    assert journal.read_text() != told
    world = Pretended({})
    assert go(world, choices(tmp_path, DRAFTS)).evidence["configurations"] == first.evidence["configurations"]
    assert not world.asked and not world.starts


def test_the_time_is_kept_and_more_minutes_go_further(go: Any, tmp_path: Path) -> None:
    """One pass takes a minute here."""
    world = Pretended({"drafts 5": 130.0})
    tuned = go(world, choices(tmp_path, DRAFTS), minutes=5, pass_s=60)
    assert len(world.asked) == 6, "the first configuration's pass is made all the same: others are told by it"
    assert {"settings": "drafts 7", "fault": "not tried: the time was over"} in tuned.evidence["configurations"]
    further = Pretended({"drafts 5": 130.0})
    tuned = go(further, choices(tmp_path, DRAFTS), minutes=200, pass_s=60)
    assert tuned.best.configuration.text == "drafts 5" and len(further.asked) > 10


def test_a_start_is_no_part_of_passes_whose_servers_are_up(go: Any, tmp_path: Path) -> None:
    """Six servers start in 120 s of 180; a pass takes 3 s: all are measured, several times."""
    world = Pretended({"drafts 5": 130.0})
    tuned = go(world, choices(tmp_path, DRAFTS), minutes=3, servers=6, start_s=20, pass_s=3)
    assert tuned.evidence["minutes"] <= 3 and len(world.asked) == 20
    assert not any("fault" in one for one in tuned.evidence["configurations"])


def test_a_start_is_a_part_of_passes_whose_server_is_not_up(go: Any, tmp_path: Path) -> None:
    world = Pretended({"drafts 5": 130.0})
    tuned = go(world, choices(tmp_path, DRAFTS), minutes=3, start_s=50, pass_s=1)
    assert sum(world.starts.values()) == 4 and len(world.asked) == 7, "three, and the first: others are told by it"
    assert tuned.evidence["minutes"] == pytest.approx((4 * 50 + 7) / 60, abs=0.01)


def test_what_cannot_be_served_is_left_out_with_its_reason(go: Any, tmp_path: Path) -> None:
    world = Pretended({"drafts 5": 130.0}, broken=("drafts 4",))
    tuned = go(world, choices(tmp_path, DRAFTS))
    assert tuned.best.configuration.text == "drafts 5"
    assert {"settings": "drafts 4", "fault": "drafts 4 ended by itself"} in tuned.evidence["configurations"]
    other = choices(tmp_path, DRAFTS.replace("drafts = 7", "drafts = 8"))
    with pytest.raises(EngineError, match="drafts 3: it can't be served: drafts 3 ended by itself"):
        go(Pretended({"drafts 5": 130.0}, broken=("drafts 3",)), other)
    assert go(Pretended({"drafts 5": 130.0}), other).best.configuration.text == "drafts 5", "the next call tries again"


def test_what_fails_in_a_pass_is_left_out_for_good(go: Any, tmp_path: Path) -> None:
    """Out of memory in its answers, say: another call must not meet it again."""
    world = Pretended({"drafts 5": 130.0, "drafts 4": 150.0})
    world.fail = {"drafts 4": 0}
    tuned = go(world, choices(tmp_path, DRAFTS))
    assert tuned.best.configuration.text == "drafts 5"
    fault = {"settings": "drafts 4", "fault": "http://127.0.0.1: drafts 4 gave no answer"}
    assert fault in tuned.evidence["configurations"]
    again = Pretended({})
    assert go(again, choices(tmp_path, DRAFTS)).evidence["configurations"] == tuned.evidence["configurations"]
    assert not again.asked and not again.starts


def test_a_failing_pass_of_the_first_ends_the_call_and_the_next_tries_again(go: Any, tmp_path: Path) -> None:
    world = Pretended({"drafts 5": 130.0})
    world.fail = {"drafts 3": 1}
    with pytest.raises(EngineError, match="drafts 3: it can't be served: .* gave no answer") as error:
        go(world, choices(tmp_path, DRAFTS))
    assert "eyas tune" in error.value.next and "--redo" not in error.value.next
    assert go(Pretended({"drafts 5": 130.0}), choices(tmp_path, DRAFTS)).best.configuration.text == "drafts 5"


def test_starts_that_fail_take_their_time_too(go: Any, tmp_path: Path) -> None:
    """Each start takes 10 minutes, of 25: two that fail, and the first one's, without which nothing can be told."""
    world = Pretended({}, broken=("drafts 2", "drafts 4", "drafts 5", "drafts 6", "drafts 7"))
    tuned = go(world, choices(tmp_path, DRAFTS), minutes=25, start_s=600, pass_s=60)
    assert sum(world.starts.values()) == 3 and tuned.evidence["minutes"] == pytest.approx(31)
    again = Pretended({})
    assert go(again, choices(tmp_path, DRAFTS), minutes=25).evidence["minutes"] == pytest.approx(31)
    assert not again.asked, "no more is begun by another call either"


def test_a_fault_of_a_later_round_leaves_earlier_ones_as_they_were(go: Any, tmp_path: Path) -> None:
    world = Pretended({"drafts 5": 130.0, "drafts 4": 120.0})
    world.fail = {"drafts 5": 3}  # two repeats a round: in its second
    tuned = go(world, choices(tmp_path, DRAFTS), pass_s=60)
    assert tuned.best.configuration.text == "drafts 4"
    again = Pretended({})
    resumed = go(again, choices(tmp_path, DRAFTS))
    assert not again.asked and resumed.evidence["minutes"] == tuned.evidence["minutes"]
    assert resumed.evidence["configurations"] == tuned.evidence["configurations"]


def test_single_changes_are_put_together(go: Any, tmp_path: Path) -> None:
    text = DRAFTS + f'[[choices]]\nflag = "{FLAG}"\nvalues = ["", "2", "4"]\nreason = "r"\n'
    both = f"drafts 5, {FLAG} 2"
    world = Pretended({"drafts 5": 120.0, f"drafts 3, {FLAG} 2": 110.0, both: 132.0})
    tuned = go(world, choices(tmp_path, text), most=5)
    assert tuned.best.configuration.text == both
    assert f"drafts 5, {FLAG} 4" not in world.starts
