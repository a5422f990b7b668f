"""`eyas prepare`: conversations to token ids and loss masks, or a look at the first of them."""

from typing import Annotated

import typer

from eyas.cli.options import Limit, Overrides, RecipePath, Redo, read_run


def prepare(
    recipe: RecipePath,
    set_: Overrides = None,
    limit: Limit = 0,
    redo: Redo = False,
    preview: Annotated[
        int,
        typer.Option(
            help="Print the first N samples of each source, the supervised part marked; nothing is written.",
            metavar="N",
            min=0,
        ),
    ] = 0,
) -> None:
    """Turn conversations into token ids and loss masks (tokens/)."""
    run = read_run(recipe, set_, limit)
    if not preview:
        from eyas.stages import run_stage

        run_stage(run, "prepare", redo=redo)
        return
    from rich.console import Console

    from eyas.data.preview import preview as preview_samples
    from eyas.target import load_target

    console = Console(highlight=False, soft_wrap=True)
    data = run.data if run.regenerated_dir.is_dir() else run.recipe.data
    for text in preview_samples(data, load_target(run.recipe.target), preview, colour=console.is_terminal):
        console.print(text)
