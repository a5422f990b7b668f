"""What `eyas tune` may change: named sets of choices, each with its reason, and the configurations they make.

about = "one line"

[[choices]]
drafter = [{ drafts = 3 }, { drafts = 5, top_k = 4, draft_tokens = 8 }]
reason = "..."

[[choices]]
flag = "--mem-fraction-static"
values = ["", "0.75", "0.85"]  # "": without the flag; "on": the flag alone
reason = "..."

[[choices]]
env = "NCCL_PROTO"
values = ["", "LL", "Simple"]  # "": not set
reason = "..."

The first value of every choice is what is served without tuning. All of these are read when a server starts: SGLang
(0.5.11 to 0.5.23) and vLLM change none of them while they serve.
"""

import itertools
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from eyas import fs
from eyas.engine.profile import DrafterSettings, Flag, Profile, Variable
from eyas.errors import RecipeError
from eyas.settings import Table

_FOLDER = Path(__file__).parent / "tuning"
_ALONE = "on"


class Choice(Table):
    """One thing that may be changed."""

    drafter: list[DrafterSettings] = Field(default_factory=list)
    flag: str = ""
    env: str = ""
    values: list[str] = Field(default_factory=list)
    reason: str = Field(min_length=1)

    @model_validator(mode="after")
    def _one_thing(self) -> "Choice":
        if sum(map(bool, (self.drafter, self.flag, self.env))) != 1 or bool(self.drafter) == bool(self.values):
            raise ValueError("a choice needs `drafter`, or `flag` or `env` with `values`")
        return self

    @property
    def count(self) -> int:
        return len(self.drafter or self.values)

    def text(self, place: int) -> str:
        """A value in words; "" where nothing is added to the server's command."""
        if self.drafter:
            chosen = self.drafter[place]
            tree = f" top-k {chosen.top_k} verified {chosen.draft_tokens}" if chosen.top_k > 1 else ""
            return f"drafts {chosen.drafts}{tree}"
        value = self.values[place]
        if not value:
            return ""
        return f"{self.flag} {value}".removesuffix(f" {_ALONE}") if self.flag else f"{self.env}={value}"


class Choices(Table):
    name: str
    about: str
    choices: list[Choice] = Field(min_length=1)


@dataclass(frozen=True)
class Configuration:
    """One value of every choice.

    Attributes:
        places: index into each choice's values.
        text: in words; `as it is` for the first values.
    """

    places: tuple[int, ...]
    text: str

    @property
    def name(self) -> str:
        """Short and usable as a folder's name."""
        return "c" + fs.digest_json(self.places)[:8]


def choice_names() -> list[str]:
    """Names of the choices that come with Eyas."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_choices(name: str) -> Choices:
    """Choices by name, or by the path of a TOML file. Raises RecipeError."""
    path = _FOLDER / f"{name}.toml" if name in choice_names() else Path(name).expanduser()
    if not path.is_file():
        raise RecipeError(
            f"--choices {name}: no such choices",
            expected=f"{', '.join(choice_names())}, or a TOML file of your own in the same form",
            next=f"less {_FOLDER}/sglang.toml",
        )
    try:
        return Choices.model_validate({"name": path.stem} | tomllib.loads(path.read_text(encoding="utf-8")))
    except (ValidationError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: {error}", expected=f"the form of {_FOLDER / 'sglang.toml'}") from None


def configurations(choices: Choices, most: int) -> tuple[list[Configuration], bool]:
    """All combinations where they are at most `most`, else the first values and each single change of them.

    Returns: configurations, the first values first; and whether they are all combinations.
    """
    counts = [choice.count for choice in choices.choices]
    if math.prod(counts) <= most:
        return [make(choices, places) for places in itertools.product(*map(range, counts))], True
    default = (0,) * len(counts)
    single = [
        default[:at] + (place,) + default[at + 1 :] for at, count in enumerate(counts) for place in range(1, count)
    ]
    return [make(choices, places) for places in [default, *single]], False


def make(choices: Choices, places: tuple[int, ...]) -> Configuration:
    """The configuration of these values."""
    texts = [choice.text(place) for choice, place in zip(choices.choices, places, strict=True)]
    return Configuration(places, ", ".join(filter(None, texts)) or "as it is")


def combine(choices: Choices, better: list[Configuration]) -> Configuration:
    """The first values with every single change of `better`, the best first; a choice's first change counts."""
    places = [0] * len(choices.choices)
    for configuration in better:
        for at, place in enumerate(configuration.places):
            places[at] = places[at] or place
    return make(choices, tuple(places))


def profile_of(base: Profile, choices: Choices, configuration: Configuration, kind: str) -> dict[str, Any]:
    """A profile's TOML content: `base` with a configuration's values on top."""
    flags = {flag.flag: flag for flag in base.flags if flag.engine == kind}
    env = {entry.name: entry for entry in base.env if entry.engine in ("", kind)}
    drafter = base.drafter
    for choice, place in zip(choices.choices, configuration.places, strict=True):
        if choice.drafter:
            drafter = choice.drafter[place]
        elif value := choice.values[place]:
            if choice.flag:
                given = "" if value == _ALONE else value
                flags[choice.flag] = Flag(engine=kind, flag=choice.flag, value=given, reason=choice.reason)
            else:
                env[choice.env] = Variable(name=choice.env, value=value, reason=choice.reason)
    content: dict[str, Any] = {
        "purpose": "serve",
        "about": f"{base.about}; {configuration.text}",
        "flags": [flag.model_dump(exclude_defaults=True) | {"engine": kind} for flag in flags.values()],
        "env": [entry.model_dump(exclude_defaults=True) for entry in env.values()],
    }
    return content | ({"drafter": drafter.model_dump()} if drafter else {})
