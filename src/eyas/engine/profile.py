"""Launch profiles: named sets of server flags and environment variables, each with its reason.

purpose = "capture"            # or "serve": a plain server without the tap
about = "one line"

[[flags]]
engine = "sglang"              # optional: the engine that the flag is for, sglang if not given
flag = "--disable-radix-cache"
value = ""                     # optional
since = "0.5.14"               # optional: releases that know the flag, `before` not included
before = ""
required = true                # part of every capture, whatever profile: without it states are wrong or missing
reason = "a cached prefix is not computed again: its rows would be missing"

[[env]]
engine = ""                    # optional: "" is for all engines
name = "NCCL_PROTO"
value = "LL"
reason = "..."

[drafter]                      # optional, for servers with a drafter: goes before serving.drafts, top_k, draft_tokens
drafts = 4
top_k = 1
draft_tokens = 0

[evidence]                     # what `eyas tune` measured; for readers only
"""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from eyas.errors import RecipeError
from eyas.settings import Table

DEFAULT = "extraction"
_FOLDER = Path(__file__).parent / "profiles"


class Flag(Table):
    engine: Literal["sglang", "vllm"] = "sglang"
    flag: str = Field(pattern=r"^--[a-z0-9-]+$")
    value: str = ""
    since: str = ""
    before: str = ""
    required: bool = False
    reason: str = Field(min_length=1)

    def fits(self, engine: str, release: tuple[int, int, int]) -> bool:
        known = not self.since or release >= _numbers(self.since)
        return engine == self.engine and known and (not self.before or release < _numbers(self.before))


class Variable(Table):
    engine: Literal["", "sglang", "vllm"] = ""
    name: str = Field(pattern=r"^[A-Z][A-Z0-9_]*$")
    value: str
    reason: str = Field(min_length=1)


class DrafterSettings(Table):
    drafts: int = Field(ge=1, le=16)
    top_k: int = Field(1, ge=1, le=16)
    draft_tokens: int = Field(0, ge=0)


class Profile(Table):
    """One profile; `name` is its file's."""

    name: str
    purpose: Literal["capture", "serve"]
    about: str
    flags: list[Flag] = Field(default_factory=list)
    env: list[Variable] = Field(default_factory=list)
    drafter: DrafterSettings | None = None
    evidence: dict[str, Any] = Field(default_factory=dict)

    def flags_for(self, engine: str, release: tuple[int, int, int]) -> list[Flag]:
        """Flags for one release; every capture has the required ones of `extraction` among them."""
        flags = [flag for flag in self.flags if flag.fits(engine, release)]
        if self.purpose == "capture" and self.name != DEFAULT:
            own = {flag.flag for flag in flags}
            needed = [flag for flag in load_profile(DEFAULT).flags_for(engine, release) if flag.required]
            flags = [flag for flag in needed if flag.flag not in own] + flags
        return flags

    def env_for(self, engine: str) -> dict[str, str]:
        """Variables for one engine."""
        return {entry.name: entry.value for entry in self.env if entry.engine in ("", engine)}


def profile_names() -> list[str]:
    """Names of the profiles that come with Eyas."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_profile(name: str, table: str = "engine") -> Profile:
    """A profile by name, or by the path of its TOML file.

    Args:
        table: of the recipe, that names it.
    Raises: RecipeError for an unknown name, an unreadable file, or a flag without a reason.
    """
    if name in profile_names():
        text = (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    elif name.endswith(".toml") and Path(name).expanduser().is_file():
        text = Path(name).expanduser().read_text(encoding="utf-8")
    else:
        raise RecipeError(
            f"{table}.profile = {name!r}: no such profile",
            expected=f"{', '.join(profile_names())}, or a TOML file of your own",
            next="eyas serve profiles   # lists and explains them",
        )
    try:
        return Profile.model_validate({"name": Path(name).stem} | tomllib.loads(text))
    except (ValidationError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(
            f"{table}.profile = {name!r}: {error}", expected=f"the form of {_FOLDER / 'extraction.toml'}"
        ) from None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
