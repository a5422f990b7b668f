"""The stage `prepare`: sources to tokens/."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eyas import fs
from eyas.data.encode import Encoder
from eyas.data.read import read_chunks, source_files
from eyas.data.records import Conversation, Pretokenised, Record, Rejected
from eyas.data.render import render_conversation
from eyas.data.shapes import guess_shape, read_record
from eyas.data.template import ChatTemplate, load_template
from eyas.data.tokens import LossMask, Sample, Split, TokenIds, TokensWriter, sample_id
from eyas.errors import DataError
from eyas.progress import Progress, say
from eyas.recipe import Data, Source
from eyas.record import Inputs
from eyas.run import Run
from eyas.stages import Result, remove_tree
from eyas.target import load_target

# Reasons that speak of a choice, not of a fault in the data: they never fail the stage.
CHOICES = ("duplicate", "over_limit")
_MIN_HELDOUT = 4
# Larger files are known by size, time of change and both ends: 100 GB would take a minute at every `eyas run`.
_WHOLE_DIGEST_BYTES = 256 << 20


def inputs(run: Run) -> Inputs:
    """What tokens/ depends on: the recipe's [data], the source files, tokenizer, template and vocabulary."""
    target = load_target(run.recipe.target)
    pairs: Inputs = {f"data.{key}": value for key, value in run.recipe.data.model_dump().items() if key != "sources"}
    for index, source in enumerate(run.recipe.data.sources):
        pairs[f"data.sources.{index}"] = source.model_dump()
        pairs |= {f"content of {path}": _identity(path) for path in source_files(source.path)}
    template = load_template(run.recipe.data.template, target.tokenizer, run.recipe.data.template_args)
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
    data = run.recipe.data
    target = load_target(run.recipe.target)
    maker = SampleMaker(
        data=data,
        encoder=Encoder(target.tokenizer, target.eos_token_ids),
        template=load_template(data.template, target.tokenizer, data.template_args),
        vocab_size=target.vocab_size,
    )
    drafts = _read_all(run, maker)
    account = maker.account
    _fail_on_rejections(account)
    chosen = _choose(drafts, data, account)
    with TokensWriter(run.tokens_dir) as writer:
        for sample in chosen:
            writer.add(sample)
        for line in account.lines:
            writer.reject(line)
        facts = {
            "by_source": account.by_source(writer.by_source),
            "tokenizer_digest": target.tokenizer_digest,
            "template_digest": maker.template.digest if maker.template else "",
            "vocab_size": target.vocab_size,
        }
        manifest = writer.finish(facts)
    counts = {key: manifest[key] for key in ("samples", "tokens", "supervised_tokens", "by_split", "by_source")}
    return Result(manifest["digest"], counts)


@dataclass
class Draft:
    """A sample before its split is settled: `split` is "" where the record didn't say; `conversation` is its key."""

    id: str
    source: str
    split: str
    conversation: int
    token_ids: TokenIds
    loss_mask: LossMask


@dataclass
class Account:
    """Every record of every source: read = kept + rejected by reason."""

    read: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    rejected: dict[str, Counter[str]] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def reject(self, source: str, reason: str, **where: Any) -> None:
        self.rejected.setdefault(source, Counter())[reason] += 1
        self.lines.append({"source": source, "reason": reason, **where})

    def by_source(self, written: dict[str, Counter[str]]) -> dict[str, Any]:
        return {
            source: {
                "read": self.read[source],
                "kept": self.kept[source],
                "rejected": dict(self.rejected.get(source, {})),
                **{key: written.get(source, Counter())[key] for key in ("samples", "tokens", "supervised_tokens")},
            }
            for source in sorted(self.read)
        }


@dataclass
class SampleMaker:
    """Turns records into samples, or rejects them with a reason."""

    data: Data
    encoder: Encoder
    template: ChatTemplate | None
    vocab_size: int
    account: Account = field(default_factory=Account)

    def make(self, record: Record, where: str) -> list[tuple[TokenIds, LossMask]]:
        """Token ids and masks of a record's samples. Raises: Rejected, or DataError."""
        if isinstance(record.body, Pretokenised):
            made = [self._as_they_are(record.body)]
        else:
            made = self._from_conversation(record.body, where)
        return [self._fitted(ids, mask) for ids, mask in made]

    def _as_they_are(self, body: Pretokenised) -> tuple[TokenIds, LossMask]:
        token_ids = np.array(body.token_ids, dtype=np.int64)
        if len(token_ids) and not (token_ids.min() >= 0 and token_ids.max() < self.vocab_size):
            raise Rejected("token_outside_vocabulary", f"ids {token_ids.min()} to {token_ids.max()}")
        return token_ids.astype(np.int32), np.array(body.loss_mask, dtype=np.bool_)

    def _from_conversation(self, body: Conversation, where: str) -> list[tuple[TokenIds, LossMask]]:
        if self.template is None:
            raise DataError(
                f"{where}: a conversation, but the target's tokenizer has no chat template",
                expected="a chat template that turns turns into text",
                cause="a base model, or chat_template.jinja was not copied with the tokenizer",
                next="set data.template to a Jinja file",
            )
        for message in body.messages:
            found = self.encoder.pattern.search(message["content"])
            if found:
                raise Rejected("special_token_in_text", f"{found[0]} in a {message['role']} turn")
        rendered = render_conversation(self.template, body, self.encoder.special)
        made = self.encoder.encode_rendered(rendered)
        for result in made:
            if isinstance(result, Rejected):
                raise result
        return [result for result in made if not isinstance(result, Rejected)]

    def _fitted(self, token_ids: TokenIds, loss_mask: LossMask) -> tuple[TokenIds, LossMask]:
        """Cut at the last end of a supervised stretch within data.max_tokens."""
        longest = self.data.max_tokens
        if len(token_ids) > longest:
            ends = np.flatnonzero(loss_mask[:longest] & ~np.append(loss_mask[1:], False)[:longest])
            if self.data.too_long == "reject" or not len(ends):
                raise Rejected("too_long", f"{len(token_ids)} tokens, data.max_tokens is {longest}")
            token_ids, loss_mask = token_ids[: ends[-1] + 1], loss_mask[: ends[-1] + 1]
        supervised = int(loss_mask.sum())
        if supervised == 0:
            raise Rejected("no_supervised_token")
        if supervised < self.data.min_supervised_tokens:
            raise Rejected("few_supervised_tokens", f"{supervised} of {self.data.min_supervised_tokens}")
        return token_ids, loss_mask


def _read_all(run: Run, maker: SampleMaker) -> list[Draft]:
    data = run.recipe.data
    files = [(source, path) for source in data.sources for path in source_files(source.path)]
    total = sum(path.stat().st_size for _, path in files)
    drafts: list[Draft] = []
    with Progress("prepare", total, "bytes", run.logs_dir) as progress:
        for source, path in files:
            shape: str = "" if source.format == "auto" else source.format
            name = source.name or path.name
            for chunk in read_chunks(path):
                for number, raw in chunk.records():
                    where = f"{path}, line {number}"
                    if not shape:
                        shape = guess_shape(raw, where)
                        say(f"{path}: taken as `{shape}`, by the keys of its first record")
                    drafts += _read_one(raw, shape, source, name, path, number, maker)
            progress.advance(path.stat().st_size)
    return drafts


def _read_one(
    raw: dict[str, Any], shape: str, source: Source, name: str, path: Path, number: int, maker: SampleMaker
) -> list[Draft]:
    where, account = f"{path}, line {number}", maker.account
    label = name
    try:
        record = read_record(raw, shape, where)
        label = f"{name}/{record.kind}" if record.kind else name
        account.read[label] += 1
        samples = maker.make(record, where)
    except Rejected as error:
        account.read[label] += label == name and error.reason == "empty_conversation"
        account.reject(label, error.reason, file=str(path), line=number, detail=error.detail)
        return []
    split = record.split if source.split == "auto" else source.split
    drafts = []
    for ids, mask in samples:
        prompt = ids[: int(np.argmax(mask))]
        key = int(fs.digest(str(maker.data.seed), prompt.tobytes())[:16], 16)
        drafts.append(Draft(sample_id(ids, mask), label, split, key, ids, mask))
    account.kept[label] += 1
    return drafts


def _choose(drafts: list[Draft], data: Data, account: Account) -> Iterator[Sample]:
    """Drop doubles, settle splits, apply the limit, shuffle."""
    seen: set[str] = set()
    unique = []
    for draft in drafts:
        if draft.id in seen:
            account.kept[draft.source] -= 1
            account.reject(draft.source, "duplicate", detail=draft.id)
        else:
            seen.add(draft.id)
            unique.append(draft)
    open_keys = sorted({draft.conversation for draft in unique if not draft.split})
    threshold = data.heldout_fraction * 2.0**64
    for draft in unique:
        draft.split = draft.split or ("heldout" if draft.conversation < threshold else "train")
    if open_keys and data.heldout_fraction and not any(draft.split == "heldout" for draft in unique):
        for draft in unique:
            if draft.conversation <= open_keys[min(_MIN_HELDOUT, len(open_keys) // 2) - 1]:
                draft.split = "heldout"
    order = sorted(unique, key=lambda d: hashlib.blake2b(f"{data.seed} {d.id}".encode(), digest_size=8).digest())
    room = _room(Counter(draft.split for draft in order), data.limit)
    for draft in order:
        if room[draft.split] == 0:
            account.kept[draft.source] -= 1
            account.reject(draft.source, "over_limit", detail=draft.id)
            continue
        room[draft.split] -= 1
        split: Split = "heldout" if draft.split == "heldout" else "train"
        yield Sample(draft.id, draft.source, split, draft.token_ids, draft.loss_mask)


def _room(available: Counter[str], limit: int) -> dict[str, int]:
    """How many samples of each split fit the limit: the ratio kept, at least four held-out ones."""
    total = sum(available.values())
    if not limit or total <= limit:
        return {split: available[split] for split in ("train", "heldout")}
    heldout = max(round(limit * available["heldout"] / total), _MIN_HELDOUT)
    heldout = min(heldout, available["heldout"], limit // 2)
    return {"train": min(limit - heldout, available["train"]), "heldout": heldout}


def _fail_on_rejections(account: Account) -> None:
    faults: Counter[str] = Counter()
    for reasons in account.rejected.values():
        faults.update({reason: count for reason, count in reasons.items() if reason not in CHOICES})
    read = sum(account.read.values())
    if sum(faults.values()) * 2 > read:
        top = "; ".join(f"{reason}: {count}" for reason, count in faults.most_common(3))
        example = next(line for line in account.lines if line["reason"] == faults.most_common(1)[0][0])
        raise DataError(
            f"{sum(faults.values())} of {read} records give no sample ({top}); the first: {example['file']}, line "
            f"{example['line']}: {example['detail'] or example['reason']}",
            expected="at least half of them to be usable",
            cause="another model family's chat template, or the wrong `format` of a source",
            next="eyas prepare RECIPE --preview 3",
        )


def _identity(path: Path) -> str:
    stat = path.stat()
    if stat.st_size <= _WHOLE_DIGEST_BYTES:
        return fs.digest_file(path)
    with path.open("rb") as handle:
        head = handle.read(16 << 20)
        handle.seek(-(16 << 20), 2)
        return fs.digest_json([stat.st_size, stat.st_mtime_ns, fs.digest(head, handle.read())])
