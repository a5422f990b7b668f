"""The engines that have servers."""

from eyas.engine import sglang, vllm
from eyas.engine.launch import Kind, Launch
from eyas.run import Run
from eyas.target import Target

KINDS: dict[str, Kind] = {kind.name: kind for kind in (sglang.SGLANG, vllm.VLLM)}


def plan_launch(run: Run, target: Target, version: str) -> Launch:
    """The command of the recipe's engine, for the release that its interpreter holds; raises what the engine's own
    `plan_launch` does."""
    return (vllm if run.recipe.engine.kind == "vllm" else sglang).plan_launch(run, target, version)


def check_release(kind: str, version: str, table: str) -> None:
    """Raises EngineError for a release that isn't supported."""
    (vllm if kind == "vllm" else sglang).check_release(version, table)
