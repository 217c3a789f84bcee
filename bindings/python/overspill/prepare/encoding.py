"""Tokens and loss mask of one example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from .errors import PrepareError, at
from .records import Example
from .templates import ChatTemplate, Span
from .tokenizer import ModelTokenizer

TRAIN_ON = ("assistant", "last", "all")

Tokens = npt.NDArray[np.uint32]
Mask = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class EncodingOptions:
    train_on: str = "assistant"
    separator: str = ""  # between a prompt and its completion
    end_of_text: bool = True  # an end-of-text token after a text or completion


def mask_of_spans(encoding: Encoding, spans: Sequence[Span]) -> Mask:
    """1 for each token with a character in one of the spans, which are in order."""
    mask = np.zeros(len(encoding.ids), np.uint8)
    index = 0
    for token, (begin, end) in enumerate(encoding.offsets):
        while index < len(spans) and begin >= spans[index][1]:
            index += 1
        if index == len(spans):
            break
        mask[token] = end > spans[index][0]
    return mask


class ExampleEncoder:
    """Encodes examples with one tokenizer and template. Not thread-safe."""

    def __init__(
        self, tokenizer: ModelTokenizer, template: ChatTemplate | None, options: EncodingOptions
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._options = options

    def encode(self, example: Example) -> tuple[Tokens, Mask]:
        """Throws PrepareError with the example's place."""
        if example.kind == "chat":
            return self._encode_chat(example)
        return self._encode_text(example)

    def _encode_chat(self, example: Example) -> tuple[Tokens, Mask]:
        if self._template is None:
            raise at(
                example.where,
                "",
                f"a conversation, and {self._tokenizer.path} has no chat template",
                "name one with --template (for a base model chatml or alpaca)",
            )
        try:
            if self._options.train_on == "all":
                text, spans = self._template.render(example.messages, example.tools)
                spans = [(0, len(text))]
            else:
                text, spans = self._template.assistant_spans(example.messages, example.tools)
        except PrepareError as error:
            raise PrepareError(f"{example.where}: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise at(
                example.where,
                "messages",
                f"chat template {self._template.name}: {error}",
                "correct the record, or name another template with --template",
            ) from error
        if self._options.train_on == "last":
            spans = spans[-1:]
        encoding = self._tokenizer.encode(text, special=False)
        return np.array(encoding.ids, np.uint32), mask_of_spans(encoding, spans)

    def _encode_text(self, example: Example) -> tuple[Tokens, Mask]:
        prompt = example.prompt + self._options.separator if example.completion else ""
        text = prompt + example.completion if example.completion else example.text
        encoding = self._tokenizer.encode(text, special=True)
        ids = list(encoding.ids)
        whole = not example.completion or self._options.train_on == "all"
        begin = 0 if whole else len(prompt)
        mask = list(mask_of_spans(encoding, [(begin, len(text))]))
        eos = self._tokenizer.eos_id
        if ids and ids[-1] == eos:  # the tokenizer's own
            mask[-1] = 1
        elif self._options.end_of_text and eos is not None:
            ids.append(eos)
            mask.append(np.uint8(1))
        return np.array(ids, np.uint32), np.array(mask, np.uint8)
