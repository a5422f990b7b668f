"""Regeneration against a real vLLM server on CPU, in fp32: the answers are the target's own, whatever is killed.

Run by `make test-engines`, which makes vLLM's environment and names it in EYAS_VLLM_VENV.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_server import VllmServer

from eyas.data.tokens import Tokens

Lines = dict[str, dict[str, Any]]

QUESTIONS = [
    *(f"What is {a} plus {b}? Answer with one number." for a, b in zip(range(2, 14), range(7, 31, 2), strict=True)),
    *(f"Name one {thing}. One word only." for thing in ("fruit", "colour", "animal", "metal", "river", "tree")),
    *(f"Write one short sentence about {thing}." for thing in ("rain", "bread", "trains", "the moon", "chess", "salt")),
    *(f"Say '{word}' and nothing else." for word in ("yes", "hello", "done", "thank you")),
    *(f"Translate '{word}' to French." for word in ("cat", "house", "water", "night", "bread")),
    "List three primes.",
    "Why is the sky blue?",
    "Who wrote Hamlet?",
]
DIALOGUES = [
    ["Hello!", "What did I just say?"],
    ["Name a city in Italy.", "And one in Spain?"],
    ["Say 'one'.", "Now say 'two'.", "And now 'three'."],
    ["What is 6 times 7?", "Add one to it."],
]
COUNT = len(QUESTIONS) + len(DIALOGUES)


@pytest.fixture(scope="module")
def server(demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    venv = os.environ.get("EYAS_VLLM_VENV")
    assert venv, "EYAS_VLLM_VENV is not set: run `make test-engines`"
    server = VllmServer(Path(venv), demo_target, tmp_path_factory.mktemp("vllm") / "vllm.log")
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def make_recipe(folder: Path, target: Path, url: str, **settings: Any) -> Path:
    prompts = [{"prompt": question} for question in QUESTIONS]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    # The answers that stand in these were written by nobody: every one must be written anew.
    turns = [
        [{"role": role, "content": text} for q in talk for role, text in (("user", q), ("assistant", "?"))]
        for talk in DIALOGUES
    ]
    (folder / "dialogues.jsonl").write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    values = {"servers": [url], "temperature": 0, "max_new_tokens": 24, "in_flight": 8} | settings
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f'runs_dir = "{folder / "runs"}"\n[target]\npath = "{target}"\n[[data.sources]]\npath = "questions.jsonl"\n'
        '[[data.sources]]\npath = "dialogues.jsonl"\nname = "dialogues"\n[data]\nmax_tokens = 400\n[regenerate]\n'
        + "\n".join(lines)
    )
    return recipe


def start(command: str, recipe: Path) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    eyas = Path(sys.executable).with_name("eyas")
    return subprocess.Popen([eyas, command, recipe], env=env, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    said = process.communicate(timeout=900)[1]
    assert process.returncode == 0, said
    return said


def answers_folder(recipe: Path) -> Path:
    return recipe.parent / "runs/recipe/regenerated"


def read(recipe: Path) -> Lines:
    """All whole lines, by id; no id twice."""
    lines = [
        json.loads(line)
        for path in sorted(answers_folder(recipe).glob("0*.jsonl"))
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    by_id = {line["id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


def wait_for_answers(recipe: Path, count: int, process: subprocess.Popen[str]) -> int:
    deadline = time.monotonic() + 600
    while (found := len(read(recipe))) < count:
        assert process.poll() is None and time.monotonic() < deadline, f"{found} answers, exit code {process.poll()}"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def undisturbed(server: VllmServer, demo_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe of a run that nothing disturbed."""
    recipe = make_recipe(tmp_path_factory.mktemp("undisturbed"), demo_target, server.url)
    print(finish(start("regenerate", recipe)))
    return recipe


@torch.inference_mode()
def test_answers_are_transformers_greedy_choice(undisturbed: Path, demo_target: Path) -> None:
    """Every emitted token is the argmax of Transformers' fp32 logits after the tokens before it, so the whole answer is
    what greedy decoding gives."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_target, dtype=torch.float32).eval()
    lines = read(undisturbed)
    assert len(lines) == COUNT
    equal = tokens = 0
    for line in lines.values():
        ids, mask = torch.tensor(line["input_ids"]), torch.tensor(line["loss_mask"], dtype=torch.bool)
        choice = model(ids[None]).logits[0, :-1].argmax(-1)
        equal += int((choice == ids[1:])[mask[1:]].all())
        tokens += int(mask.sum())
    print(f"{equal} of {len(lines)} conversations, {tokens} tokens: equal to Transformers' fp32 greedy ids")
    assert equal == len(lines)


def test_ends_cuts_and_turns(undisturbed: Path) -> None:
    lines = read(undisturbed)
    cut = [line for line in lines.values() if line["cut"]]
    assert 0 < len(cut) < COUNT
    for line in lines.values():
        last = line["input_ids"][-1]
        assert line["loss_mask"][-1] == 1 and (last == 2) == (not line["cut"])
    whole = [line for line in lines.values() if line["answers"] > 1]
    assert whole, "no conversation with more than one answer"
    for line in whole:
        assert "further" not in line, "ChatML leaves earlier turns as they are: one sample"
        starts = sum(b and not a for a, b in zip([0, *line["loss_mask"]], line["loss_mask"], strict=False))
        assert starts == line["answers"]


def test_prepare_takes_the_ids_as_they_are(undisturbed: Path) -> None:
    finish(start("prepare", undisturbed))
    tokens = Tokens(undisturbed.parent / "runs/recipe/tokens")
    prepared = {(tuple(s.token_ids.tolist()), tuple(s.loss_mask.astype(int).tolist())) for s in tokens}
    assert prepared == {(tuple(line["input_ids"]), tuple(line["loss_mask"])) for line in read(undisturbed).values()}
    assert set(tokens.manifest["by_source"]) == {"questions.jsonl", "dialogues"}


def test_two_kills_change_nothing(server: VllmServer, undisturbed: Path, tmp_path: Path, demo_target: Path) -> None:
    recipe = make_recipe(tmp_path, demo_target, server.url)
    kept = []
    for reached in (COUNT // 4, COUNT // 2):
        process = start("regenerate", recipe)
        wait_for_answers(recipe, reached, process)
        process.kill()
        process.communicate()
        kept.append(len(read(recipe)))
        # What a power cut may leave besides: the beginning of a line.
        with (answers_folder(recipe) / "000.jsonl").open("a") as torn:
            torn.write('{"id":"00000000000000000000000000000000","answers":1,"tok')
    assert kept[0] < kept[1] < COUNT
    finish(start("regenerate", recipe))
    print(f"killed after {kept[0]} and {kept[1]} of {COUNT} conversations")
    assert read(recipe) == read(undisturbed)


def test_a_killed_server_is_waited_for(
    server: VllmServer, undisturbed: Path, tmp_path: Path, demo_target: Path
) -> None:
    recipe = make_recipe(tmp_path, demo_target, server.url)
    process = start("regenerate", recipe)
    before = wait_for_answers(recipe, COUNT // 4, process)
    server.kill()
    assert before < COUNT
    server.start()
    said = finish(process)
    print(f"server killed after {before} of {COUNT} conversations\n{said}")
    assert "it is tried again" in said and f"{server.url} answers again" in said
    assert read(recipe) == read(undisturbed)


def test_sampling_settings_reach_the_server(
    server: VllmServer, undisturbed: Path, tmp_path: Path, demo_target: Path
) -> None:
    greedy, runs = read(undisturbed), []
    for seed in (0, 0, 1):
        folder = tmp_path / f"{len(runs)}"
        folder.mkdir()
        recipe = make_recipe(folder, demo_target, server.url, temperature=1.0, seed=seed, max_conversations=8)
        finish(start("regenerate", recipe))
        runs.append(read(recipe))
    ids = set(runs[0])
    assert len(ids) == 8 + len(DIALOGUES) and all(set(run) == ids for run in runs)
    same, other = (sum(runs[0][id] == run[id] for id in ids) for run in runs[1:])
    print(f"of {len(ids)} sampled conversations {same} repeat with the same seed, {other} with another")
    # Batches differ from run to run and round differently, which a sampled token may hang on.
    assert same >= len(ids) - 2 and other < len(ids) // 2
    assert sum(runs[0][id] == greedy[id] for id in ids) < len(ids) // 2
