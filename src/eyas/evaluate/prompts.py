"""Prompt sets for a serving engine: files of prompts, turns or messages, or the run's own held-out prompts."""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from eyas import fs
from eyas.data.encode import Encoder
from eyas.data.filters import Filters
from eyas.data.make import Maker
from eyas.data.read import read_chunks, source_files
from eyas.data.records import Conversation, Rejected
from eyas.data.regenerate.slots import open_conversation
from eyas.data.regenerate.transcript import Transcript
from eyas.data.shapes import guess_shape, read_record
from eyas.data.template import load_template, tool_style
from eyas.data.tokens import Sample, Tokens
from eyas.drafter.walk import answer_spans
from eyas.errors import DataError, RecipeError
from eyas.progress import say
from eyas.run import Run
from eyas.store.reader import StoredSample
from eyas.target import Target


@dataclass(frozen=True)
class Prompt:
    """What an engine is asked.

    Attributes:
        id: of its record, or the sample's.
        conversation: turns whose answers the engine writes, one after the other; None where `token_ids` is the prompt.
        token_ids: the prompt as it stands in the run's tokens.
    """

    id: str
    conversation: Conversation | None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class PromptSets:
    """All sets of a run.

    Attributes:
        sets: name -> prompts, in the recipe's order.
        maker: encoder and chat template that conversations are rendered with.
    """

    sets: dict[str, list[Prompt]]
    maker: Maker

    @property
    def digest(self) -> str:
        """Identity of what is asked."""
        return fs.digest_json(
            {
                name: [[p.id, p.conversation and p.conversation.messages, p.token_ids] for p in prompts]
                for name, prompts in self.sets.items()
            }
        )

    def transcript(self, prompt: Prompt) -> Transcript:
        """The conversation of a prompt that isn't token ids."""
        assert prompt.conversation is not None and self.maker.template is not None
        return Transcript(prompt.conversation, self.maker.template, self.maker.encoder)


def load_sets(run: Run, target: Target) -> PromptSets:
    """The recipe's prompt files, or the run's held-out prompts by source.

    Raises: DataError where a file holds no prompt; RecipeError for two files of one name, or a run without held-out
        samples.
    """
    table, data = run.recipe.serving, run.recipe.data
    encoder = Encoder(target.tokenizer, target.eos_token_ids)
    template = load_template(data.template, target.tokenizer, data.template_args)
    tools = tool_style(template) if template else ""
    maker = Maker(data, encoder, template, target.vocab_size, tools, Filters("", [], None))
    if not table.prompts:
        return PromptSets(_heldout(run), maker)
    if template is None:
        raise DataError(
            f"{target.path}: its tokenizer has no chat template to render prompts with",
            cause="a base model, or chat_template.jinja was not copied with the tokenizer",
            next="set data.template to a Jinja file",
        )
    sets: dict[str, list[Prompt]] = {}
    for path in (file for pattern in table.prompts for file in source_files(pattern)):
        name = path.name.partition(".")[0]
        if name in sets:
            raise RecipeError(f"serving.prompts: two files are named {name}", expected="a name of its own for each set")
        sets[name] = _read_file(path, maker, table.max_prompts)
    return PromptSets(sets, maker)


def prompt_ids(sample: Sample | StoredSample) -> tuple[int, ...]:
    """The tokens before a sample's first answer."""
    first, _ = answer_spans(np.asarray(sample.loss_mask))[0]
    return tuple(int(token) for token in sample.token_ids[:first])


def _heldout(run: Run) -> dict[str, list[Prompt]]:
    if not run.has_own_store:
        raise RecipeError(
            "serving.prompts is empty, and this run has no prompts of its own: its store was imported",
            expected="files of prompts",
            next="name some: --set 'serving.prompts=[\"FILE.jsonl\"]'",
        )
    most, tokens = run.recipe.serving.max_prompts, Tokens(run.tokens_dir)
    table = tokens.table(["sample_id", "source", "split"])
    wanted: dict[str, list[str]] = {}
    for sample_id, label, split in zip(*table.to_pydict().values(), strict=True):
        source = label.partition("/")[0]  # what follows is the record's kind
        if split == "heldout" and (not most or len(wanted.get(source, ())) < most):
            wanted.setdefault(source, []).append(sample_id)
    sets = {
        source: [Prompt(sample.id, None, ids) for sample in tokens.fetch(chosen) if (ids := prompt_ids(sample))]
        for source, chosen in sorted(wanted.items())
    }
    if not any(sets.values()):
        raise RecipeError(
            f"{run.tokens_dir}: no held-out prompts",
            expected="files of prompts, or held-out samples",
            next="name some: --set 'serving.prompts=[\"FILE.jsonl\"]'",
        )
    return sets


def _read_file(path: Path, maker: Maker, most: int) -> list[Prompt]:
    prompts: list[Prompt] = []
    refused: list[Rejected] = []
    records = ((chunk.place(line), raw) for chunk in read_chunks(path) for line, raw in chunk.records())
    for number, (place, raw) in enumerate(islice(records, most or None)):
        shape = guess_shape(raw, place)
        try:
            record = read_record(raw, shape, place)
            conversation = open_conversation(record, maker, "heldout", prompts=shape == "prompts")
        except Rejected as rejected:
            refused.append(rejected)
            continue
        name = raw.get("id")
        prompts.append(Prompt(str(number) if name is None else str(name), conversation))
    if not prompts:
        raise DataError(
            f"{path}: no prompt in it can be asked"
            + (f": {refused[0].reason}, {refused[0].detail}" if refused else ""),
            expected='lines of {"id", "prompt"}, {"turns": [...]} or {"messages": [...]}',
        )
    if refused:
        reasons = json.dumps(sorted({one.reason for one in refused}))
        say(f"serving: {path.name}: {len(refused)} of {len(refused) + len(prompts)} prompts left out: {reasons}")
    return prompts
