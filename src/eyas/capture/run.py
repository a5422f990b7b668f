"""The capture stage: run the target over the tokens, shard by shard, and store its hidden states.

Shards are captured one after another, so that they are committed one after another: a kill loses the open shard.
"""

from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from eyas.capture.plan import batches
from eyas.capture.server import Captured, capture_from_server, server_version, state_flags
from eyas.data.tokens import Sample, Tokens
from eyas.engine.local import LocalEngine, local_dtype
from eyas.errors import DataError, EngineError, Interrupted
from eyas.progress import Progress, say, size
from eyas.record import Inputs
from eyas.run import Run
from eyas.signals import Stop, stop_on_signals
from eyas.stages import Result
from eyas.store.files import open_files
from eyas.store.format import INDEX, MANIFEST, PLAN, SHARDS, EngineInfo, Manifest, TargetInfo
from eyas.store.plan import PlanEntry
from eyas.store.reader import StoreReader
from eyas.store.writer import BadStates, StoreWriter
from eyas.target import Target, load_target


def inputs(run: Run) -> Inputs:
    """What the states depend on. Batch size, device, release and most flags of a server change them by rounding only
    and are left out."""
    recipe = run.recipe
    target = load_target(recipe.target)
    served = (
        {"engine.args that change states": state_flags(recipe.engine.args)} if recipe.engine.kind != "local" else {}
    )
    return served | {
        "target.model_digest": target.model_digest,
        "drafter.aux_layer_ids": target.aux_layer_ids(recipe.drafter.aux_layer_ids),
        "engine.kind": recipe.engine.kind,
        "engine.dtype": recipe.engine.dtype,
        "store.url": recipe.store.url,
        "store.encoding": recipe.store.encoding,
        "store.final_encoding": recipe.store.final_encoding,
        "store.shard_bytes": recipe.store.shard_bytes,
    }


def execute(run: Run) -> Result:
    """Capture what the store does not hold yet; its output is the digest of the store.

    Raises: Interrupted after SIGINT or SIGTERM, with every whole shard committed; EngineError where more than half of
        the samples were rejected; and what target, engine and store raise.
    """
    table = run.recipe.store
    target, tokens = load_target(run.recipe.target), Tokens(run.tokens_dir)
    manifest = _manifest(run, target, tokens)
    with (
        stop_on_signals("this batch" if run.recipe.engine.kind == "local" else "what is being written") as stop,
        StoreWriter.open(
            run.store_url, manifest, _entries(tokens), max_bytes=table.max_bytes, min_free_bytes=table.min_free_bytes
        ) as writer,
    ):
        captured = _capture(run, target, tokens, writer, stop)
    if stop.signum is not None:
        raise _interrupted(run, stop.signum)
    return _result(run, manifest.engine.version, captured)


def discard(run: Run) -> None:
    """Remove the store's files, the manifest last, and nothing else that may lie in its folder."""
    files = open_files(run.store_url)
    if MANIFEST not in files.sizes():
        return
    files.lock()
    try:
        files.drop(name for name in files.sizes() if name.startswith(f"{SHARDS}/"))
        for name in (INDEX, PLAN, MANIFEST):
            files.remove(name)
        files.sweep()
    finally:
        files.unlock()


def _manifest(run: Run, target: Target, tokens: Tokens) -> Manifest:
    """What all samples of the store share. Refuses tokens that another tokenizer made."""
    recipe, made_with = run.recipe, tokens.manifest["tokenizer_digest"]
    if made_with != target.tokenizer_digest:
        raise DataError(
            f"{run.tokens_dir}: made with a tokenizer of digest {made_with}",
            expected=f"{target.tokenizer_digest}, the target's ({target.path})",
            cause="the target's tokenizer was changed after prepare",
            next=run.command("run", "--redo", "prepare"),
        )
    return Manifest(
        target=TargetInfo.of(target),
        tokenizer_digest=made_with,
        template_digest=tokens.manifest["template_digest"],
        tokens_digest=tokens.manifest["digest"],
        aux_layer_ids=target.aux_layer_ids(recipe.drafter.aux_layer_ids),
        encoding=recipe.store.encoding,
        final_encoding=recipe.store.final_encoding,
        engine=EngineInfo(
            kind=recipe.engine.kind,
            dtype=_dtype(run),
            version=_version(run),
        ),
        shard_bytes=recipe.store.shard_bytes,
    )


def _dtype(run: Run) -> str:
    """Name of the number type that the target runs in."""
    engine = run.recipe.engine
    return str(local_dtype(engine)).removeprefix("torch.") if engine.kind == "local" else engine.dtype


def _version(run: Run) -> str:
    return (
        f"transformers {metadata.version('transformers')}" if run.recipe.engine.kind == "local" else server_version(run)
    )


def _entries(tokens: Tokens) -> Iterator[PlanEntry]:
    """All samples, some at a time: a million at once as Python objects would take a gigabyte."""
    for batch in tokens.table(["sample_id", "source", "split", "tokens", "supervised"]).to_batches(65536):
        yield from (PlanEntry(*values) for values in zip(*batch.to_pydict().values(), strict=True))


def _capture(run: Run, target: Target, tokens: Tokens, writer: StoreWriter, stop: Stop) -> Captured:
    """Capture what is pending until it is done or a stop is asked for."""
    if not len(writer.pending_rows()):
        return Captured(0.0, {})
    if run.recipe.engine.kind != "local":
        return capture_from_server(run, target, tokens, writer, stop)
    return Captured(_capture_here(run, target, tokens, writer, stop), {})


def _capture_here(run: Run, target: Target, tokens: Tokens, writer: StoreWriter, stop: Stop) -> float:
    """Run the target in this process; returns tokens per second."""
    plan = writer.plan
    total, left = int(plan.tokens.sum()), int(plan.tokens[writer.pending_rows()].sum())
    engine = LocalEngine(target, run.recipe.engine, writer.manifest.aux_layer_ids)
    dtype, asked = writer.manifest.engine.dtype, run.recipe.engine.dtype
    instead = f", in the place of {asked}, in which this CPU is slow" if dtype != asked else ""
    say(f"capture: {left:,} of {total:,} tokens to do, {dtype} on {engine.device}{instead}")
    with Progress("capture", total, "tokens", run.logs_dir, done=total - left) as progress:
        for batch in (
            batch for ids in writer.pending() for batch in batches(tokens.fetch(ids), run.recipe.capture.batch_tokens)
        ):
            if stop.signum is not None:
                break
            _write(engine, writer, batch)
            amount = sum(len(sample.token_ids) for sample in batch)
            progress.advance(amount, f"{size(writer.files.free_bytes())} of disk left")
    return progress.rate


def _write(engine: LocalEngine, writer: StoreWriter, batch: list[Sample]) -> None:
    """Run one batch and store it; a sample with bad states is rejected, and said.

    A sample that is bad within a batch is run alone first: attention kernels multiply masked values by 0, so a NaN in
    the padding behind a sample would reach all its rows.
    """
    states = engine.states([sample.token_ids for sample in batch], [sample.loss_mask for sample in batch])
    for sample, of_sample in zip(batch, states, strict=True):
        try:
            writer.write(sample, 0, of_sample.aux_hidden_states, of_sample.final_hidden_states)
        except BadStates as bad:
            if len(batch) > 1:
                _write(engine, writer, [sample])
                continue
            say(f"capture: rejected: {bad.seen}")
            writer.reject(sample.id, f"{bad.fault} in {bad.tensor}")


def _interrupted(run: Run, signum: int) -> Interrupted:
    rows = StoreReader(run.store_url).rows
    return Interrupted(
        signum,
        f"capture: stopped; {len(rows):,} samples ({int(rows.tokens.sum()):,} tokens) are committed in {run.store_url}",
        next=f"{run.command('run')}   # goes on with the shard that was open",
    )


def _result(run: Run, release: str, captured: Captured) -> Result:
    """Digest and figures of the whole store, also of what earlier processes wrote.

    Raises: EngineError where more than half of the samples were rejected.
    """
    store = StoreReader(run.store_url)
    written, planned = store.samples(), len(store.rows)
    reasons = Counter(reason for reason in store.rows.table["rejected"].to_pylist() if reason)
    if 2 * reasons.total() > planned:
        worst = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
        raise EngineError(
            f"{run.store_url}: {reasons.total()} of {planned} samples were rejected: {worst}",
            expected="at most half of them: a drafter of the rest would be trained on a chance selection",
            cause="the engine's number type overflows, or the checkpoint holds NaN",
            next=f"mend engine.dtype or target.path in the recipe, then: {run.command('run', '--redo', 'capture')}",
        )
    tokens = sum(sample.tokens for sample in written)
    stored = sum(amount for name, amount in store.files.sizes().items() if name.endswith(".safetensors"))
    counts: dict[str, Any] = {
        "samples": len(written),
        "tokens": tokens,
        "supervised_tokens": sum(sample.supervised for sample in written),
        "bytes": stored,
        # A rejected sample keeps its room in the shard.
        "bytes_per_token": round(stored / int(store.rows.tokens.sum()), 1),
        "releases": sorted({store.manifest.engine.version, release}),  # that began and that ended the capture
        "tokens_per_s": round(captured.tokens_per_s, 1),
        "rejected": dict(sorted(reasons.items())),
        **captured.figures,
    }
    lost = f", rejected {reasons.total():,}: {dict(reasons)}" if reasons else ""
    per_token = counts["bytes_per_token"]
    say(f"capture: {len(written):,} samples, {tokens:,} tokens, {size(stored)}, {per_token:,} bytes per token{lost}")
    return Result(store.digest, counts)
