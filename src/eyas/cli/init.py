"""`eyas init`: a starter recipe for a target model, and which engines this machine has."""

from pathlib import Path
from typing import Annotated

import typer

from eyas.errors import RecipeError


def init(
    target: Annotated[str, typer.Option(help="Folder of the target model, or its hub name.", metavar="DIR_OR_NAME")],
    data: Annotated[str, typer.Option(help="Conversations: .jsonl, .jsonl.gz or .parquet.", metavar="FILE")] = "",
    out: Annotated[Path, typer.Option(help="Where the recipe is written.", metavar="FILE")] = Path("recipe.toml"),
    engine_python: Annotated[
        Path | None, typer.Option(help="An interpreter that holds SGLang or vLLM.", metavar="PATH")
    ] = None,
) -> None:
    """Write a commented starter recipe for a target model; never overwrites a file."""
    from eyas import fs, recipe, settings
    from eyas.engine.find import find_interpreters
    from eyas.starter import starter_recipe
    from eyas.target import load_target

    if out.exists():
        raise RecipeError(f"{out} is there already", expected="a new file", next="choose another with --out FILE")
    folder = Path(target).expanduser()
    target_path = str(folder.resolve()) if folder.is_dir() else target
    found = load_target(settings.Target.model_validate({"path": target_path}))
    data_path = _data_path(data, out)
    fs.write_atomic(out, starter_recipe(found, target_path, data_path, out))
    checked = recipe.load_recipe(out)

    print(f"target   {found.path}: {found.architecture}, {found.num_layers} layers, hidden size {found.hidden_size}")
    print(f"layers   {checked.drafter.aux_layer_ids} feed the drafter (residual stream after so many decoder layers)")
    interpreters = find_interpreters(engine_python)
    for interpreter in interpreters:
        engines = ", ".join(f"{name} {version}" for name, version in interpreter.engines.items())
        if engines or interpreter.fault:
            print(f"engine   {interpreter.path}: {engines or interpreter.fault}")
    if not any(interpreter.engines for interpreter in interpreters):
        asked = ", ".join(str(interpreter.path) for interpreter in interpreters) or "any Python on PATH"
        print(f"engine   no SGLang or vLLM in {asked}; name one with --engine-python PATH")
    print(f"capture  runs the target with engine.kind = {checked.engine.kind!r}, which needs no engine")
    print(f"wrote    {out}")
    if not data:
        print(f"         first put your conversations at {checked.data.sources[0].path}, or mend data.sources in it")
    print(f"next     eyas run {out} --limit 50   # everything, on 50 samples, in minutes")
    print(f"         eyas run {out}")


def _data_path(data: str, out: Path) -> str:
    """The source's path as it stands in the recipe: relative to it where it lies below its folder."""
    if not data:
        return "conversations.jsonl"
    path, folder = Path(data).expanduser().resolve(), out.resolve().parent
    if not path.is_file() and not any(path.parent.glob(path.name)):
        raise RecipeError(f"--data {data}: no such file", expected="a .jsonl, .jsonl.gz or .parquet file, or a glob")
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)
