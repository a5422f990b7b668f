"""`eyas verify`: prove that a store holds what was captured."""

from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.options import Limit, Overrides, Redo, read_run

# A string, for a Path makes s3:/ of s3://
Place = Annotated[str, typer.Argument(help="Recipe file, the folder of a run, or a store.", metavar="RECIPE")]


def verify(
    recipe: Place,
    set_: Overrides = None,
    limit: Limit = 0,
    redo: Redo = False,
    sample: Annotated[
        float, typer.Option(help="Read only this share of the samples, at least one a shard; proves nothing to `run`.")
    ] = 1.0,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop bad shards, so that capture makes just those again.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Threads that read; 0: one a core, at most 8.", min=0)] = 0,
) -> None:
    """Prove that the store holds what was captured: checksums, shapes, values, accounting. RECIPE may be a store."""
    from eyas.errors import RecipeError
    from eyas.run import Run
    from eyas.stages import run_stage
    from eyas.store import stage
    from eyas.store.format import MANIFEST
    from eyas.store.verify import verify_store

    if not 0 < sample <= 1:
        raise RecipeError(f"--sample {sample}", expected="a share above 0 and at most 1")
    run: Run | None = None
    url, again = recipe, "eyas capture RECIPE"
    if "://" not in recipe and not (Path(recipe) / MANIFEST).is_file():
        run = read_run(Path(recipe), set_, limit)
        url, again = run.store_url, run.command("capture")
    if run is not None and sample == 1 and not repair:
        if workers:
            raise RecipeError(f"--workers {workers}", expected="with --sample or --repair, or where a store is named")
        run_stage(run, "verify", redo=redo)
        return
    if redo:
        raise RecipeError("--redo", expected="where the stage is run: without --sample and --repair, on a recipe")
    report = verify_store(url, fraction=sample, workers=workers, logs_dir=run.logs_dir if run else None)
    if repair:
        stage.repair(url, report, run)
        print(f"dropped {len(report.bad_shards)} shards of {len(report.recapture):,} samples; sound ones are kept")
        if report.bad_shards or report.pending:
            print(f"next: {again}")
    else:
        stage.raise_faults(url, report, run)
        rejected = sum(report.rejected.values())
        print(f"no fault: {report.checked:,} samples read, {report.written:,} written, {rejected:,} rejected")
