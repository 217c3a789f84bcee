"""Tokens, templates and masks equal Hugging Face transformers': committed goldens, and live."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import reference

from overspill.prepare.encoding import EncodingOptions, ExampleEncoder
from overspill.prepare.records import RecordOptions, examples_of, read_raw
from overspill.prepare.templates import load_template
from overspill.prepare.tokenizer import load_tokenizer


def encode(tokenizer_path: Path, path: Path, template: str, train_on: str) -> list[list[list[int]]]:
    tokenizer = load_tokenizer(tokenizer_path)
    encoder = ExampleEncoder(
        tokenizer, load_template(template, tokenizer), EncodingOptions(train_on=train_on)
    )
    return [
        [array.tolist() for array in encoder.encode(example)]
        for where, raw, _ in read_raw(path)
        for example in examples_of(where, raw, RecordOptions())
    ]


@pytest.mark.parametrize(("name", "template", "train_on"), reference.CASES)
def test_equals_goldens(data: Path, name: str, template: str, train_on: str) -> None:
    golden = json.loads((data / "golden.json").read_text())[f"{name} {template} {train_on}"]
    assert encode(data, data / f"{name}.jsonl", template, train_on) == golden


@pytest.mark.parametrize(("name", "template", "train_on"), reference.CASES)
def test_goldens_are_what_transformers_gives(
    data: Path, name: str, template: str, train_on: str
) -> None:
    pytest.importorskip("transformers")
    golden = json.loads((data / "golden.json").read_text())[f"{name} {template} {train_on}"]
    tokenizer = reference.load(data)
    assert reference.encode_file(tokenizer, data / f"{name}.jsonl", template, train_on) == golden


INSTRUCT = [
    "fastchat-dummy_conversation.sharegpt.json",
    "torchtune-chat_tiny.sharegpt.json",
    "llamafactory-identity.alpaca.json",
    "self-instruct-seed_tasks.jsonl",
    "gsm8k-test.jsonl",
    "llamafactory-messages-tools.jsonl",
]


def torchtitan(shared_data: Path, folder: Path) -> Path:
    """A byte-level tokenizer whose special tokens and template are in its configuration alone."""
    source = shared_data / "tokenizers" / "small"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / f"torchtitan-test-{name}").read_bytes())
    return folder


def gpt2(shared_data: Path, folder: Path) -> Path:
    for file in (shared_data / "tokenizers" / "gpt2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("template", ["model", "chatml", "llama3", "mistral", "alpaca", "qwen"])
@pytest.mark.parametrize("name", INSTRUCT)
def test_equals_transformers_on_instruction_data(
    shared_data: Path, tmp_path: Path, name: str, template: str
) -> None:
    """Every record; templates without a form for tool calls refuse those."""
    pytest.importorskip("transformers")
    folder = torchtitan(shared_data, tmp_path)
    tools = "tools" in name
    if tools and template in ("chatml", "llama3", "mistral", "alpaca"):
        pytest.skip("no form for tool calls")
    expected = reference.encode_file(
        reference.load(folder), shared_data / "instruct" / name, template, "assistant"
    )
    actual = encode(folder, shared_data / "instruct" / name, template, "assistant")
    assert actual == expected


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
@pytest.mark.parametrize("name", INSTRUCT[:2])
def test_equals_transformers_with_gpt2(
    shared_data: Path, tmp_path: Path, name: str, train_on: str
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = gpt2(shared_data, tmp_path)
    tokenizer = transformers.GPT2TokenizerFast(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt")
    )
    tokenizer.chat_template = reference.template_text("chatml")
    path = shared_data / "instruct" / name
    expected = reference.encode_file(tokenizer, path, "chatml", train_on)
    assert encode(folder, path, "chatml", train_on) == expected


@pytest.mark.parametrize("name", ["gsm8k-train.jsonl", "gsm8k-test.jsonl"])
def test_completions_equal_transformers_with_gpt2(
    shared_data: Path, tmp_path: Path, name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = gpt2(shared_data, tmp_path)
    tokenizer = transformers.GPT2TokenizerFast(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt")
    )
    path = shared_data / "instruct" / name
    expected = reference.encode_file(tokenizer, path, "model", "assistant")
    assert encode(folder, path, "model", "assistant") == expected


def test_last_trains_on_the_last_message_alone(data: Path) -> None:
    both = encode(data, data / "chat.jsonl", "chatml", "assistant")[1]
    last = encode(data, data / "chat.jsonl", "chatml", "last")[1]
    assert both[0] == last[0]
    begin = max(i for i in range(1, len(both[1])) if both[1][i] and not both[1][i - 1])
    assert np.array_equal(last[1], [bit * (i >= begin) for i, bit in enumerate(both[1])])
