"""Prepare against the tokenizer alone, and its memory.

    python benchmarks/prepare.py [--records 12000] [--tokens 500] [--workers 2] [--repeats 3]
    python benchmarks/prepare.py --memory --records 1000000 --tokens 24      (prepare alone: is its memory bounded?)

Prepare: the whole stage on one JSONL file of two-turn chats: starting workers, reading, masks, digests, doubles, order
and writing; only the imports are not timed. Tokenizer: `encode_batch` of the same rendered texts on as many threads,
nothing else. Both in turns, medians over the repeats. Memory: the largest sum over all processes of the stage. Text:
sentences of Python's own documentation, dealt at random. The last line is one JSON object.
"""

import argparse
import json
import os
import pydoc_data.topics
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from tokenizers import Tokenizer

from eyas.data.prepare import execute, make_maker
from eyas.data.tokens import Tokens
from eyas.recipe import Recipe
from eyas.run import Run
from eyas.target import load_target

TARGET = Path.home() / ".cache/eyas/SmolLM2-135M-Instruct"
CHARACTERS_PER_TOKEN = 4


def write_chats(path: Path, records: int, tokens: int, doubles: float = 0.02) -> None:
    """Chats of two questions (short ones: one) with about `tokens` tokens, most of them answers; some come twice."""
    rng = random.Random(0)
    text = " ".join(pydoc_data.topics.topics.values())
    sentences = [" ".join(words) for part in re.split(r"(?<=[.:])\s", text) if 3 < len(words := part.split()) < 40]
    with path.open("w", encoding="utf-8") as file:
        line = ""
        for _ in range(records):
            if not line or rng.random() >= doubles:
                turns = []
                for share in (0.1, 0.4, 0.1, 0.4) if tokens >= 200 else (0.2, 0.8):
                    said, length = [], round(share * tokens * CHARACTERS_PER_TOKEN)
                    while sum(map(len, said)) < length:
                        said.append(rng.choice(sentences))
                    role = "assistant" if len(turns) % 2 else "user"
                    turns.append({"role": role, "content": " ".join(said)[:length]})
                line = json.dumps({"messages": turns}, ensure_ascii=False) + "\n"
            file.write(line)


def run_of(folder: Path, chats: Path, workers: int, near_duplicates: float = 0.0) -> Run:
    data = {"sources": [{"path": str(chats)}], "workers": workers, "near_duplicates": near_duplicates}
    recipe = {"name": "bench", "runs_dir": str(folder), "target": {"path": str(TARGET)}, "data": data}
    return Run(Recipe.model_validate(recipe), "bench.toml")


class PeakMemory(threading.Thread):
    """The largest resident memory of this process and its children together, in bytes; shared pages count each time."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._ended = 0, threading.Event()

    def run(self) -> None:
        me = psutil.Process()
        while not self._ended.wait(0.1):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak = max(self.peak, total)

    def __enter__(self) -> "PeakMemory":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def time_prepare(run: Run) -> tuple[float, int]:
    """Seconds of the stage, and tokens in the records it read (doubles are rendered too)."""
    started = time.perf_counter()
    result = execute(run)
    seconds = time.perf_counter() - started
    source = result.counts["by_source"]["chats.jsonl"]
    return seconds, round(source["tokens"] * source["read"] / source["kept"])


def time_tokenizer(folder: Path, texts: Path, workers: int) -> float:
    """Seconds of `encode_batch` alone, in a process of its own with so many threads."""
    threads = {"RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, __file__, "--tokenizer-only", str(texts)]
    done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, check=True)
    return float(done.stdout)


def tokenizer_only(path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [json.loads(line) for line in path.open(encoding="utf-8")]
    started = time.perf_counter()
    for start in range(0, len(texts), 1000):
        tokenizer.encode_batch(texts[start : start + 1000], add_special_tokens=False)
    print(time.perf_counter() - started)


def write_texts(run: Run, path: Path) -> int:
    """The rendered texts of the prepared samples; returns their tokens."""
    tokenizer, total = Tokenizer.from_file(str(TARGET / "tokenizer.json")), 0
    with path.open("w", encoding="utf-8") as file:
        for sample in Tokens(run.tokens_dir):
            total += len(sample.token_ids)
            file.write(json.dumps(tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=False)) + "\n")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=12_000)
    parser.add_argument("--tokens", type=int, default=500, help="about how many a record")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="measure prepare alone, once")
    parser.add_argument("--tokenizer-only", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tokenizer_only:
        tokenizer_only(args.tokenizer_only)
        return
    with tempfile.TemporaryDirectory() as name:
        measure(Path(name), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    chats, texts = folder / "chats.jsonl", folder / "texts.jsonl"
    write_chats(chats, args.records, args.tokens)
    run, near = run_of(folder, chats, args.workers), run_of(folder / "near", chats, args.workers, 0.8)
    print(f"{args.records:,} records, {chats.stat().st_size / 1e6:,.0f} MB, {args.workers} workers")
    make_maker(run.recipe.data, load_target(run.recipe.target))
    if args.memory:
        with PeakMemory() as memory:
            seconds, tokens = time_prepare(run)
        figures = {"records": args.records, "workers": args.workers, "tokens_per_s": round(tokens / seconds)}
        print(json.dumps(figures | {"peak_rss_mib": round(memory.peak / 2**20)}))
        return
    rates, baselines, near_rates, peaks, distinct = [], [], [], [], 0
    for _ in range(args.repeats):
        with PeakMemory() as memory:
            seconds, tokens = time_prepare(run)
        peaks.append(memory.peak)
        rates.append(tokens / seconds)
        distinct = distinct or write_texts(run, texts)
        baselines.append(distinct / time_tokenizer(folder, texts, args.workers))
        seconds, tokens = time_prepare(near)
        near_rates.append(tokens / seconds)
        print(f"prepare {rates[-1]:,.0f} tokens/s, near-duplicates on {near_rates[-1]:,.0f}", end=", ")
        print(f"encode_batch {baselines[-1]:,.0f}", flush=True)
    rate, baseline = statistics.median(rates), statistics.median(baselines)
    figures = {
        "records": args.records,
        "workers": args.workers,
        "tokens_per_s": round(rate),
        "tokenizer_tokens_per_s": round(baseline),
        "ratio_to_tokenizer": round(rate / baseline, 3),
        "near_duplicates_ratio_to_tokenizer": round(statistics.median(near_rates) / baseline, 3),
        "peak_rss_mib": round(max(peaks) / 2**20),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
