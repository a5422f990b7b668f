"""The releases of each engine in which what Eyas stands on was read."""

import re
from typing import NamedTuple

Release = tuple[int, int, int]


class Releases(NamedTuple):
    """A range of one engine's releases.

    Attributes:
        title: the engine's name as it is written.
        oldest, newest: both included.
    """

    title: str
    oldest: Release
    newest: Release

    def find(self, version: str) -> Release | None:
        """ "0.5.14.post1" -> (0, 5, 14); None outside the range."""
        match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
        release = (int(match[1]), int(match[2]), int(match[3])) if match else (0, 0, 0)
        return release if self.oldest <= release <= self.newest else None

    def __str__(self) -> str:
        return " to ".join(".".join(map(str, end)) for end in (self.oldest, self.newest))


SGLANG = Releases("SGLang", (0, 5, 11), (0, 5, 23))
VLLM = Releases("vLLM", (0, 27, 0), (0, 33, 0))
RELEASES = {"sglang": SGLANG, "vllm": VLLM}  # by engine.kind
