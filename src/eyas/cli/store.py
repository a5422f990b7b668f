"""`eyas store info|ls|show`: what a store holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from eyas.store.reader import StoreReader

app = typer.Typer(no_args_is_help=True, help="Look into a store of hidden states.")

Place = Annotated[str, typer.Argument(help="A store, a recipe file, or the folder of a run.", metavar="STORE")]


def open_store(place: str) -> StoreReader:
    """The store that `place` is, or that its run has."""
    from eyas.run import open_run
    from eyas.store.reader import StoreReader

    path = Path(place)
    is_run = path.suffix == ".toml" or (path / "recipe.toml").is_file()
    return StoreReader(open_run(path).store_url if is_run else place)


@app.command()
def info(place: Place, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Account for every sample; tokens, bytes per token, fp8 error, coverage of draft vocabularies."""
    from eyas.store.account import account

    store = open_store(place)
    figures = {"store": store.files.where, "digest": store.digest} | account(store)
    if as_json:
        print(json.dumps(figures))
        return
    manifest = store.manifest
    target, engine = manifest.target, manifest.engine
    print(f"store     {store.files.where}, digest {store.digest}")
    print(f"target    {target.path}, {target.architecture}, H {target.hidden_size}, digest {target.model_digest}")
    print(f"engine    {engine.kind}, {engine.dtype}, {engine.version}")
    print(f"layers    {manifest.aux_layer_ids}, aux states {manifest.encoding}, final states {manifest.final_encoding}")
    _print_samples(figures)
    per_token = figures["bytes_per_token"]
    print("\nbytes per token")
    _table([[name, f"{value:,.1f}"] for name, value in per_token.items()])
    if figures["relative_error"]:
        print("\nrelative error of fp8, by layer")
        errors = figures["relative_error"].items()
        _table([[kind, *(f"{value:.4f}" for value in values)] for kind, values in errors])
    print("\ndraft vocabulary: share of supervised training tokens it holds")
    head = ["size", "coverage", "count of its rarest token"]
    vocabulary = figures["vocabulary"]
    _table([head, *([f"{row['size']:,}", f"{row['coverage']:.4%}", f"{row['rarest']:,}"] for row in vocabulary)])


@app.command()
def ls(
    place: Place,
    split: Annotated[str, typer.Option(help="Only samples of this split.")] = "",
    limit: Annotated[int, typer.Option(help="Print at most N samples; 0: all.", min=0)] = 50,
) -> None:
    """List samples in the order of the plan: id, split, source, tokens, supervised tokens, shard, state."""
    store = open_store(place)
    chosen = store.plan.equal("split", split).nonzero()[0].tolist() if split else range(len(store.plan))
    for row in chosen[: limit or None]:
        entry = store.plan.table.slice(row, 1).to_pylist()[0]
        print(
            f"{entry['sample_id']}  {entry['split']:8}{entry['source']:16}{entry['tokens']:>7}{entry['supervised']:>7}"
            f"  shard {entry['shard']:06d}  {_state(store, entry['sample_id'])}"
        )
    if limit and len(chosen) > limit:
        print(f"... and {len(chosen) - limit:,} more (--limit 0 prints all)")


@app.command()
def show(place: Place, sample: Annotated[str, typer.Argument(help="Its id, or the first digits of it.")]) -> None:
    """Print one sample: place, checksums, token ids with the supervised ones in brackets, size of its states."""
    from eyas.errors import StoreError

    store = open_store(place)
    rows = [row for row in range(len(store.plan)) if store.plan.id(row).startswith(sample)]
    if len(rows) != 1:
        raise StoreError(
            f"{store.files.where}: {len(rows)} samples begin with {sample!r}", next=f"eyas store ls {place}"
        )
    found = store.plan.id(rows[0])
    state = _state(store, found)
    for name, value in store.plan.table.slice(rows[0], 1).to_pylist()[0].items():
        print(f"{name:12} {value}")
    print(f"{'state':12} {state}")
    if state != "written":
        return
    index_row = store.rows.table.slice(store.rows.find(found), 1).to_pylist()[0]
    for name, value in index_row.items():
        if isinstance(value, bytes):
            print(f"{name} {value.hex()}")
    stored = store.read(found)
    ids = [
        f"[{token}]" if on else str(token)
        for token, on in zip(stored.token_ids.tolist(), stored.loss_mask, strict=True)
    ]
    print(f"{'token ids':12} {' '.join(ids)}")
    sizes = stored.aux_hidden_states.float().square().mean((0, 2)).sqrt().tolist()
    for layer, value in zip(store.manifest.aux_layer_ids, sizes, strict=True):
        print(f"aux states, layer {layer}: root mean square {value:.4g}")
    if len(stored.final_hidden_states):
        print(f"final states: root mean square {stored.final_hidden_states.float().square().mean().sqrt():.4g}")


def _state(store: StoreReader, sample_id: str) -> str:
    row = store.rows.find(sample_id)
    if row is None:
        return "pending"
    reason = store.rows.table["rejected"][row].as_py()
    return f"rejected: {reason}" if reason else "written"


def _print_samples(figures: dict[str, Any]) -> None:
    samples = figures["samples"]
    rejected = sum(samples["rejected"].values())
    print(
        f"\nsamples   {samples['in']:,} in = {samples['written']:,} written + {rejected:,} rejected "
        f"+ {samples['pending']:,} pending"
    )
    for reason, count in samples["rejected"].items():
        print(f"          {count:,} rejected: {reason}")
    print(f"tokens    {figures['tokens']:,}, of them {figures['supervised_tokens']:,} supervised\n")
    names = ["source", "in", "written", "rejected", "pending", "tokens", "supervised_tokens"]
    head = [name.replace("_tokens", "") for name in names]
    _table([head, *([row["source"], *(f"{row[name]:,}" for name in names[1:])] for row in figures["sources"])])


def _table(rows: list[list[str]]) -> None:
    """First column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *rest in rows:
        print(
            "  "
            + first.ljust(widths[0])
            + "".join(f"  {cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        )
