"""The report: one offline page and one table, from whatever stages are finished."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_export import make_run, write_checkpoint, write_record, write_store

from eyas.errors import RecipeError
from eyas.report.facts import gather
from eyas.report.page import render, write_report
from eyas.report.summary import finish, summary_rows
from eyas.run import Run, open_run

EVALUATION: dict[str, Any] = {
    "acceptance_length": 1.6543,
    "acceptance_per_position": [0.42, 0.17, 0.0643],
    "verifications": 2113,
    "drafts": 3,
    "topology": "chain",
    "temperature": 0.0,
    "wall_s": {"plain": 33.1, "speculative": 24.0},
    "lossless": True,
    "replay": {
        "acceptance_length": 1.6543,
        "acceptance_per_position": [0.42, 0.17, 0.0643],
        "verifications": 2113,
        "samples": 64,
    },
    "by_source": {
        "gsm8k": {"acceptance_length": 1.9, "acceptance_per_position": [0.6, 0.25, 0.05], "verifications": 1000},
        "mt_bench": {"acceptance_length": 1.4333, "acceptance_per_position": [0.3, 0.1, 0.0333], "verifications": 1113},
    },
    "kinds": {"digits": {"met": 400, "right": 100}, "word": {"met": 2000, "right": 1300}},
    "decode": {
        "acceptance_length": 1.648,
        "acceptance_per_position": [0.41, 0.175, 0.063],
        "verifications": 466,
        "prompts": 16,
        "tokens": 768,
        "temperature": 0.0,
        "identical": 16,
        "speedup": 1.379,
        "dtype": "float32",
    },
}
# Elements that HTML lets stand without an end tag, as the page does.
_VOID = {"meta", "br", "rect", "line", "circle", "polyline", "th", "td", "tr"}


class Page(HTMLParser):
    """Text, attributes and nesting of a page; asserts that what is opened is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] not in ("style", "script"):
            self.texts.append(data)


def write_tokens(run: Run) -> None:
    """A token set of 8 samples of 9 tokens, the last 5 supervised: 6 of one source, and one of 300 turns."""
    from eyas.data.tokens import Sample, TokensWriter, sample_id

    with TokensWriter(run.tokens_dir) as writer:
        for number in range(9):
            turns = 300 if number == 8 else 1
            ids = np.tile(np.array([40 + number, 41, 42, 2, 50, 51, 52, 53, 2], dtype=np.int32), turns)
            mask = np.tile(np.arange(9) >= 4, turns)
            source = "chats <one>" if number < 8 else "long"
            writer.add(Sample(sample_id(ids, mask), source, "heldout" if number < 2 else "train", ids, mask))
        rejected = {"duplicate": 2, "near_duplicate": 1, "no_supervised_token": 3}
        first = {"read": 14, "kept": 8, "samples": 8, "tokens": 72, "supervised_tokens": 40, "rejected": rejected}
        second = {"read": 1, "kept": 1, "samples": 1, "tokens": 2700, "supervised_tokens": 1500, "rejected": {}}
        writer.finish({"by_source": {"chats <one>": first, "long": second}})


def fill(run: Run, target: Path) -> None:
    """All the files of a finished run."""
    write_store(run, target)
    write_checkpoint(run, 20)
    write_tokens(run)
    run.logs_dir.mkdir(exist_ok=True)
    lines: list[dict[str, Any]] = []
    for step in range(10, 410, 10):
        lines.append({"step": step, "loss": 6 - step / 100, "lr": 1e-4, "grad_norm": 0.3, "tokens_per_s": 1234.5})
        lines[-1]["loss_per_step"] = [3 - step / 200, 4 - step / 200, 5 - step / 200]
        if step % 100 == 0:
            measured = {"acceptance_length": 1 + step / 800, "acceptance_per_position": [0.4, 0.1, 0.05]}
            lines.append({"step": step, "heldout": measured | {"verifications": 900}})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.logs_dir / "train.jsonl").write_text(text + '{"step": 410, "lo')  # cut by a kill
    (run.dir / "eval.json").write_text(json.dumps(EVALUATION))
    for stage in ("prepare", "capture", "verify", "train", "evaluate", "export"):
        counts = {"tokens_per_s": 1300.0} if stage == "train" else {"samples": 8}
        write_record(run, stage, f"digest of {stage}", counts, duration_s=75)


@pytest.fixture
def finished(tmp_path: Path, tiny_target: Path) -> Run:
    run = make_run(tmp_path, tiny_target)
    fill(run, tiny_target)
    return run


def test_a_finished_run_shows_all_its_figures(finished: Run) -> None:
    page = Page(write_report(finished).read_text())
    assert "not finished" not in page.text
    facts = gather(finished)
    assert facts.store is not None and facts.vocabulary is not None
    stored = sum(path.stat().st_size for path in Path(finished.store_url).rglob("*") if path.is_file())
    assert (facts.store.samples, facts.store.tokens, facts.store.supervised) == (8, 72, 40)
    assert facts.store.size_bytes == stored
    for words in (
        "Acceptance length 1.654 (chain of 3 drafts, temperature 0), 1.38 times the speed of plain decoding",
        "Trained from 8 samples, 72 tokens",
        f"{stored / 72:,.0f} bytes per token",
        "1,300 training tokens/s",
        "replay of 64 held-out samples 1.654 42.0%, 17.0%, 6.4% 2,113",
        "replay, gsm8k 1.900 60.0%, 25.0%, 5.0% 1,000",
        "replay, mt_bench 1.433 30.0%, 10.0%, 3.3% 1,113",
        "reference decoding of 16 prompts, temperature 0 1.648 41.0%, 17.5%, 6.3% 466",
        "digits 400 25.0% 30.0%",
        "word 2,000 65.0% 70.0%",
        "while training, step 400 1.500 40.0%, 10.0%, 5.0% 900",
        "gave the same token ids",
        "chats <one> 14 8 6",
        "2, 4, 5 of 8 (id i: the residual stream after i layers)",
        "1 min 15 s",
        f"eyas run {finished.dir}/recipe.toml",
        "torch",
    ):
        assert words in page.text, words


def test_coverage_counts_supervised_tokens_only(finished: Run) -> None:
    from eyas.store.reader import StoreReader

    vocabulary = gather(finished).vocabulary
    assert vocabulary is not None and (vocabulary.size, vocabulary.target_size) == (96, 259)
    from safetensors.torch import load_file

    t2d = load_file(finished.train_dir / "step-20" / "model.safetensors")["t2d"]
    reader = StoreReader(finished.store_url)
    for split in ("train", "heldout"):
        samples = [reader.read(ref.sample_id) for ref in reader.samples(split)]
        inside = [bool(t2d[token]) for s in samples for token in s.token_ids[s.loss_mask].tolist()]
        assert vocabulary.coverage[split] == pytest.approx(sum(inside) / len(inside))


def test_the_page_fetches_nothing(finished: Run) -> None:
    page = Page(write_report(finished).read_text())
    assert not {tag for tag, _, _ in page.attributes} & {"link", "img", "iframe"}
    policies = [value for tag, name, value in page.attributes if tag == "meta" and name == "content"]
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'" in policies
    assert not [value for _, name, value in page.attributes if name in ("src", "href") or "http" in value]
    html = (finished.dir / "report.html").read_text()
    assert "url(" not in html and "@import" not in html and len(html) < 200_000


def test_names_are_escaped(finished: Run) -> None:
    html = write_report(finished).read_text()
    assert "chats &lt;one&gt;" in html and "chats <one>" not in html


def test_charts_hold_the_measurements(finished: Run) -> None:
    page = Page(write_report(finished).read_text())
    for words in (
        "step 400: training loss 2",
        "draft 1, step 400: loss of the first and last draft 1",
        "draft 3, step 400: loss of the first and last draft 3",
        "step 400: held-out acceptance length 1.5",
        "replay, position 1: 42.0%",
        "reference decoding, position 3: 6.3%",
        "gsm8k: 1.900 ± 0.056 in 1,000 verifications",
    ):
        assert words in page.text, words


def test_a_run_that_has_just_begun(tmp_path: Path, tiny_target: Path) -> None:
    run = make_run(tmp_path, tiny_target)
    run.dir.mkdir(parents=True)
    page = Page(write_report(run).read_text())
    for words in ("Acceptance length: not finished", "Training: not finished", "Evaluation: not finished"):
        assert words in page.text
    assert "prepare not finished" in page.text and "export not finished" in page.text
    rows = dict(summary_rows(gather(run), run.dir / "report.html"))
    assert rows["tokens captured"] == rows["acceptance length"] == "not finished" and "speed-up" not in rows


@pytest.mark.parametrize("missing", ["eval.json", "logs", "tokens", "store", "train", "records"])
def test_any_part_may_be_missing(finished: Run, missing: str) -> None:
    (finished.dir / missing).rename(finished.dir / "elsewhere")
    assert Page(render(gather(finished))).text


def test_a_damaged_store_is_told(finished: Run) -> None:
    manifest = Path(finished.store_url) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"num_layers": 8', '"num_layers": 9'))
    assert "does not fit the content" in Page(write_report(finished).read_text()).text


def test_the_last_error_is_shown_while_a_stage_is_open(finished: Run) -> None:
    error = {"stage": "export", "error": "no room <left>\nnext: free some", "time": 0}
    (finished.logs_dir / "last_error.json").write_text(json.dumps(error))
    assert "The last error" not in Page(write_report(finished).read_text()).text
    (finished.dir / "records" / "export.json").unlink()
    assert "The last error, in export: no room <left> next: free some" in Page(write_report(finished).read_text()).text


def test_no_run_is_an_error_with_the_command(tmp_path: Path, tiny_target: Path) -> None:
    with pytest.raises(RecipeError, match="no such run yet") as caught:
        write_report(make_run(tmp_path, tiny_target))
    assert "eyas run" in caught.value.next


def test_the_summary_table(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    finish(finished)
    out = capsys.readouterr().out
    lines = {" ".join(line.split()) for line in out.splitlines()}
    assert "tokens captured 72 in 8 samples" in lines
    assert "training tokens/s 1,300" in lines
    assert "acceptance length 1.654 (chain of 3 drafts, temperature 0)" in lines
    assert "acceptance by position 42.0%, 17.0%, 6.4%" in lines
    assert "speed-up 1.38 times plain decoding, in process" in lines
    assert f"report {finished.dir}/report.html" in lines
    assert (finished.dir / "report.html").is_file()


def test_the_data_part_shows_lengths_shares_and_a_sample_of_each_source(finished: Run) -> None:
    page = Page(write_report(finished).read_text())
    assert "9 samples (2 heldout, 7 train) of 15 records: 2,772 tokens, 55.6% of them supervised" in page.text
    assert "mean 308, median 9, 95 % at most 1,624, longest 2,700" in page.text
    assert "Duplicates and near-duplicates left out: 3" in page.text
    assert "no_supervised_token 3 20.0%" in page.text
    assert "chats <one> 14 8 6" in page.text and "72 2.6% 40 55.6%" in page.text
    assert "long: 2,700 tokens, 1,500 supervised, train" in page.text
    assert "9 tokens, 5 supervised, heldout" in page.text
    html = (finished.dir / "report.html").read_text()
    assert "<mark>PQRS&lt;|im_end|&gt;</mark>" in html and html.count("<mark>") == 1 + 1 + 6
    assert "supervised and context by source" in str(page.attributes)


def test_what_the_target_wrote_is_counted(finished: Run) -> None:
    by_source = {"chats <one>": {"read": 20, "kept": 14, "rejected": {"too_long": 6}}}
    counts = {"conversations": 14, "answers": 17, "tokens": 1234, "cut_off": 3, "by_source": by_source}
    written = open_run(finished.dir.parent.parent / "tiny.toml", ["regenerate.servers=['http://a:1']"])
    write_record(written, "regenerate", "digest", counts)
    page = Page(write_report(written).read_text())
    assert "17 answers in 14 conversations, 1,234 tokens; 3 cut off at their longest length" in page.text
    assert "chats <one> 20 14 6 too_long: 6" in page.text


def test_samples_need_the_targets_tokenizer(finished: Run) -> None:
    gone = open_run(finished.dir.parent.parent / "tiny.toml", ["target.path=/no/such/target"])
    facts = gather(gone)
    assert facts.data is not None and facts.data.excerpts == []
    assert "Not shown: target.path = /no/such/target: no such folder" in Page(render(facts)).text
