"""Tokens and masks by Hugging Face transformers: what `overspill prepare` must equal.

Independent of the module under test but for the records' meaning: conversations come as lists of
messages, and apply_chat_template does the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from overspill.prepare.records import Example, RecordOptions, examples_of, read_raw

TEMPLATES = Path(__file__).parents[1] / "overspill" / "prepare" / "templates"
CASES = [
    ("chat", "model", "assistant"),
    ("chat", "model", "last"),
    ("chat", "model", "all"),
    ("chat", "chatml", "assistant"),
    ("chat", "llama3", "assistant"),
    ("chat", "mistral", "last"),
    ("chat", "qwen", "assistant"),
    ("chat", "alpaca", "assistant"),
    ("completion", "model", "assistant"),
    ("completion", "model", "all"),
    ("text", "model", "assistant"),
]


def load(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(path))


def template_text(choice: str) -> str | None:
    if choice == "model":
        return None
    return (TEMPLATES / f"{choice}.jinja").read_text(encoding="utf-8")


def _ids(
    tokenizer: Any, messages: list[Any], tools: Any, template: str | None, prompt: bool
) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=prompt,
        )["input_ids"]
    )


def _by_prefixes(
    tokenizer: Any, example: Example, template: str | None, train_on: str
) -> list[int]:
    """Token numbers before and after each assistant message; they must be prefixes of the whole."""
    messages, tools = example.messages, example.tools
    whole = _ids(tokenizer, messages, tools, template, False)
    mask = [0] * len(whole)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for i in turns[-1:] if train_on == "last" else turns:
        before = _ids(tokenizer, messages[:i], tools, template, True) if i else []
        after = _ids(tokenizer, messages[: i + 1], tools, template, False)
        assert whole[: len(before)] == before and whole[: len(after)] == after
        mask[len(before) : len(after)] = [1] * (len(after) - len(before))
    return mask


def encode_chat(
    tokenizer: Any, example: Example, template: str | None, train_on: str
) -> list[list[int]]:
    source = template or tokenizer.chat_template
    if train_on == "all" or "generation -%}" not in source:
        ids = _ids(tokenizer, example.messages, example.tools, template, False)
        if train_on == "all":
            return [ids, [1] * len(ids)]
        return [ids, _by_prefixes(tokenizer, example, template, train_on)]
    named = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}
    encoded = tokenizer.apply_chat_template(
        example.messages,
        tools=example.tools,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **named,
    )
    ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    if (
        train_on == "last"
    ):  # the last of the mask's runs, as each message ends with an untrained token
        last = max(i for i, bit in enumerate(mask) if bit)
        first = last
        while first > 0 and mask[first - 1]:
            first -= 1
        mask = [0] * first + [1] * (last + 1 - first) + [0] * (len(mask) - last - 1)
    return [ids, mask]


def encode_text(tokenizer: Any, example: Example, train_on: str) -> list[list[int]]:
    """A prompt's tokens are those that end before the completion begins."""
    text = example.prompt + example.completion if example.completion else example.text
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    begin = len(example.prompt) if example.completion and train_on != "all" else 0
    mask = [int(e > begin and b < len(text)) for b, e in encoded["offset_mapping"]]
    if tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
        mask.append(1)
    return [ids, mask]


def encode_file(tokenizer: Any, path: Path, template: str, train_on: str) -> list[list[list[int]]]:
    """[tokens, mask] of each example of a file."""
    encoded = []
    for where, raw, _ in read_raw(path):
        for example in examples_of(where, raw, RecordOptions()):
            if example.messages:
                encoded.append(encode_chat(tokenizer, example, template_text(template), train_on))
            else:
                encoded.append(encode_text(tokenizer, example, train_on))
    return json.loads(json.dumps(encoded))
