"""A run's folder: where each thing of a run lies."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas import fs
from eyas.errors import RecipeError
from eyas.recipe import Recipe, dump_recipe, load_recipe
from eyas.settings import Data


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        recipe: checked, with absolute paths.
        arguments: what the user gave (recipe file or run folder, then overrides), for commands in messages.
        engine_folder: where the state of its server lies, in the run's folder; a run may have several.
    """

    recipe: Recipe
    arguments: str
    engine_folder: str = "engine"

    @property
    def dir(self) -> Path:
        suffix = f"-limit{self.recipe.data.limit}" if self.recipe.data.limit else ""
        return Path(self.recipe.runs_dir) / f"{self.recipe.name}{suffix}"

    @property
    def engine_table(self) -> str:
        """The recipe's table that says how its server is started: what lies in [engine] of the recipe may be
        [serving]'s (engine/drafting.py)."""
        return "engine" if self.engine_folder == "engine" else "serving"

    @property
    def has_own_store(self) -> bool:
        """Whether this run captures its store; False where the recipe names no data: the store was imported."""
        return bool(self.recipe.data.sources)

    @property
    def regenerated_dir(self) -> Path:
        return self.dir / "regenerated"

    @property
    def data(self) -> Data:
        """[data] as `prepare` reads it: where the target writes the answers, each source is what came of it."""
        data = self.recipe.data
        if not self.recipe.regenerate.servers:
            return data
        sources = [
            source.model_copy(
                update={
                    "path": str(self.regenerated_dir / f"{index:03d}.jsonl"),
                    "name": source.name or source.preset or Path(source.path).name,
                    "preset": "",
                    "format": "tokens",
                }
            )
            for index, source in enumerate(data.sources)
        ]
        return data.model_copy(update={"sources": sources})

    @property
    def tokens_dir(self) -> Path:
        return self.dir / "tokens"

    @property
    def store_url(self) -> str:
        """The store's place: a folder or an fsspec URL."""
        return self.recipe.store.url or str(self.dir / "store")

    @property
    def train_dir(self) -> Path:
        return self.dir / "train"

    @property
    def export_dir(self) -> Path:
        return self.dir / "export"

    @property
    def logs_dir(self) -> Path:
        return self.dir / "logs"

    def command(self, stage: str, *options: str) -> str:
        """`eyas STAGE ...` as the user can paste it."""
        return " ".join(["eyas", stage, self.arguments, *options])


def open_run(source: Path, overrides: Sequence[str] = ()) -> Run:
    """The run that a recipe file, or the folder of an earlier run, describes."""
    recipe_path = source / "recipe.toml" if source.is_dir() else source
    if source.is_dir() and not recipe_path.is_file():
        raise RecipeError(f"{source}: no recipe.toml in this folder", expected="a recipe file or the folder of a run")
    arguments = " ".join([shlex.quote(str(source)), *(f"--set {shlex.quote(text)}" for text in overrides)])
    return Run(load_recipe(recipe_path, overrides), arguments)


def save_recipe(run: Run) -> None:
    """Keep the recipe as it was used, overrides applied, beside its results (`runs/NAME/recipe.toml`)."""
    fs.write_atomic(run.dir / "recipe.toml", dump_recipe(run.recipe))
