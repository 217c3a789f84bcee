"""Chat templates: the model's own Jinja template or a usual one by name, rendered in a sandbox.

A rendered conversation comes with the character spans that the assistant wrote: from
`{% generation %}` tags where the template has them, else from the difference between the
conversation before and after each assistant message.
"""

from __future__ import annotations

import datetime
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import PrepareError
from .tokenizer import ModelTokenizer

Message = dict[str, Any]
Span = tuple[int, int]

# The tokens that a template by name writes; a tokenizer without them spells them letter by letter.
TEMPLATE_TOKENS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "qwen": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["[INST]", "[/INST]"],
    "alpaca": [],
}
_HAS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: notes where its text lies in the output."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it this way

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("note", []), [], [], body).set_lineno(line)

    def note(self, caller: Any) -> str:
        text: str = caller()
        recorder = getattr(self.environment, "recorder", None)
        if recorder is not None:
            recorder.spans.append((recorder.length, recorder.length + len(text)))
        return text


class _Recorder:
    """How long the output is so far, and the spans found in it."""

    def __init__(self) -> None:
        self.length = 0
        self.spans: list[Span] = []


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a model must not see.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A compiled template with its tokenizer's special tokens. Not thread-safe."""

    def __init__(
        self,
        source: str,
        named_tokens: dict[str, str],
        *,
        name: str = "template",
        today: datetime.date | None = None,
    ) -> None:
        self.name = name
        self.has_generation = _HAS_GENERATION.search(source) is not None
        environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        day = today or datetime.date.today()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = day.strftime
        environment.globals.update(named_tokens)
        environment.recorder = None
        self._environment = environment
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise PrepareError(
                f"chat template {name}, line {error.lineno}: {error.message}; correct "
                f"the template, or name another one with --template"
            ) from error

    def render(
        self, messages: list[Message], tools: list[Any] | None = None, *, prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text, and the spans of its generation tags. `prompt` adds the assistant's header."""
        recorder = _Recorder()
        self._environment.recorder = recorder
        pieces = []
        try:
            for piece in self._template.generate(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt
            ):
                pieces.append(piece)
                recorder.length += len(piece)
        finally:
            self._environment.recorder = None
        return "".join(pieces), recorder.spans

    def assistant_spans(
        self, messages: list[Message], tools: list[Any] | None = None
    ) -> tuple[str, list[Span]]:
        """The conversation, and where in it each assistant message lies."""
        text, spans = self.render(messages, tools)
        if self.has_generation:
            return text, spans
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self.render(messages[:index], tools, prompt=True)
            after, _ = self.render(messages[: index + 1], tools)
            if not (after.startswith(before) and text.startswith(after)):
                raise PrepareError(
                    f"messages[{index}]: chat template {self.name} writes earlier messages "
                    f"differently once later ones follow, so what the assistant wrote cannot be "
                    f"told apart; add {{% generation %}} tags around it in a copy of the template "
                    f"(--template FILE), or use --train-on all"
                )
            spans.append((len(before), len(after)))
        return text, spans


def template_names() -> list[str]:
    return sorted(TEMPLATE_TOKENS)


def load_template(
    choice: str, tokenizer: ModelTokenizer, today: datetime.date | None = None
) -> ChatTemplate | None:
    """`model` (None where the model has no template), a name, or a file with a Jinja template."""
    if choice == "model":
        source = tokenizer.chat_template
        name = f"of {tokenizer.path}"
    elif choice in TEMPLATE_TOKENS:
        file = resources.files("overspill.prepare") / "templates" / f"{choice}.jinja"
        source = file.read_text(encoding="utf-8")
        name = choice
    elif Path(choice).is_file():
        source = Path(choice).read_text(encoding="utf-8")
        name = choice
    else:
        raise PrepareError(
            f"chat template {choice}: neither a file nor one of model, "
            f"{', '.join(template_names())}; give one of these"
        )
    if source is None:
        return None
    # Templates by name write both ends of a text; a tokenizer may have neither.
    named = {"bos_token": "", "eos_token": ""} if choice in TEMPLATE_TOKENS else {}
    return ChatTemplate(source, named | tokenizer.named_tokens, name=name, today=today)


def unknown_tokens(choice: str, tokenizer: ModelTokenizer) -> list[str]:
    """The template's tokens that the tokenizer does not have as tokens."""
    return [t for t in TEMPLATE_TOKENS.get(choice, []) if tokenizer.backend.token_to_id(t) is None]
