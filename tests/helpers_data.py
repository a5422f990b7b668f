"""Tokenizers, templates and recipes for the tests of data preparation."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.data.encode import Encoder
from eyas.data.template import ChatTemplate
from eyas.recipe import Recipe
from eyas.run import Run

TEMPLATES = Path(__file__).parent / "templates"

# Special tokens of each family, its end-of-turn token first.
SPECIALS = {
    "chatml": ["<|im_end|>", "<|im_start|>", "<|endoftext|>"],
    "llama3": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "gemma": ["<end_of_turn>", "<bos>", "<start_of_turn>"],
    "mistral": ["</s>", "<s>", "[INST]", "[/INST]"],
    "deepseek": ["<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
    "kimi": [
        *("<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    "gpt_oss": ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"],
}
SPECIALS |= {"chatml_marked": SPECIALS["chatml"], "qwen3": SPECIALS["chatml"]}
SPECIALS |= {"deepseek_thinking": SPECIALS["deepseek"]}
_BOS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>", "mistral": "<s>", "deepseek": "<｜begin▁of▁sentence｜>"}


def make_tokenizer(family: str, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a family's special tokens; `merges` join bytes (in ByteLevel's alphabet)."""
    specials = SPECIALS[family]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(specials)
    options = {"bos_token": _BOS[family]} if family in _BOS else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=specials[0], **options)


def make_template(family: str, **args: Any) -> ChatTemplate:
    """The family's template from tests/templates."""
    variables = {"bos_token": _BOS.get(family, ""), "eos_token": SPECIALS[family][0], **args}
    return ChatTemplate((TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8"), family, variables)


def make_encoder(family: str, merges: Sequence[tuple[str, str]] = ()) -> Encoder:
    return Encoder(make_tokenizer(family, merges))


def supervised_texts(encoder: Encoder, token_ids: Any, loss_mask: Any) -> list[str]:
    """Decoded text of each stretch of supervised tokens."""
    texts, stretch = [], []
    for token, supervised in zip([*token_ids, 0], [*loss_mask, False], strict=True):
        if supervised:
            stretch.append(int(token))
        elif stretch:
            texts.append(encoder.decode(stretch))
            stretch = []
    return texts


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def make_run(folder: Path, target: Path, sources: Sequence[Any], **data: Any) -> Run:
    """A run of `sources` (paths, or tables of a source) on a target folder."""
    tables = [source if isinstance(source, dict) else {"path": str(source)} for source in sources]
    recipe = {"name": "run", "runs_dir": str(folder / "runs"), "target": {"path": str(target)}}
    return Run(Recipe.model_validate({**recipe, "data": {"sources": tables, "workers": 1, **data}}), "recipe.toml")


def exchange(question: str, answer: str, **extra: Any) -> dict[str, Any]:
    """A record of one question and one answer."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **extra}
