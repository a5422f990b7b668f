"""The starter recipe that `eyas init` writes: every key with its description, defaults commented out."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from eyas.recipe import Recipe
from eyas.settings import Source, Table
from eyas.target import Target

_WIDTH = 110
_HEAD = """\
Recipe for an EAGLE-3 drafter, written by `eyas init`. Lines that begin with `#key` show a default: remove the # to
change it. Check everything in minutes on a few samples first: eyas run {recipe} --limit 50"""


def starter_recipe(target: Target, target_path: str, data_path: str, recipe_path: Path) -> str:
    """TOML text of a recipe for this target.

    Args:
        target: found and checked.
        target_path: as it shall stand in the recipe: an absolute folder or a hub name.
        data_path: conversations, absolute or relative to the recipe file.
        recipe_path: where the text will lie, for the commands in its comments.
    """
    chosen: dict[str, dict[str, Any]] = {
        "": {"name": re.sub(r"[^A-Za-z0-9._-]+", "-", Path(target_path).name)},
        "target": {"path": target_path},
        "data": {"max_tokens": min(4096, target.max_position_embeddings)},
        # EAGLE-3.1, which SGLang reads from 0.5.12 on and vLLM does; Muon. SmolLM2 with and without: docs/results.md.
        "drafter": {"aux_layer_ids": target.default_aux_layer_ids(), "fc_norm": True, "norm_output": True},
        "train": {"draft_vocab_size": min(32000, target.vocab_size), "optimizer": "muon"},
    }
    sources = ["[[data.sources]]", *_keys(Source, {"path": data_path})]
    blocks = [_comment(_HEAD.format(recipe=recipe_path)), *_keys(Recipe, chosen[""])]
    for name, field in Recipe.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Table):
            blocks += [f"[{name}]", *_keys(kind, chosen.get(name, {})), *(sources if name == "data" else [])]
    return "\n\n".join(blocks) + "\n"


def _keys(table: type[Table], chosen: dict[str, Any]) -> list[str]:
    """One block a key: its description as comment, then the key. Tables inside the table have blocks of their own."""
    return [
        _comment(_description(field)) + "\n" + _line(name, field, chosen)
        for name, field in table.model_fields.items()
        if field.description and not _holds_tables(field) and (name in chosen or not field.is_required())
    ]


def _holds_tables(field: FieldInfo) -> bool:
    return any(isinstance(kind, type) and issubclass(kind, Table) for kind in get_args(field.annotation))


def _line(name: str, field: FieldInfo, chosen: dict[str, Any]) -> str:
    if name in chosen:
        return f"{name} = {_toml(chosen[name])}"
    return f"#{name} = {_toml(field.get_default(call_default_factory=True))}"


def _description(field: FieldInfo) -> str:
    values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    named = [value for value in values if f"`{value}`" not in (field.description or "")]
    text = f" One of {', '.join(_toml(value) for value in values)}." if named and len(values) > 1 else ""
    return f"{field.description}{text}"


def _comment(text: str) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _toml(value: Any) -> str:
    """JSON of strings, numbers, booleans, flat lists and the empty table is TOML too."""
    return json.dumps(value, ensure_ascii=False)
