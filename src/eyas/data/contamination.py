"""Records that hold prompts of an evaluation set: they are kept out of training.

A user turn is contaminated when, in normalised words, it equals an evaluation turn, contains one of 8 to 12 words, or
shares a run of 13 words with one. Runs found in five or more evaluation turns are boilerplate and don't count.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from eyas import fs
from eyas.data.read import Raw, read_chunks, source_files
from eyas.data.records import Message

_RUN, _SHORT = 13, 8
_BOILERPLATE = 5
_FACTOR = np.uint64(0x100000001B3)
# Chinese, Japanese and Korean have no blanks between words: each character counts as one.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_CJK}]|[^\\W{_CJK}]+")
Hashes = npt.NDArray[np.uint64]


class Contamination:
    """Looks up user turns among evaluation prompts. It can be sent to other processes.

    Args:
        prompts: all turns of all evaluation prompts.
    """

    def __init__(self, prompts: Iterable[str]) -> None:
        self._whole: set[str] = set()
        counts: dict[int, Counter[int]] = {}
        for prompt in set(prompts):
            found = words(prompt)
            if not found:
                continue
            self._whole.add(fs.digest(" ".join(found)))
            if len(found) >= _SHORT:
                length = min(len(found), _RUN)
                runs = set(_runs(_hashes(found), length).tolist())
                counts.setdefault(length, Counter()).update(runs)
        self._runs: dict[int, Hashes] = {
            length: np.array(sorted(run for run, times in of_length.items() if times < _BOILERPLATE), dtype=np.uint64)
            for length, of_length in counts.items()
        }

    def find(self, turns: Iterable[str]) -> str:
        """The first turn's beginning that holds an evaluation prompt, or ""."""
        for turn in turns:
            found = words(turn)
            if fs.digest(" ".join(found)) in self._whole:
                return turn[:80]
            hashes = _hashes(found)
            for length, known in self._runs.items():
                runs = _runs(hashes, length)
                if len(known) and (known[np.minimum(np.searchsorted(known, runs), len(known) - 1)] == runs).any():
                    return turn[:80]
        return ""


def words(text: str) -> list[str]:
    """Normalised words: NFKC, case-folded, word characters only."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def load_contamination(patterns: Sequence[str]) -> Contamination:
    """From files of evaluation prompts (`prompt`, `turns`, `question`, `instruction`, `messages` or `text`)."""
    return Contamination(
        turn
        for pattern in patterns
        for path in source_files(pattern)
        for _, record in _records(path)
        for turn in _turns(record)
    )


def user_turns(messages: Iterable[Message]) -> list[str]:
    """What the user wrote."""
    return [message["content"] for message in messages if message["role"] == "user"]


def _records(path: Path) -> Iterator[tuple[int, Raw]]:
    for chunk in read_chunks(path):
        yield from chunk.records()


def _turns(record: Raw) -> Iterator[str]:
    values: list[Any] = [record[key] for key in ("prompt", "question", "instruction", "text") if key in record]
    values += record.get("turns") or []
    turns = record.get("messages") or record.get("conversations") or []
    values += [turn.get("content", turn.get("value")) for turn in turns if isinstance(turn, dict)][:1]
    yield from (value for value in values if isinstance(value, str))


def _hashes(found: Sequence[str]) -> Hashes:
    return np.array([xxhash.xxh3_64_intdigest(word.encode()) for word in found], dtype=np.uint64)


def _runs(hashes: Hashes, length: int) -> Hashes:
    """Hash of every run of `length` words."""
    count = len(hashes) - length + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    mixed = np.zeros(count, dtype=np.uint64)
    for offset in range(length):
        mixed = mixed * _FACTOR ^ hashes[offset : offset + count]
    return mixed
