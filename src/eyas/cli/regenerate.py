"""`eyas regenerate`: every answer written anew by the target, through the servers that run it."""

from eyas.cli.options import Limit, Overrides, RecipePath, Redo, read_run


def regenerate(recipe: RecipePath, set_: Overrides = None, limit: Limit = 0, redo: Redo = False) -> None:
    """Have the target itself write all answers, through regenerate.servers (regenerated/)."""
    from eyas.stages import run_stage

    run_stage(read_run(recipe, set_, limit), "regenerate", redo=redo)
