"""A run whose drafter was measured, tuned and put on a curve by the code that does it; the engine is played.

Training, capture, replay, reference decoding and all arithmetic are real. What a server would say is made up: rates by
set and number of streams, and for parity what reference decoding answers, right or with something wrong.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from helpers_capture import make_run
from test_serving_parity import PROMPTS, SETTINGS, greedy, play
from test_serving_tune import DRAFTS, Pretended, choices

from eyas import fs
from eyas.engine.state import ServerState
from eyas.evaluate import parity, tune
from eyas.evaluate.ask import Answer
from eyas.evaluate.bench import Bench
from eyas.evaluate.load import Load, Pass
from eyas.evaluate.prompts import PromptSets
from eyas.evaluate.tuned import Tuned
from eyas.run import Run
from eyas.signals import Stop
from eyas.stages import run_stage
from eyas.target import load_target

# Set -> speed-up with one stream, share of drafts that are accepted.
SETS = {"mt_bench": (1.2, 0.4), "gsm8k": (1.6, 0.7), "humaneval": (1.9, 0.8), "alpaca <b>": (0.9, 0.3)}
STREAMS, REPEATS, DRAFTED = [1, 16], 3, 3


def trained_run(folder: Path, target: Path) -> Run:
    """A run with an exported drafter; its held-out prompts are of four sources."""
    names = itertools.cycle(name for name in SETS for _ in range(2))
    samples = [
        dataclasses.replace(sample, source=f"{name}/kind") for sample, name in zip(greedy(target), names, strict=False)
    ]
    run = make_run(folder, target, samples, overrides=[*SETTINGS, f"serving.concurrency={STREAMS}"])
    manifest = json.loads((run.tokens_dir / "manifest.json").read_text())
    counts = {"read": 4, "kept": 4, "tokens": 182, "supervised_tokens": 158, "rejected": {}}
    fs.write_json(run.tokens_dir / "manifest.json", manifest | {"by_source": {f"{name}/kind": counts for name in SETS}})
    for stage in ("capture", "verify", "train", "evaluate", "export"):
        run_stage(run, stage)
    return run


class _Engine:
    """Plays the servers of one measurement."""

    def __init__(self, run: Run, wrong: dict[str, Any], differing: int) -> None:
        self.exchanges, self.told = play(run, load_target(run.recipe.target), **wrong)
        self.differing, self.chance, self.started = differing, np.random.default_rng(0), 0

    def start(self, run: Run, *, stop: Stop) -> ServerState:
        command = [run.recipe.engine.python or "/opt/vllm/bin/python", "-m", "vllm", *run.recipe.engine.args]
        self.started += 1
        files = dict.fromkeys(("url", "ring", "log", "events", "plugin"), "")
        told = {"version": "0.32.0", "profile": "serving", "device": "cuda", "aux_layer_ids": [], "settings": {}}
        return ServerState(port=1, command=command, mark=run.engine_folder, pid=self.started, **files, **told)

    def asked(self, drafted: bool, name: str, load: Load) -> Pass:
        done = Pass(busy=0.1)
        if name == parity.SET:
            self._fill(done, [(each.prompt, each.answer) for each in self.exchanges], 1.0)
            for prompt in list(done.answers)[: 0 if drafted else self.differing]:
                (answer,) = done.answers[prompt]
                other = [*answer.token_ids[:3], answer.token_ids[3] ^ 1, *answer.token_ids[4:]]
                done.answers[prompt] = [dataclasses.replace(answer, token_ids=other)]
            done.acceptance = self.told.acceptance if drafted else None
            return done
        speedup, share = SETS[name]
        factor = 1 + (speedup - 1) / (1 if load.streams == 1 else 2) if drafted else 1.0
        seconds = 4 * (1 + 0.02 * self.chance.standard_normal()) / factor
        answers = [([7, 8], [10 + at] * 40) for at in range(load.prompts)]
        self._fill(done, answers, seconds)
        if drafted:
            done.acceptance = parity.Acceptance(
                200, np.array([200 * share ** (at + 1) for at in range(DRAFTED)], np.int64)
            )
        return done

    def _fill(self, done: Pass, exchanged: list[tuple[list[int], list[int]]], seconds: float) -> None:
        for at, (prompt, token_ids) in enumerate(exchanged):
            done.prompts[str(at)] = [prompt]
            done.answers[str(at)] = [Answer(token_ids, True, 0.02 + at / 1000, seconds, None)]
        done.wall_s = seconds


def measure(run: Run, wrong: dict[str, Any] | None = None, differing: int = 0, **table: Any) -> Run:
    """Run the serving stage. Raises: VerificationFailed as it does, with serving.json written.

    Args:
        wrong: what the engine has wrong, as test_serving_parity.play takes it.
        differing: parity answers that are others without the drafter.
        table: keys of [serving].
    """
    given = {"repeats": REPEATS, "servers": 2, "parity_prompts": PROMPTS} | table
    serving = run.recipe.serving.model_copy(update=given)
    evaluate = run.recipe.evaluate.model_copy(update={"decode_prompts": PROMPTS})
    changed = dataclasses.replace(run, recipe=run.recipe.model_copy(update={"serving": serving, "evaluate": evaluate}))
    engine = _Engine(changed, wrong or {}, differing)

    async def asked(bench: Bench, state: Any, sets: PromptSets, name: str, load: Load, heat: float) -> Pass:
        return engine.asked(state.mark.endswith("/with"), name, load)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.evaluate.pool.start_server", engine.start)
        patch.setattr("eyas.evaluate.pool.stop_server", lambda run: [])
        patch.setattr(ServerState, "alive", lambda state: True)
        patch.setattr(Bench, "_pass", asked)
        run_stage(changed, "serving", redo=True)
    return changed


def tuned(run: Run, rates: dict[str, float], broken: tuple[str, ...] = ()) -> Tuned:
    """Run `eyas tune` on servers of known rates (test_serving_tune.Pretended)."""
    world = Pretended(rates, broken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.evaluate.pool.start_server", lambda run, *, stop: world.start(run))
        patch.setattr("eyas.evaluate.pool.stop_server", lambda run: [])
        patch.setattr(tune, "load_state", lambda run: None)
        patch.setattr(Bench, "warm_up", lambda *_: True)
        patch.setattr(
            Bench,
            "measure",
            lambda bench, state, *_: type("Done", (), {"figures": lambda _: world.figures(state.text)})(),
        )
        made = choices(run.dir, DRAFTS)
        return tune.tune(run, made, minutes=1e6, streams=1, most=99, stop=Stop())


def write_curve(run: Run) -> None:
    """bench/shape.json, by the benchmark that makes it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import serving_sglang

    class Dummy(serving_sglang.Dummy):
        """A server whose speed-up is half of what its acceptance length adds."""

        def __init__(self, arguments: Any, work: Path, length: float) -> None:
            self.length, self.at = length, 0

        def start(self) -> None: ...

        def rate(self, streams: int, salt: str) -> float:
            self.at += 1
            noise = 1 + 0.02 * (self.at % 3 - 1)
            return 100 * streams * noise * (1 + (self.length - 1) / (2 if streams == 1 else 5) if self.length else 1)

        def stop(self) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving_sglang, "Dummy", Dummy)
        figures = serving_sglang.shape_part(argparse.Namespace(run=run.dir, repeats=3, new_tokens=128))
    fs.write_json(run.dir / "bench" / "shape.json", figures | {"part_s": 1.0, **serving_sglang.machine_facts()})
