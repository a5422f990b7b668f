"""What there is to ask: all conversations of all sources, doubles dropped, limits applied."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eyas import fs
from eyas.data.make import Maker
from eyas.data.prepare import find_files, find_jobs, source_name
from eyas.data.records import Conversation, Rejected
from eyas.data.regenerate.slots import conversation_id, open_conversation
from eyas.data.shapes import read_record
from eyas.errors import DataError
from eyas.settings import Data, Regenerate

# With data.limit so many held-out conversations are asked, as far as there are so many (prepare wants them too).
_MIN_HELDOUT = 4


class Open(NamedTuple):
    """A conversation to be written.

    Attributes:
        id: slots.conversation_id.
        source: its place in the recipe.
        about: keys of the record that `prepare` takes over: split, kind.
    """

    id: str
    source: int
    about: dict[str, str]
    conversation: Conversation


@dataclass
class Plan:
    """All there is to ask, and the account of what isn't.

    Attributes:
        path: where the conversations wait, one line each: prompts of a million records needn't fit memory.
        chosen: ids, in reading order.
        read, rejected: records, by source; rejected by reason.
    """

    path: Path
    chosen: dict[str, int] = field(default_factory=dict)
    read: Counter[int] = field(default_factory=Counter)
    rejected: dict[int, Counter[str]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Open]:
        """The chosen conversations, from disk."""
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                if row["id"] in self.chosen:
                    conversation = Conversation(row["messages"], row["supervised"], row["tools"])
                    yield Open(row["id"], row["source"], row["about"], conversation)

    def reject(self, source: int, reason: str) -> None:
        self.rejected.setdefault(source, Counter())[reason] += 1


def make_plan(path: Path, data: Data, settings: Regenerate, maker: Maker) -> Plan:
    """Read all sources once.

    Args:
        path: file that the conversations are written to.
    Raises: DataError with file and line; where a source gives no conversation; where most records give none.
    """
    plan = Plan(path)
    found: dict[str, tuple[int, str]] = {}
    examples: dict[str, str] = {}
    with path.open("w", encoding="utf-8") as file:
        for job in find_jobs(data, find_files(data)):
            for line, raw in job.chunk.records():
                plan.read[job.source] += 1
                place = job.chunk.place(line)
                try:
                    record = read_record(raw, job.shape, place)
                    split = job.split or record.split
                    conversation = open_conversation(record, maker, split, prompts=job.shape == "prompts")
                    id = conversation_id(conversation)
                    if id in found:
                        raise Rejected("duplicate")
                except Rejected as rejection:
                    plan.reject(job.source, rejection.reason)
                    examples.setdefault(rejection.reason, f"{place}: {rejection.detail}".removesuffix(": "))
                    continue
                found[id] = (job.source, split)
                about = {"split": record.split, "kind": record.kind}
                row: dict[str, Any] = {"id": id, "source": job.source}
                row |= {"about": {key: value for key, value in about.items() if value}}
                row |= {key: getattr(conversation, key) for key in ("messages", "supervised", "tools")}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    _check(plan, data, found, examples)
    chosen = _choose(found, data, settings)
    for id, (source, _) in found.items():
        if id in chosen:
            plan.chosen[id] = source
        else:
            plan.reject(source, "over_limit")
    return plan


def _choose(found: dict[str, tuple[int, str]], data: Data, settings: Regenerate) -> set[str]:
    """Ids within max_conversations of each source and data.limit of all: those with the lowest seeded digests."""
    ranked = sorted(found, key=lambda id: fs.digest(str(data.seed), id))
    if settings.max_conversations:
        taken: Counter[int] = Counter()
        within = []
        for id in ranked:
            source = found[id][0]
            taken[source] += 1
            if taken[source] <= settings.max_conversations:
                within.append(id)
        ranked = within
    if not data.limit or len(ranked) <= data.limit:
        return set(ranked)
    heldout = [id for id in ranked if found[id][1] == "heldout"]
    wanted = max(round(data.limit * len(heldout) / len(ranked)), _MIN_HELDOUT)
    heldout = heldout[: min(wanted, max(data.limit // 2, 1))]
    others = [id for id in ranked if found[id][1] != "heldout"]
    return {*heldout, *others[: data.limit - len(heldout)]}


def _check(plan: Plan, data: Data, found: dict[str, tuple[int, str]], examples: dict[str, str]) -> None:
    faults = sum(plan.rejected.values(), Counter[str]())
    doubles = faults.pop("duplicate", 0)
    told = "; ".join(f"{reason} {count:,} (the first: {examples[reason]})" for reason, count in faults.most_common(3))
    if faults.total() * 2 > plan.read.total() - doubles:
        raise DataError(
            f"{faults.total():,} of {plan.read.total():,} records hold nothing that the target could answer: {told}",
            expected="at least half of them to be conversations or prompts",
            cause="the wrong `format` of a source, or another family's chat template",
            next="mend that [[data.sources]] table; nothing was asked",
        )
    sources = {source for source, _ in found.values()}
    for index, source in enumerate(data.sources):
        if index not in sources:
            raise DataError(
                f"{source_name(source)}: of {plan.read[index]:,} records none is left to ask: {told or 'duplicates'}",
                next="take that [[data.sources]] table out of the recipe, or mend it; nothing was asked",
            )
