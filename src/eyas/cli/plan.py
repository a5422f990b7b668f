"""`eyas plan`: what a run needs, before it is started."""

from typing import Annotated

import typer

from eyas.cli.options import Limit, Overrides, RecipePath, read_run


def plan(
    recipe: RecipePath,
    set_: Overrides = None,
    limit: Limit = 0,
    tokens: Annotated[int, typer.Option(help="Tokens to capture; default: counted by prepare, or the budgets.")] = 0,
    share: Annotated[
        float, typer.Option(help="Share of supervised tokens, 0 to 1; default: counted by prepare.")
    ] = 0.0,
    hidden_size: Annotated[int, typer.Option(help="The target's hidden size, where its folder isn't here yet.")] = 0,
    rate: Annotated[float, typer.Option(help="Rate of capture in tokens/s, for the hours.")] = 0.0,
) -> None:
    """Say tokens, bytes, disk and hours that a run needs, and what is missing for it."""
    from eyas.plan import find_need, plan_lines

    run = read_run(recipe, set_, limit)
    need = find_need(run, tokens=tokens, share=share, hidden_size=hidden_size)
    print("\n".join(plan_lines(run, need, rate)))
