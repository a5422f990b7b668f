"""`eyas store import|export`: from and to the folders of speculators and SpecForge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli.store import app, open_store

if TYPE_CHECKING:
    from eyas.store.convert.importer import ImportReport
    from eyas.target import Target

_FORMATS = (
    "speculators-v1 (data_{i}.pt), speculators (Arrow, hs_{row}.safetensors), or specforge (rows_*/data_{i}.ckpt)"
)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(help="The other tool's folder.", metavar="FOLDER")],
    store: Annotated[str, typer.Argument(help="The store to make: a folder or URL.", metavar="STORE")],
    format_: Annotated[str, typer.Option("--from", help=_FORMATS, metavar="FORMAT")],
    target: Annotated[Path, typer.Option(help="Folder of the target model that was captured.", metavar="DIR")],
    tool_layer_ids: Annotated[
        str, typer.Option(help="The three aux layers as that tool was given them.", metavar="A,B,C")
    ] = "",
    aux_layer_ids: Annotated[
        str,
        typer.Option(help="The same in Eyas's meaning: the number of decoder layers before each.", metavar="A,B,C"),
    ] = "",
    final_state: Annotated[
        str, typer.Option(help="pre_norm or post_norm, where the folder isn't as that tool writes it.")
    ] = "",
    encoding: Annotated[str, typer.Option(help="Aux states: bf16 or fp8.")] = "bf16",
    final_encoding: Annotated[str, typer.Option(help="Final states: bf16 or fp8.")] = "bf16",
    shard_bytes: Annotated[int, typer.Option(help="Aimed size of one shard, bytes.", min=1 << 16)] = 1 << 30,
    source: Annotated[str, typer.Option(help="Name of the samples' source; default: the folder's.")] = "",
    heldout: Annotated[float, typer.Option(help="Share of samples to hold out from training.", min=0, max=1)] = 0.0,
    pad_id: Annotated[int, typer.Option(help="Cut unsupervised tokens of this id off at the end; -1: none.")] = -1,
    skip_bad_files: Annotated[
        bool, typer.Option("--skip-bad-files", help="Leave out files that give no sample; they are counted.")
    ] = False,
) -> None:
    """Make a store of another tool's captured states. Nothing that the folder doesn't say is guessed."""
    from eyas.errors import RecipeError
    from eyas.store.convert.importer import ImportOptions, import_folder

    for option, value, allowed in (
        ("final-state", final_state, ("", "pre_norm", "post_norm")),
        ("encoding", encoding, ("bf16", "fp8")),
        ("final-encoding", final_encoding, ("bf16", "fp8")),
    ):
        if value not in allowed:
            raise RecipeError(f"--{option} {value}", expected=" or ".join(filter(None, allowed)))
    options = ImportOptions(
        aux_layer_ids=_ids("aux-layer-ids", aux_layer_ids),
        tool_layer_ids=_ids("tool-layer-ids", tool_layer_ids),
        final_state=final_state or None,  # type: ignore[arg-type]
        encoding=encoding,  # type: ignore[arg-type]
        final_encoding=final_encoding,  # type: ignore[arg-type]
        shard_bytes=shard_bytes,
        source=source,
        heldout=heldout,
        pad_id=None if pad_id < 0 else pad_id,
        skip_bad_files=skip_bad_files,
    )
    if options.aux_layer_ids and options.tool_layer_ids:
        raise RecipeError("--aux-layer-ids and --tool-layer-ids are both given", expected="one of them")
    _print_import(import_folder(format_, folder, store, _target(target), options), format_, store)


@app.command()
def export(
    store: Annotated[str, typer.Argument(help="A store, a recipe file, or the folder of a run.", metavar="STORE")],
    folder: Annotated[Path, typer.Argument(help="The folder to make.", metavar="FOLDER")],
    format_: Annotated[str, typer.Option("--as", help=_FORMATS, metavar="FORMAT")],
    target: Annotated[
        Path | None, typer.Option(help="The target's folder, for the weight of its last norm.", metavar="DIR")
    ] = None,
    split: Annotated[str, typer.Option(help="Only samples of this split.")] = "",
    compress: Annotated[bool, typer.Option("--compress", help="gzip the files (specforge only).")] = False,
) -> None:
    """Write a store as a folder that another tool trains from."""
    from eyas.store.convert.exporter import export_store

    url = open_store(store).files.where
    report = export_store(
        format_, url, folder, target=_target(target) if target else None, split=split or None, compress=compress
    )
    print(f"{folder}: {report.samples:,} samples, {report.tokens:,} tokens; ids, masks and aux states are exact")
    print(f"aux layers {report.aux_layer_ids}, which {format_} calls {report.tool_layer_ids}")
    if format_ == "specforge":
        print("final states: after the norm, exact where the store has them")
    else:
        print("final states: divided by the weight of the target's last norm, which takes them back to the stored ones")
    print(f"zeros are written for {report.empty_rows:,} final states outside answers, which the store doesn't have")
    if format_ == "specforge" and report.ends:
        print(
            f"SpecForge 0.2.0 learns from {report.ends:,} of them, one after each answer, for it moves the final "
            "states by one token and the mask not (its issue 885)"
        )


def _print_import(report: ImportReport, format_: str, store: str) -> None:
    rejected = sum(report.rejected.values())
    print(
        f"{store}: {report.read:,} read = {report.written:,} written + {rejected:,} rejected; {report.tokens:,} tokens"
    )
    for reason, count in sorted(report.rejected.items()):
        print(f"  {count:,} rejected: {reason}")
    print(f"aux layers {report.aux_layer_ids}, which {format_} calls {report.tool_layer_ids}")
    print(
        f"aux states: {report.dtype} in the folder" + (", exact" if report.dtype == "bfloat16" else ", rounded to bf16")
    )
    here = "before the norm in the folder; the target's last norm was applied"
    if report.final_state == "post_norm":
        here = "after the norm in the folder, as they are stored here"
    print(f"final states: {here}")
    if report.fit:
        stated, other, count = report.fit
        print(
            f"log-probability of the next supervised token, mean of {count:,}: {stated:.3f}; "
            f"{other:.3f} if the convention were the other"
        )
        if other > stated + 0.05:
            print("warning: the other convention predicts the text better; see --final-state")
    else:
        print(f"final states are unchecked: {report.unchecked}")
    if report.repeated_tail:
        print(
            f"{report.repeated_tail:,} tokens at the ends of samples are unsupervised and repeat one id; "
            "where that is padding, import again with --pad-id"
        )
    print(f"digest {report.digest}")


def _ids(option: str, text: str) -> list[int] | None:
    from eyas.errors import RecipeError

    if not text:
        return None
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        ids = []
    if len(ids) != 3:
        raise RecipeError(f"--{option} {text}", expected="three whole numbers, as in 2,16,29")
    return ids


def _target(folder: Path) -> Target:
    from eyas.settings import Target as TargetTable
    from eyas.target import load_target

    return load_target(TargetTable(path=str(folder)))
