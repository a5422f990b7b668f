"""The stage `prepare`: sources to tokens/.

All sources are read once, chunk by chunk; samples wait on disk (spill.py) until all are known. Then doubles are
dropped, splits settled, budgets and the limit applied, and what stays is written in a seeded order.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eyas import fs
from eyas.data.account import LATE_REASONS, Account
from eyas.data.choose import Chooser
from eyas.data.contamination import load_contamination
from eyas.data.encode import Encoder
from eyas.data.filters import Filters
from eyas.data.make import Maker
from eyas.data.near import NearDuplicates
from eyas.data.pool import Job, run_jobs
from eyas.data.presets import PRESETS, fetch, local_files
from eyas.data.read import read_chunks, source_files
from eyas.data.shapes import guess_shape
from eyas.data.spill import Spill
from eyas.data.template import load_template, tool_style, unprompted_header
from eyas.data.tokens import TokensWriter
from eyas.errors import DataError
from eyas.progress import Progress, say
from eyas.record import Inputs
from eyas.run import Run
from eyas.settings import Data, Source
from eyas.stages import Result, remove_tree
from eyas.target import Target, load_target

# Larger files are known by size, time of change and both ends: 100 GB would take a minute at every `eyas run`.
_WHOLE_DIGEST_BYTES = 256 << 20
# Starting a process takes as long as tokenising some MB here.
_BYTES_PER_WORKER = 4 << 20


class SourceFile(NamedTuple):
    """A file of a source; `source` is its place in the recipe."""

    source: int
    path: Path


def inputs(run: Run) -> Inputs:
    """What tokens/ depends on: the recipe's [data], the source files, tokenizer, template and vocabulary."""
    data, target = run.data, load_target(run.recipe.target)
    pairs: Inputs = {
        f"data.{key}": value for key, value in data.model_dump().items() if key not in ("sources", "workers")
    }
    for index, source in enumerate(data.sources):
        pairs[f"data.sources.{index}"] = source.model_dump()
    pairs |= {f"content of {path}": source_identity(path) for _, path in find_files(data)}
    for pattern in data.evaluation_prompts:
        pairs |= {f"content of {path}": source_identity(path) for path in source_files(pattern)}
    template = load_template(data.template, target.tokenizer, data.template_args)
    return pairs | {
        "tokenizer": target.tokenizer_digest,
        "chat template": template.digest if template else "",
        "vocabulary": target.vocab_size,
    }


def discard(run: Run) -> None:
    """Remove tokens/."""
    remove_tree(run.tokens_dir)


def execute(run: Run) -> Result:
    """Write tokens/. Raises: DataError with file and line; nothing half-written is left."""
    data, target = run.data, load_target(run.recipe.target)
    maker = make_maker(data, target)
    files = find_files(data)
    account = Account([source_name(source) for source in data.sources])
    spill_dir = run.dir / f"{fs.PARTIAL_PREFIX}spill"
    with (
        Spill(spill_dir, _text_bytes(files), data.seed) as spill,
        NearDuplicates(spill_dir / "signatures", data.near_duplicates) as near,
        TokensWriter(run.tokens_dir) as writer,
    ):
        _make_all(run, maker, files, account, spill, near, writer)
        account.check()
        spill.close()
        barred = np.zeros(account.records, dtype=np.uint8)
        barred[near.find()] = LATE_REASONS.index("near_duplicate")
        chooser = Chooser(data, spill, account, [str(path) for _, path in files], barred)
        chooser.write(writer)
        _refuse_long(run, target, writer)
        _warn(account, writer)
        manifest = writer.finish(
            {
                "by_source": account.by_source(chooser.kept, chooser.late, writer.by_source),
                "mended": dict(sorted(account.mended.items())),
                "tokenizer_digest": target.tokenizer_digest,
                "template_digest": maker.template.digest if maker.template else "",
                "vocab_size": target.vocab_size,
            }
        )
    counts = {key: manifest[key] for key in ("samples", "tokens", "supervised_tokens", "by_split", "by_source")}
    return Result(manifest["digest"], counts)


def make_maker(data: Data, target: Target) -> Maker:
    """What turns records into samples for this recipe and target.

    Raises: DataError where the tokenizer makes ids that the target doesn't have, or the template can't be read.
    """
    encoder = Encoder(target.tokenizer, target.eos_token_ids)
    template = load_template(data.template, target.tokenizer, data.template_args)
    if len(target.tokenizer) > target.vocab_size:
        raise DataError(
            f"{target.path}: the tokenizer has {len(target.tokenizer)} tokens, the model {target.vocab_size}",
            expected="no more tokens than rows of the model's embedding",
            cause="the tokenizer of another model, or tokens were added to it",
            next="copy the model's own tokenizer files into the folder",
        )
    if template and (header := unprompted_header(template)):
        say(
            f"warning: {template.where} ignores add_generation_prompt, so {header!r} counts as the assistant's own text"
        )
    contamination = load_contamination(data.evaluation_prompts) if data.evaluation_prompts else None
    filters = Filters(data.drop_pattern, data.languages, contamination)
    return Maker(data, encoder, template, target.vocab_size, tool_style(template) if template else "", filters)


def find_files(data: Data) -> list[SourceFile]:
    """All files of all sources, in the recipe's order. Raises: DataError where a source has none."""
    return [
        SourceFile(index, path) for index, source in enumerate(data.sources) for path in source_files(_pattern(source))
    ]


def _pattern(source: Source) -> str:
    """Path or glob of a source's files, a preset's fetched first."""
    if not source.preset:
        return source.path
    return local_files(source.preset, source.path) if source.path else fetch(source.preset, source.revision)


def find_jobs(data: Data, files: list[SourceFile]) -> Iterator[Job]:
    """All chunks of all files; with data.limit, a bounded number of each source's first records."""
    scanned, most = [0] * len(data.sources), max(20 * data.limit, 20_000)
    for number, (index, path) in enumerate(files):
        source = data.sources[index]
        shape: str = "" if source.format == "auto" else source.format
        shape = shape or (PRESETS[source.preset].shape if source.preset else "")
        for chunk in read_chunks(path):
            if data.limit and scanned[index] >= most:
                say(f"{path}: read no further than its first {scanned[index]:,} records, as data.limit is set")
                break
            if not shape:
                line, record = next(chunk.records())
                shape = guess_shape(record, chunk.place(line))
                say(f"{path}: taken as `{shape}`, by the keys of its first record")
            scanned[index] += chunk.count()
            yield Job(index, number, chunk, shape, "" if source.split == "auto" else source.split)


def _make_all(
    run: Run,
    maker: Maker,
    files: list[SourceFile],
    account: Account,
    spill: Spill,
    near: NearDuplicates,
    writer: TokensWriter,
) -> None:
    """Read, render and encode everything; samples go to the spill, rejections to the writer."""
    total = _source_bytes(files)
    wanted = run.data.workers or len(os.sched_getaffinity(0))
    workers = min(wanted, max(total // _BYTES_PER_WORKER, 1))
    sizes = [path.stat().st_size for _, path in files]
    with Progress("prepare", total, "bytes", run.logs_dir) as progress:
        done = 0.0
        for job, made in run_jobs(maker, find_jobs(run.data, files), workers):
            first, labels, lines = account.add(job.source, made, job.chunk.path)
            turn, last = 0, -1
            for draft in made.drafts:
                turn, last = (turn + 1 if draft.record == last else 0), draft.record
                label = int(labels[draft.record])
                spill.add(draft, record=first + draft.record, turn=turn, file=job.file, label=label)
            for record, sample_id, signed in made.signatures:
                near.add(first + record, sample_id, signed)
            for line in lines:
                writer.reject(line)
            reached = sum(sizes[: job.file]) + job.chunk.share * sizes[job.file]
            progress.advance(reached - done, f"{account.records:,} records")
            done = reached


def _refuse_long(run: Run, target: Target, writer: TokensWriter) -> None:
    """Raises: DataError where samples are longer than the target's context: it has no positions for their ends."""
    limit = target.max_position_embeddings
    long = {length: count for length, count in writer.by_length.items() if length > limit}
    if long:
        raise DataError(
            f"{sum(long.values()):,} of {sum(writer.by_length.values()):,} samples are longer than {limit:,} tokens; "
            f"the longest has {max(long):,}",
            expected=f"at most {limit:,}: max_position_embeddings in {target.path}/config.json",
            cause=f"data.max_tokens = {run.data.max_tokens:,} is more than the target can read",
            next=f"{run.command('prepare')} --set data.max_tokens={limit}   # cuts them, as data.too_long says",
        )


def _warn(account: Account, writer: TokensWriter) -> None:
    """Say what looks wrong although it isn't an error."""
    for oddity, count in account.odd.items():
        say(f"warning: {count:,} samples: {oddity}; look with `eyas prepare RECIPE --preview 3`")
    for split in ("train", "heldout"):
        if not writer.by_split[split]:
            say(f"warning: no sample in split {split}")


def source_name(source: Source) -> str:
    """A source's name in counts: its own, its preset's or its file's."""
    return source.name or source.preset or Path(source.path).name


def _text_bytes(files: list[SourceFile]) -> int:
    """About how much text there is: compressed files hold four times their size."""
    plain = (".jsonl", ".json", ".txt", ".arrow")
    return sum(path.stat().st_size * (1 if path.suffix in plain else 4) for _, path in files)


def _source_bytes(files: list[SourceFile]) -> int:
    return sum(path.stat().st_size for _, path in files)


def source_identity(path: Path) -> str:
    """Digest of a source file; of its size, time of change and both ends where it is large."""
    stat = path.stat()
    if stat.st_size <= _WHOLE_DIGEST_BYTES:
        return fs.digest_file(path)
    with path.open("rb") as handle:
        head = handle.read(16 << 20)
        handle.seek(-(16 << 20), os.SEEK_END)
        return fs.digest_json([stat.st_size, stat.st_mtime_ns, fs.digest(head, handle.read())])
