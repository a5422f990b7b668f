"""The recipe: one strict TOML file that says everything a run needs.

Unknown keys are refused with the nearest name. Every field has a description with its unit; `eyas init` writes them
as comments. `--set table.key=value` overrides a key; the value is read as TOML, or as a plain string where that fails.
"""

import difflib
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field, ValidationError, model_validator

from eyas.errors import RecipeError
from eyas.settings import (
    Capture,
    Data,
    Drafter,
    Engine,
    Evaluate,
    Export,
    Regenerate,
    Serving,
    Source,
    Store,
    Table,
    Target,
    Train,
)


class Recipe(Table):
    """All a run needs. Relative paths of inputs are relative to the recipe file, those of
    `runs_dir` and `store.url` to the current folder."""

    name: str = Field(
        "",
        pattern=r"^([A-Za-z0-9_-][A-Za-z0-9._-]*)?$",
        description="The run's name: its folder is runs_dir/name. Default: the file's name.",
    )
    runs_dir: str = Field("runs", description="Folder that holds runs.")
    target: Target
    data: Data = Data()
    regenerate: Regenerate = Regenerate()
    engine: Engine = Engine()
    capture: Capture = Capture()
    store: Store = Store()
    drafter: Drafter = Drafter()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    export: Export = Export()
    serving: Serving = Serving()

    @model_validator(mode="after")
    def _states_from_somewhere(self) -> "Recipe":
        if not self.data.sources and not self.store.url:
            raise ValueError("either data.sources says what is captured, or store.url where an imported store lies")
        return self


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and check a recipe.

    Args:
        path: the TOML file.
        overrides: `table.key=value` strings.
    Returns: the recipe with its name filled in and its input paths made absolute.
    Raises: RecipeError (exit code 2), naming file, key, and the nearest known key.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(
            f"{path}: no such recipe",
            cause="a typing error, or none was made yet",
            next="eyas init --target MODEL_FOLDER",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid TOML: {error}", next=f"mend that line of {path}") from None
    for override in overrides:
        _apply(raw, override)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        raise RecipeError(
            f"{path}: {_explain(error)}", next=f"edit {path}, or override with --set table.key=value"
        ) from None
    return _resolve(recipe, path)


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise RecipeError(
            f"--set {override}: no key=value", expected="--set table.key=value, such as --set train.lr=1e-4"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, last = key.strip().split(".")
    node = raw
    for table in tables:
        node = node.setdefault(table, {})
        if not isinstance(node, dict):
            raise RecipeError(f"--set {override}: {table} is no table of single keys", expected="--set table.key=value")
    node[last] = value


def _explain(error: ValidationError) -> str:
    """One line a fault: key, what is wrong, and the nearest known key for an unknown one."""
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = known_keys()
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5) or [
                name for name in known if name.rsplit(".", 1)[-1] == str(fault["loc"][-1])
            ]
            lines.append(f"unknown key `{key}`" + (f"; did you mean `{near[0]}`?" if near else ""))
        else:
            seen = "" if fault["type"] == "missing" else f" (got {fault['input']!r})"
            lines.append(f"`{key}`: {fault['msg']}{seen}" if key else fault["msg"])
    return "\n  ".join(lines)


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as TOML that `load_recipe` reads back to an equal one, from any folder."""
    return tomli_w.dumps(recipe.model_dump())


def known_keys() -> list[str]:
    """Every key of a recipe, as table.key; list tables without their index."""
    keys = []
    for name, field in Recipe.model_fields.items():
        table = field.annotation
        if isinstance(table, type) and issubclass(table, Table):
            keys.append(name)
            keys += [f"{name}.{key}" for key in table.model_fields]
        else:
            keys.append(name)
    return keys + [f"data.sources.0.{key}" for key in Source.model_fields]


def _resolve(recipe: Recipe, path: Path) -> Recipe:
    """Make input paths absolute (relative to the recipe file) and give the run a name."""
    folder = path.resolve().parent

    def absolute(text: str) -> str:
        expanded = Path(text).expanduser()
        return str(expanded if expanded.is_absolute() else folder / expanded)

    sources = [
        source.model_copy(update={"path": source.path and absolute(source.path)}) for source in recipe.data.sources
    ]
    prompts = [absolute(prompts) for prompts in recipe.data.evaluation_prompts]
    data = recipe.data.model_copy(
        update={
            "sources": sources,
            "evaluation_prompts": prompts,
            "template": recipe.data.template and absolute(recipe.data.template),
        }
    )
    train = recipe.train.model_copy(update={"start": recipe.train.start and absolute(recipe.train.start)})
    target_path = recipe.target.path
    # A hub name ("org/model") looks like a relative path: it is one only if that folder is there.
    if target_path.startswith((".", "~", "/")) or (folder / target_path).exists():
        target_path = absolute(target_path)
    target = recipe.target.model_copy(update={"path": target_path})
    python, profile = recipe.engine.python, recipe.engine.profile
    engine_paths = {"python": absolute(python) if "/" in python else python}
    engine_paths["profile"] = absolute(profile) if profile.endswith(".toml") else profile
    engine = recipe.engine.model_copy(update=engine_paths)
    serving = _resolve_serving(recipe.serving, absolute)
    update = {"name": recipe.name or path.stem, "runs_dir": _here(recipe.runs_dir)}
    url = recipe.store.url
    store = recipe.store.model_copy(update={"url": _here(url) if url and "://" not in url else url})
    tables = {"data": data, "target": target, "engine": engine, "store": store, "train": train, "serving": serving}
    return recipe.model_copy(update=update | tables)


def _here(text: str) -> str:
    return str(Path(text).expanduser().resolve())


def _resolve_serving(table: Serving, absolute: Callable[[str], str]) -> Serving:
    paths = {
        "python": absolute(table.python) if "/" in table.python else table.python,
        "profile": absolute(table.profile) if table.profile.endswith(".toml") else table.profile,
        "drafter": table.drafter and absolute(table.drafter),
    }
    return table.model_copy(update=paths | {"prompts": [absolute(prompts) for prompts in table.prompts]})
