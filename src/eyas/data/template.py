"""Chat templates: Jinja as Transformers and the engines render it, with the generation marks kept as positions."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eyas import fs
from eyas.data.records import Message, Rejected
from eyas.errors import DataError

# Noncharacters of Unicode: valid in a string, never in text. They enclose what {% generation %} encloses.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Some templates print today's date. Samples must not depend on the day, so it stands still.
_TODAY = datetime(2025, 1, 1)


class _Refusal(jinja2.TemplateError):
    """The template's own raise_exception."""


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %}: what the assistant writes."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Any) -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, asked once for each type and attribute: its answer depends on nothing else, and asking took
    a third of the time of a rendering."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = (type(obj), attr)
        if key not in self._safe:
            self._safe[key] = super().is_safe_attribute(obj, attr, value)
        return self._safe[key]


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Like json.dumps: Jinja's own filter escapes HTML, which no chat template wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _environment() -> _Environment:
    """Jinja set up as Transformers sets it up for chat templates."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the variables it is rendered with.

    Attributes:
        source: Jinja text.
        where: file or tokenizer it came from, for messages.
        variables: bos_token, eos_token and other special tokens, and the recipe's template_args.
    """

    source: str
    where: str
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """Without the compiled form, which can't be sent to another process."""
        return {"source": self.source, "where": self.where, "variables": self.variables}

    @property
    def digest(self) -> str:
        """Identity of the template and its variables."""
        return fs.digest_json([self.source, dict(self.variables)])

    @property
    def marks_generation(self) -> bool:
        """Whether the template says itself what the assistant writes."""
        return _GENERATION.search(self.source) is not None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"{self.where}, line {error.lineno}: the chat template is not valid Jinja: {error.message}",
                next="mend the template, or set data.template to another file",
            ) from None

    def render(
        self, messages: Sequence[Message], tools: list[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Text of a conversation, and the [start, end) character spans inside generation marks.

        Raises: Rejected where the template itself refuses the conversation; DataError where it fails.
        """
        try:
            text = self._compiled.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self.variables
            )
        except _Refusal as error:
            raise Rejected("refused_by_template", str(error)) from None
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise DataError(
                f"{self.where}: the chat template fails: {type(error).__name__}: {error}",
                cause="the template expects other keys in a message, or arguments that data.template_args must give",
                next="mend the template or the data; nothing was written",
            ) from None
        return _take_marks(text) if _OPEN in text else (text, [])


def tool_style(template: ChatTemplate) -> str:
    """How a template takes the arguments of a tool call: "object", "text" (JSON), or "" where it leaves calls out.

    It is found by rendering a call and its result: a template that knows tools prints both.
    """
    for style, arguments in (("object", {"probe": "\ufdd2"}), ("text", '{"probe": "\ufdd2"}')):
        call = {"id": "call0", "type": "function", "function": {"name": "probe_tool", "arguments": arguments}}
        messages: list[Message] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "\ufdd3", "tool_call_id": "call0", "name": "probe_tool"},
            {"role": "assistant", "content": "answer"},
        ]
        try:
            text, _ = template.render(messages)
        except (Rejected, DataError):
            continue
        if "\ufdd2" in text and "\ufdd3" in text:
            return style
    return ""


def unprompted_header(template: ChatTemplate) -> str:
    """What a template that ignores add_generation_prompt prints before an answer ("" where that is nothing)."""
    question: list[Message] = [{"role": "user", "content": "question"}]
    try:
        prompt, _ = template.render(question, add_generation_prompt=True)
        bare, _ = template.render(question)
        whole, marks = template.render([*question, {"role": "assistant", "content": "\ufdd2"}])
    except (Rejected, DataError):
        return ""  # the template wants more than this probe has; its first record will tell
    if prompt != bare or marks or not whole.startswith(prompt):
        return ""
    return whole[len(prompt) :].partition("\ufdd2")[0].strip()


def _take_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and where they stood."""
    pieces, spans, length, start = [], [], 0, 0
    for piece, mark in zip(_MARKS.split(marked), [*_MARKS.findall(marked), ""], strict=True):
        pieces.append(piece)
        length += len(piece)
        if mark == _OPEN:
            start = length
        elif mark == _CLOSE and length > start:
            spans.append((start, length))
    return "".join(pieces), spans


def load_template(path: str, tokenizer: Any, args: Mapping[str, Any]) -> ChatTemplate | None:
    """The recipe's template file, else the tokenizer's own template, else None.

    Args:
        path: data.template, absolute; "" for the tokenizer's own.
        tokenizer: Transformers tokenizer.
        args: data.template_args.
    Raises: DataError where the file can't be read.
    """
    variables = {**tokenizer.special_tokens_map, **args}
    if path:
        try:
            return ChatTemplate(Path(path).read_text(encoding="utf-8"), path, variables)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"data.template = {path}: {error}",
                expected="a Jinja file in UTF-8",
                next="mend data.template, or leave it empty for the tokenizer's own template",
            ) from None
    own = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get("default")
    return ChatTemplate(own, f"chat template of {tokenizer.name_or_path}", variables) if own else None
