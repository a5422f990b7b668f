"""The stage: every record accounted for, splits and order that depend on nothing but the seed, nothing half-written."""

import errno
import gzip
import json
import random
import subprocess
import sys
import time

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_data import exchange, make_run, supervised_texts, write_lines
from typer.testing import CliRunner

from eyas.data import prepare
from eyas.data.encode import Encoder
from eyas.data.preview import stretches
from eyas.data.tokens import Tokens
from eyas.errors import DataError, StoreFull
from eyas.record import load_record
from eyas.stages import run_stage
from eyas.target import load_target


def prepared(run):
    result = prepare.execute(run)
    tokens = Tokens(run.tokens_dir)
    assert result.output == tokens.manifest["digest"]
    for counts in tokens.manifest["by_source"].values():
        assert counts["read"] == counts["kept"] + sum(counts["rejected"].values())
    return tokens


def contents(tokens):
    return sorted((sample.split, sample.token_ids.tolist(), sample.loss_mask.tolist()) for sample in tokens)


def rejected_lines(run):
    return [json.loads(line) for line in (run.tokens_dir / "rejected.jsonl").read_text().split("\n") if line]


def many(count, start=0):
    return [exchange(f"question {i}", f"answer {i}") for i in range(start, start + count)]


def test_all_sources_together(tmp_path, tiny_target):
    chat = write_lines(tmp_path / "chat.jsonl", [exchange("hi", "hello"), exchange("a\u2028b", "c")])
    turns = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
    turns += [{"from": "human", "value": "three"}, {"from": "gpt", "value": "four"}]
    pq.write_table(pa.Table.from_pylist([{"conversations": turns}]), tmp_path / "sharegpt.parquet")
    ids = [
        {"prompt_ids": [5, 6], "response_ids": [7, 2], "kind": "story"},
        {"input_ids": [9, 8, 2], "loss_mask": [0, 1, 1], "kind": "list", "split": "heldout"},
    ]
    packed = tmp_path / "ids.jsonl.gz"
    packed.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in ids).encode()))
    sources = [chat, tmp_path / "sharegpt.parquet", {"path": str(packed), "name": "ids"}]
    run = make_run(tmp_path, tiny_target, sources, heldout_fraction=0.0)
    tokens = prepared(run)
    encoder = Encoder(load_target(run.recipe.target).tokenizer)
    texts = sorted(
        supervised_texts(encoder, s.token_ids, s.loss_mask) for s in tokens if not s.source.startswith("ids")
    )
    assert texts == [["c<|im_end|>"], ["hello<|im_end|>"], ["two<|im_end|>", "four<|im_end|>"]]
    assert set(tokens.manifest["by_source"]) == {"chat.jsonl", "sharegpt.parquet", "ids/story", "ids/list"}
    kept = {s.source: (s.token_ids.tolist(), s.loss_mask.tolist(), s.split) for s in tokens}
    assert kept["ids/story"] == ([5, 6, 7, 2], [False, False, True, True], "train")
    assert kept["ids/list"] == ([9, 8, 2], [False, True, True], "heldout")


def test_split_and_order_depend_on_the_seed_alone(tmp_path, tiny_target):
    records = many(300)
    forward = write_lines(tmp_path / "forward.jsonl", records)
    random.Random(1).shuffle(records)
    shuffled = [write_lines(tmp_path / f"part{i}.jsonl", records[i::3]) for i in range(3)]
    sets = [
        prepared(make_run(tmp_path, tiny_target, [{"path": str(path), "name": "s"} for path in paths], **options))
        for paths, options in [
            ([forward], {"heldout_fraction": 0.1}),
            (shuffled, {"heldout_fraction": 0.1}),
            ([forward], {"heldout_fraction": 0.1, "seed": 1}),
        ]
    ]
    assert sets[0].manifest["digest"] == sets[1].manifest["digest"]
    assert sets[2].manifest["digest"] != sets[0].manifest["digest"]
    assert 15 <= sets[0].manifest["by_split"]["heldout"] <= 45


def test_workers_change_nothing(tmp_path, tiny_target, monkeypatch):
    monkeypatch.setattr(prepare, "_BYTES_PER_WORKER", 1)
    monkeypatch.setattr("eyas.data.read._CHUNK_BYTES", 4000)
    path = write_lines(tmp_path / "a.jsonl", many(200) + many(30) + [exchange("q", "")])
    digests, lines = set(), []
    for workers in (1, 2):
        run = make_run(tmp_path, tiny_target, [path], workers=workers)
        digests.add(prepared(run).manifest["digest"])
        lines.append(rejected_lines(run))
    assert len(digests) == 1
    assert lines[0] == lines[1]


def test_a_killed_prepare_leaves_no_process_and_starts_afresh(tmp_path, tiny_target):
    path = write_lines(tmp_path / "a.jsonl", [exchange(f"question {i}", "long answer " * 25) for i in range(25_000)])
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'runs_dir = "{tmp_path}/runs"\n[target]\npath = "{tiny_target}"\n[data]\nworkers = 2\n'
        f'[[data.sources]]\npath = "{path}"\n'
    )
    command = [sys.executable, "-m", "eyas", "prepare", str(recipe)]
    killed = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    parent = psutil.Process(killed.pid)
    spilled = tmp_path / "runs/r/.partial-spill/0000.arrow"
    deadline = time.monotonic() + 60
    while not spilled.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = parent.children(recursive=True)
    killed.kill()
    killed.wait()
    assert len(workers) >= 2
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    assert not (tmp_path / "runs/r/tokens").exists()
    write_lines(path, many(50))
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert len(Tokens(tmp_path / "runs/r/tokens")) == 50
    assert sorted(entry.name for entry in (tmp_path / "runs/r").iterdir() if "partial" in entry.name) == []


def test_a_full_disk_is_said_and_leaves_nothing_behind(tmp_path, tiny_target, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "samples.parquet")

    run = make_run(tmp_path, tiny_target, [write_lines(tmp_path / "a.jsonl", many(5))])
    monkeypatch.setattr("eyas.data.tokens.pq.ParquetWriter.write_table", full)
    with pytest.raises(StoreFull, match="samples.parquet: No space left"):
        run_stage(run, "prepare")
    assert sorted(entry.name for entry in run.dir.iterdir()) == ["logs", "recipe.toml"]


def test_one_conversation_is_in_one_split(tmp_path, tiny_target):
    """Answers to one prompt stay together, whatever their number."""
    records = [exchange(f"question {i % 40}", f"answer {i}") for i in range(200)]
    tokens = prepared(
        make_run(tmp_path, tiny_target, [write_lines(tmp_path / "a.jsonl", records)], heldout_fraction=0.2)
    )
    splits = {}
    for sample in tokens:
        prompt = bytes(sample.token_ids[: int(np.argmax(sample.loss_mask))])
        splits.setdefault(prompt, set()).add(sample.split)
    assert len(splits) == 40
    assert all(len(split) == 1 for split in splits.values())
    assert set().union(*splits.values()) == {"train", "heldout"}


def test_few_conversations_still_give_heldout_ones(tmp_path, tiny_target):
    for count, heldout in ((20, 4), (6, 3), (2, 1), (1, 0)):
        path = write_lines(tmp_path / f"{count}.jsonl", many(count))
        tokens = prepared(make_run(tmp_path, tiny_target, [path], heldout_fraction=1e-6))
        assert tokens.manifest["by_split"] == {"heldout": heldout, "train": count - heldout}


def test_limit_counts_both_splits(tmp_path, tiny_target):
    records = [{**record, "split": "heldout" if i < 64 else "train"} for i, record in enumerate(many(1000))]
    path = write_lines(tmp_path / "a.jsonl", records)
    whole = prepared(make_run(tmp_path, tiny_target, [path]))
    assert whole.manifest["by_split"] == {"heldout": 64, "train": 936}
    everything = contents(whole)
    for limit, heldout in ((50, 4), (500, 32), (2, 1), (2000, 64)):
        run = make_run(tmp_path, tiny_target, [path], limit=limit)
        tokens = prepared(run)
        assert tokens.manifest["by_split"] == {"heldout": heldout, "train": min(limit, 1000) - heldout}
        assert all(sample in everything for sample in contents(tokens))
        counts = tokens.manifest["by_source"]["a.jsonl"]
        assert counts["rejected"].get("over_limit", 0) == 1000 - min(limit, 1000)
        assert run.dir.name == f"run-limit{limit}"


def test_doubles_are_dropped_with_a_reason(tmp_path, tiny_target):
    first = write_lines(tmp_path / "a.jsonl", many(10))
    second = write_lines(tmp_path / "b.jsonl", [exchange("other", "one"), *many(5, start=3)])
    run = make_run(tmp_path, tiny_target, [first, second])
    tokens = prepared(run)
    assert len(tokens) == len({sample.id for sample in tokens}) == 11
    assert tokens.manifest["by_source"]["b.jsonl"]["rejected"] == {"duplicate": 5}
    assert {(line["file"], line["line"], line["reason"]) for line in rejected_lines(run)} == {
        (str(second), line, "duplicate") for line in range(2, 7)
    }


def test_rejections_are_counted_with_file_and_line(tmp_path, tiny_target):
    bad = [
        (exchange("q", ""), "no_answer"),
        (exchange("q", "say <|im_end|> now"), "special_token_in_text"),
        (exchange("q", "half \ud800 pair"), "lone_surrogate"),
        (exchange("q", "x" * 600), "too_long"),
        ({"messages": [{**turn, "loss": False} for turn in exchange("q", "a")["messages"]]}, "no_supervised_token"),
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in [*many(20), *(record for record, _ in bad)]))
    run = make_run(tmp_path, tiny_target, [path], max_tokens=512)
    tokens = prepared(run)
    counts = tokens.manifest["by_source"]["a.jsonl"]
    assert (counts["read"], counts["kept"]) == (25, 20)
    assert [(line["line"], line["reason"]) for line in sorted(rejected_lines(run), key=lambda line: line["line"])] == [
        (21 + i, reason) for i, (_, reason) in enumerate(bad)
    ]
    ids = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}] * 3
    ids += [{"input_ids": [5, 999], "loss_mask": [0, 1]}, {"input_ids": [5, 6], "loss_mask": [0, 0]}]
    tokens = prepared(make_run(tmp_path, tiny_target, [write_lines(tmp_path / "ids.jsonl", ids)]))
    assert tokens.manifest["by_source"]["ids.jsonl"]["rejected"] == {
        "duplicate": 2,
        "no_supervised_token": 1,
        "token_outside_vocabulary": 1,
    }


def test_a_mask_shifted_by_one_is_caught(tmp_path, tiny_target):
    right = {"input_ids": [1, 9, 9, 1, 8, 7, 2, 10], "loss_mask": [0, 0, 0, 0, 1, 1, 1, 0]}
    assert len(prepared(make_run(tmp_path, tiny_target, [write_lines(tmp_path / "right.jsonl", [right])]))) == 1
    # As labels count: position i says whether token i + 1 is learned.
    shifted = {**right, "loss_mask": [0, 0, 0, 1, 1, 1, 0, 0]}
    with pytest.raises(DataError, match="end_of_turn_not_supervised 1 .*the end-of-turn token 2 follows"):
        prepare.execute(make_run(tmp_path, tiny_target, [write_lines(tmp_path / "shifted.jsonl", [shifted])]))


def test_long_conversations_are_cut_at_a_turn_or_rejected(tmp_path, tiny_target):
    turns = [turn for i in range(10) for turn in exchange(f"question {i}", f"answer {i}")["messages"]]
    path = write_lines(tmp_path / "a.jsonl", [{"messages": turns}, *many(2)])
    (long,) = [s for s in prepared(make_run(tmp_path, tiny_target, [path], max_tokens=200)) if len(s.token_ids) > 100]
    encoder = Encoder(load_target(make_run(tmp_path, tiny_target, [path]).recipe.target).tokenizer)
    answers = supervised_texts(encoder, long.token_ids, long.loss_mask)
    assert len(long.token_ids) <= 200
    assert 1 < len(answers) < 10
    assert answers == [f"answer {i}<|im_end|>" for i in range(len(answers))]
    tokens = prepared(make_run(tmp_path, tiny_target, [path], max_tokens=200, too_long="reject"))
    assert tokens.manifest["by_source"]["a.jsonl"]["rejected"] == {"too_long": 1}


def test_budgets_and_weights(tmp_path, tiny_target):
    paths = [write_lines(tmp_path / f"{i}.jsonl", many(100, start=1000 * (i + 1))) for i in range(2)]
    whole = prepared(make_run(tmp_path, tiny_target, paths)).manifest["by_source"]
    size = whole["0.jsonl"]["tokens"]
    sources = [{"path": str(paths[0]), "budget_tokens": size // 4}, {"path": str(paths[1])}]
    budgeted = prepared(make_run(tmp_path, tiny_target, sources)).manifest["by_source"]
    assert size // 4 <= budgeted["0.jsonl"]["tokens"] <= size // 4 + 100
    assert budgeted["0.jsonl"]["rejected"] == {"over_budget": 100 - budgeted["0.jsonl"]["kept"]}
    assert budgeted["1.jsonl"] == whole["1.jsonl"]
    sources = [{"path": str(path), "weight": weight} for path, weight in zip(paths, (3, 1), strict=True)]
    weighted = prepared(make_run(tmp_path, tiny_target, sources)).manifest["by_source"]
    assert weighted["0.jsonl"]["tokens"] == size
    assert abs(weighted["1.jsonl"]["tokens"] - size / 3) <= 100


FAILURES = [
    ("malformed line", '{"messages": [\n', "bad.jsonl, line 3: not valid JSON"),
    ("unknown role", '{"messages": [{"role": "narrator", "content": "x"}]}\n', "bad.jsonl, line 3: unknown role"),
    ("another form", '{"instruction": "x", "output": "y"}\n', "bad.jsonl, line 3: a record with the keys"),
]


@pytest.mark.parametrize(("line", "message"), [failure[1:] for failure in FAILURES], ids=[f[0] for f in FAILURES])
def test_failures_leave_nothing_behind(tmp_path, tiny_target, line, message):
    path = write_lines(tmp_path / "bad.jsonl", many(2))
    path.write_text(path.read_text() + line)
    run = make_run(tmp_path, tiny_target, [path])
    with pytest.raises(DataError, match=message):
        run_stage(run, "prepare")
    assert not run.tokens_dir.exists()
    assert sorted(p.name for p in run.dir.iterdir()) == ["logs", "recipe.toml"]
    assert load_record(run.dir, "prepare") is None


TEMPLATES = [
    ("{% for m in messages %}{{ m.nothing.here }}{% endfor %}", "line 1: .*the chat template fails: UndefinedError"),
    ("{% for m in messages %}", "line 1: the chat template is not valid Jinja"),
    ("{{ raise_exception('no such luck') }}", "refused_by_template 3 .*no such luck"),
]


@pytest.mark.parametrize(("template", "message"), TEMPLATES, ids=["fails", "syntax", "refuses"])
def test_bad_templates(tmp_path, tiny_target, template, message):
    (tmp_path / "t.jinja").write_text(template)
    path = write_lines(tmp_path / "a.jsonl", many(3))
    with pytest.raises(DataError, match=message):
        prepare.execute(make_run(tmp_path, tiny_target, [path], template=str(tmp_path / "t.jinja")))


def test_missing_templates(tmp_path, tiny_target):
    path = write_lines(tmp_path / "a.jsonl", many(3))
    with pytest.raises(DataError, match="data.template = .*absent.jinja"):
        prepare.execute(make_run(tmp_path, tiny_target, [path], template=str(tmp_path / "absent.jinja")))
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_target.iterdir():
        if file.name != "tokenizer_config.json":
            (bare / file.name).symlink_to(file)
    config = json.loads((tiny_target / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    with pytest.raises(DataError, match="a.jsonl, line 1: a conversation, but .* no chat template"):
        prepare.execute(make_run(tmp_path, bare, [path]))
    # Token ids need none.
    ids = write_lines(tmp_path / "ids.jsonl", [{"prompt_ids": [5], "response_ids": [6]}])
    assert len(prepared(make_run(tmp_path, bare, [ids]))) == 1


def test_another_template_file_changes_samples_and_digest(tmp_path, tiny_target):
    path = write_lines(tmp_path / "a.jsonl", many(3))
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    plain = prepared(make_run(tmp_path, tiny_target, [path]))
    other = prepared(make_run(tmp_path, tiny_target, [path], template=str(tmp_path / "t.jinja")))
    assert plain.manifest["template_digest"] != other.manifest["template_digest"]
    assert plain.manifest["tokenizer_digest"] == other.manifest["tokenizer_digest"]
    assert contents(plain) != contents(other)


def test_more_than_half_rejected_fails_with_the_top_reasons(tmp_path, tiny_target):
    path = write_lines(tmp_path / "a.jsonl", [*many(2), *[exchange("q", "")] * 2, {"messages": []}])
    with pytest.raises(DataError, match=r"3 of 5 records give no sample: no_answer 2 \(the first: .*a.jsonl, line 3\)"):
        prepare.execute(make_run(tmp_path, tiny_target, [path]))


def test_a_second_run_skips_and_a_changed_source_is_refused(tmp_path, tiny_target):
    path = write_lines(tmp_path / "a.jsonl", many(5))
    run = make_run(tmp_path, tiny_target, [path])
    first = run_stage(run, "prepare")
    assert run_stage(run, "prepare") == first
    write_lines(path, many(6))
    with pytest.raises(Exception, match="content of .*a.jsonl was .* and is now"):
        run_stage(run, "prepare")
    assert len(Tokens(run.tokens_dir)) == 5
    run_stage(run, "prepare", redo=True)
    assert len(Tokens(run.tokens_dir)) == 6


def test_preview_marks_the_supervised_part(tmp_path, tiny_target):
    from eyas.cli import app, commands

    path = write_lines(tmp_path / "a.jsonl", [exchange("hi", "hello ⟨Zoë⟩ 文"), exchange("q", "")])
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[target]\npath = "{tiny_target}"\n[[data.sources]]\npath = "{path}"\n')
    commands.register(app)
    result = CliRunner().invoke(app, ["prepare", str(recipe), "--preview", "3", "--set", f"runs_dir={tmp_path}/runs"])
    assert result.exit_code == 0, result.output
    assert "<|im_start|>assistant\n⟦hello ⟨Zoë⟩ 文<|im_end|>⟧" in result.output
    assert "1 of the first 2 records rejected: no_answer" in result.output
    assert not (tmp_path / "runs").exists()


def test_stretches():
    assert list(stretches(np.array([0, 1, 1, 0], bool))) == [(0, 1, False), (1, 3, True), (3, 4, False)]
    assert list(stretches(np.array([], bool))) == []


def test_text_of_another_family_is_warned_of(tmp_path, tiny_target, capsys):
    records = [exchange(f"[INST] question {i}", "answer") for i in range(3)]
    prepared(make_run(tmp_path, tiny_target, [write_lines(tmp_path / "a.jsonl", records)]))
    assert "3 samples: [INST] in the text, which is no token of this tokenizer" in capsys.readouterr().err
