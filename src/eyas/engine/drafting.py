"""A server for users: the [serving] table as a run of its own, with or without the drafter.

Everything that starts, watches and stops servers reads `[engine]`; here `[serving]` takes its place, and the server's
state lies in a folder of its own, so that it may live beside the one that captures.
"""

import dataclasses
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from eyas.engine.kinds import KINDS
from eyas.engine.profile import load_profile
from eyas.errors import ExportError, RecipeError
from eyas.run import Run
from eyas.settings import Engine, Serving

SERVING = "serving"
_TENSOR_PARALLEL = ("--tp-size", "--tp", "--tensor-parallel-size", "-tp")
Kind = Literal["sglang", "vllm"]


@dataclass(frozen=True)
class Drafting:
    """How a drafter is served.

    Attributes:
        folder: config.json and weights.
        drafts: tokens drafted in a row (steps).
        top_k: drafts tried for each token; 1 is a chain.
        draft_tokens: tokens verified at once, the newest one included.
    """

    folder: Path
    drafts: int
    top_k: int = 1
    draft_tokens: int = 0

    @property
    def topology(self) -> str:
        return "chain" if self.top_k == 1 else f"tree, {self.verified} tokens"

    @property
    def verified(self) -> int:
        return self.drafts + 1 if self.top_k == 1 else self.draft_tokens

    def flags(self, kind: Kind) -> list[str]:
        """What makes the engine serve it. SGLang 0.5.11 to 0.5.23; vLLM 0.10.2 and later.

        Raises: RecipeError for a tree that the engine doesn't have, or one of no definite size.
        """
        if self.top_k > 1 and kind == "vllm":
            raise RecipeError(
                f"serving.top_k = {self.top_k} with vLLM",
                expected="1: vLLM drafts EAGLE-3 in a chain",
                next="--set serving.top_k=1",
            )
        most = self.drafts * self.top_k**2 + 1
        if self.top_k > 1 and not self.drafts < self.draft_tokens <= most:
            raise RecipeError(
                f"serving.draft_tokens = {self.draft_tokens} with drafts = {self.drafts} and top_k = {self.top_k}",
                expected=f"{self.drafts + 1} to {most}: how many tokens of the tree are verified",
                next=f"--set serving.draft_tokens={min(most, 2 * self.drafts * self.top_k)}",
            )
        if kind == "vllm":
            config = {"method": "eagle3", "model": str(self.folder), "num_speculative_tokens": self.drafts}
            return ["--speculative-config", json.dumps(config)]
        return [
            *("--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", str(self.folder)),
            *("--speculative-num-steps", str(self.drafts)),
            *("--speculative-eagle-topk", str(self.top_k)),
            *("--speculative-num-draft-tokens", str(self.verified)),
        ]


def serving_kind(run: Run) -> Kind:
    """The engine of [serving], else that of [engine]. Raises RecipeError where both are local."""
    kind = run.recipe.serving.kind or run.recipe.engine.kind
    if kind not in ("sglang", "vllm"):
        raise RecipeError(
            "serving.kind is empty: no engine is named that serves the drafter",
            expected="sglang or vllm, and serving.python, the interpreter that holds it",
            next="--set serving.kind=vllm --set serving.python=PATH",
        )
    return kind


def tuned_profile(run: Run, kind: Kind) -> Path:
    """Where `eyas tune` writes what it found."""
    return run.dir / f"tuned-{kind}.toml"


def find_profile(run: Run) -> str:
    """The profile that [serving] names, else the tuned one, else `serving`."""
    tuned = tuned_profile(run, serving_kind(run))
    return run.recipe.serving.profile or (str(tuned) if tuned.is_file() else SERVING)


def find_drafting(run: Run, profile: str = "") -> Drafting:
    """The drafter's settings: the profile's where it has some, else those of [serving].

    Raises: ExportError where there is no drafter yet; RecipeError for an unknown profile.
    """
    table, tuned = run.recipe.serving, load_profile(profile or find_profile(run), "serving").drafter
    folder = Path(table.drafter) if table.drafter else run.export_dir
    if not (folder / "config.json").is_file():
        raise ExportError(
            f"{folder}: no config.json",
            expected="a drafter's folder, which `eyas export` writes",
            next=f"mend serving.drafter, or: {run.command('run')}",
        )
    chosen = tuned or table
    return Drafting(folder, chosen.drafts, chosen.top_k, chosen.draft_tokens)


def serving_run(run: Run, drafting: Drafting | None, *, profile: str = "", folder: str = SERVING) -> Run:
    """The run whose server is the one that [serving] describes.

    Args:
        drafting: None: the target alone, all other flags alike.
        profile: name or file; "": `find_profile`.
        folder: of the server's state, in the run's folder.
    Raises: RecipeError.
    """
    kind, table = serving_kind(run), run.recipe.serving
    own = drafting.flags(kind) if drafting else []
    chosen = profile or find_profile(run)
    update = _update(table, run.recipe.engine) | {"kind": kind, "profile": chosen}
    update["args"] = [*own, *_ranks(run, kind, chosen), *table.args]
    if folder != SERVING:  # one of several that are measured
        update["port"] = 0
    recipe = run.recipe.model_copy(update={"engine": run.recipe.engine.model_copy(update=update)})
    return dataclasses.replace(run, recipe=recipe, engine_folder=folder)


def _ranks(run: Run, kind: Kind, profile: str) -> list[str]:
    """Tensor parallel as engine.args has it, by this engine's name: a model that was captured on several GPUs doesn't
    fit on one. Nothing where serving.args or the profile says it, or engine.args doesn't."""
    own = [*run.recipe.serving.args, *(entry.flag for entry in load_profile(profile, "serving").flags)]
    words = [part for word in run.recipe.engine.args for part in word.split("=", 1)]
    given = [value for flag, value in pairwise(words) if flag in _TENSOR_PARALLEL]
    if not given or any(word.partition("=")[0] in _TENSOR_PARALLEL for word in own):
        return []
    return ["--" + KINDS[kind].ranks.replace("_", "-"), given[-1]]


def _update(table: Serving, engine: Engine) -> dict[str, object]:
    """Keys of [engine] that [serving] has too; an interpreter that it doesn't name comes with its environment."""
    env = table.env if table.python else engine.env | table.env
    return {
        "python": table.python or engine.python,
        "env": env,
        "dtype": table.dtype or engine.dtype,
        "host": table.host,
        "port": table.port,
    }
