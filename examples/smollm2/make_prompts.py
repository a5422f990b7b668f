"""The demo's prompts: about 1,500 for training, from the templates in prompts.toml, and 64 held-out, written by hand.

Usage: python make_prompts.py     (prints how many there are of each kind)
"""

import random
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PER_TEMPLATE = 14
SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Prompt:
    id: str
    kind: str
    split: str  # "train" or "heldout"
    text: str


def training_prompts() -> list[Prompt]:
    """PER_TEMPLATE different prompts of every template, the same at every call."""
    source = tomllib.loads((HERE / "prompts.toml").read_text())
    decks = {slot: _Deck(slot, words) for slot, words in source["slots"].items()}
    drawn: dict[str, str] = {}  # text -> kind
    for kind, templates in source["templates"].items():
        for template in templates:
            wanted = len(drawn) + PER_TEMPLATE
            while len(drawn) < wanted:
                drawn.setdefault(SLOT.sub(lambda match: decks[match[1]].draw(), template), kind)
    return [Prompt(f"train-{i:04}", kind, "train", text) for i, (text, kind) in enumerate(drawn.items())]


def heldout_prompts() -> list[Prompt]:
    source = tomllib.loads((HERE / "heldout.toml").read_text())
    texts = [(kind, text) for kind, prompts in source.items() for text in prompts]
    return [Prompt(f"heldout-{i:04}", kind, "heldout", text) for i, (kind, text) in enumerate(texts)]


class _Deck:
    """Draws every word of a slot once before any word comes again."""

    def __init__(self, slot: str, words: list[str]) -> None:
        self._words, self._left, self._random = words, [], random.Random(slot)

    def draw(self) -> str:
        if not self._left:
            self._left = self._random.sample(self._words, len(self._words))
        return self._left.pop()


def word_runs(text: str, length: int = 5) -> set[tuple[str, ...]]:
    """All runs of `length` words, by which held-out prompts are kept apart from the training ones."""
    words = re.findall(r"[a-z0-9']+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def main() -> None:
    for name, prompts in (("training", training_prompts()), ("held-out", heldout_prompts())):
        kinds = Counter(prompt.kind for prompt in prompts)
        print(f"{len(prompts)} {name} prompts:", ", ".join(f"{kind} {count}" for kind, count in kinds.items()))


if __name__ == "__main__":
    main()
