"""`eyas tune`: the settings that serve the drafter fastest."""

from typing import Annotated

import typer

from eyas.cli.options import Limit, Overrides, RecipePath, read_run


def tune(
    recipe: RecipePath,
    set_: Overrides = None,
    limit: Limit = 0,
    engine: Annotated[
        str, typer.Option(help="sglang or vllm, as --set serving.kind=...; see [serving].", metavar="KIND")
    ] = "",
    choices: Annotated[
        str, typer.Option(help="What may be changed: a name or a TOML file; default: the engine's.", metavar="NAME")
    ] = "",
    minutes: Annotated[float, typer.Option(help="Most time, earlier calls included, minutes.", min=0)] = 30.0,
    streams: Annotated[int, typer.Option(help="Answers at once; 0: the first of serving.concurrency.", min=0)] = 0,
    most: Annotated[
        int, typer.Option(help="Up to so many combinations all are tried; beyond, one change at a time.", min=1)
    ] = 12,
    redo: Annotated[bool, typer.Option("--redo", help="Forget what was measured.")] = False,
) -> None:
    """Find drafter and engine settings by measuring, and write the best as the run's profile (tuned-ENGINE.toml)."""
    from eyas.engine.choices import load_choices
    from eyas.engine.drafting import serving_kind
    from eyas.engine.server import end_left
    from eyas.evaluate.tune import tune as find_best
    from eyas.evaluate.tuned import lines
    from eyas.export.stage import check_served
    from eyas.report.page import write_report
    from eyas.signals import stop_on_signals
    from eyas.stages import alone, noting_errors, remove_tree

    run = read_run(recipe, [*(set_ or []), *([f"serving.kind={engine}"] if engine else [])], limit)
    named = load_choices(choices or serving_kind(run))
    check_served(run)
    with noting_errors(run, "tune"), alone(run), stop_on_signals("this pass") as stop:
        if redo:
            end_left(run, "tune")
            remove_tree(run.dir / "tune")
        tuned = find_best(run, named, minutes=minutes, streams=streams, most=most, stop=stop)
    print("\n".join(lines(tuned)))
    print(f"wrote {tuned.path}; `eyas serve start --with-drafter` and `eyas deploy` use it")
    print(write_report(run))
