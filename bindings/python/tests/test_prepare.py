"""`overspill prepare` from end to end: packing, split, processes, options and errors."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overspill.prepare import read_token_file
from overspill.prepare.cli import main
from overspill.prepare.packing import Piece, pack, pieces_of
from overspill.prepare.pipeline import split_documents


def run(data: Path, out: Path, *arguments: Any, name: str = "chat.jsonl") -> int:
    inputs = [str(data / name)]
    return main(
        [*inputs, "--tokenizer", str(data), "-o", str(out), "-j", "1", *map(str, arguments)]
    )


def golden(data: Path, key: str) -> list[list[list[int]]]:
    return json.loads((data / "golden.json").read_text())[key]  # type: ignore[no-any-return]


def test_documents_are_whole_and_sequences_full(data: Path, tmp_path: Path) -> None:
    assert run(data, tmp_path, "--sequence-len", 128) == 0
    file = read_token_file(tmp_path / "train.tokens")
    assert file.sequence_len == 128 and file.token_count % 128 == 0
    assert set(range(0, file.token_count, 128)) <= set(file.starts.tolist())
    expected = sorted(tokens for tokens, _ in golden(data, "chat model assistant"))
    found = [file.document(i)[0].tolist() for i in range(file.document_count)]
    padding = [d for d in found if set(d) == {file.pad_token}]
    assert sorted(d for d in found if set(d) != {file.pad_token}) == expected
    assert sum(map(len, padding)) == file.metadata["padding_count"]
    assert file.mask().sum() == file.trained_count


def test_one_document_a_sequence(data: Path, tmp_path: Path) -> None:
    assert run(data, tmp_path, "--sequence-len", 128, "--packing", "one") == 0
    file = read_token_file(tmp_path / "train.tokens")
    for index, (tokens, mask) in enumerate(golden(data, "chat model assistant")):
        begin = 128 * index
        assert file.tokens[begin : begin + len(tokens)].tolist() == tokens
        assert file.mask(begin, begin + len(tokens)).tolist() == mask
        assert not file.mask(begin + len(tokens), begin + 128).any()


def test_a_stream_has_documents_one_after_the_other(data: Path, tmp_path: Path) -> None:
    assert run(data, tmp_path, "--packing", "stream", name="text.jsonl") == 0
    file = read_token_file(tmp_path / "train.tokens")
    expected = golden(data, "text model assistant")
    assert file.sequence_len == 0 and file.pad_token is None
    assert file.tokens.tolist() == [t for tokens, _ in expected for t in tokens]
    assert file.trained_count == file.token_count - file.document_count


def test_processes_do_not_change_the_result(data: Path, tmp_path: Path) -> None:
    many = tmp_path / "many.jsonl"
    lines = (data / "chat.jsonl").read_text().splitlines()
    many.write_text("\n".join(lines * 40) + "\n\n")
    options = [
        "--tokenizer",
        str(data),
        "--sequence-len",
        "256",
        "--validation",
        "0.1",
        "--shuffle",
        "--seed",
        "5",
        "--quiet",
    ]
    for processes in ("1", "3"):
        out = str(tmp_path / processes)
        assert main([str(many), "-o", out, "-j", processes, *options]) == 0
    for name in ("train.tokens", "validation.tokens"):
        one, three = (tmp_path / p / name for p in ("1", "3"))
        assert one.read_bytes() == three.read_bytes()
    assert read_token_file(tmp_path / "1" / "validation.tokens").metadata["examples"] == 24


@pytest.mark.parametrize(("too_long", "kept"), [("cut", 1), ("split", 3), ("drop", 0)])
def test_long_documents(too_long: str, kept: int) -> None:
    pieces = pieces_of(4, 25, 10, too_long)
    assert len(pieces) == kept
    assert [p.length for p in pieces] == [10, 10, 5][:kept]


def test_packing_wastes_little_and_loses_nothing() -> None:
    rng = np.random.default_rng(1)
    pieces = [Piece(i, 0, int(n)) for i, n in enumerate(rng.integers(1, 100, 500))]
    sequences = pack(pieces, 128, together=True)
    assert sorted(p.document for s in sequences for p in s) == list(range(500))
    assert all(sum(p.length for p in s) <= 128 for s in sequences)
    assert len(sequences) <= 1.05 * sum(p.length for p in pieces) / 128 + 1
    assert [s[0].document for s in sequences] == sorted(s[0].document for s in sequences)


def test_split_is_exact_and_by_the_seed() -> None:
    train, validation = split_documents(100, 0.1, 3)
    assert len(validation) == 10 and sorted(train + validation) == list(range(100))
    assert split_documents(100, 0.1, 3) == (train, validation)
    assert split_documents(100, 10, 4)[1] != validation


def write(path: Path, record: Any) -> Path:
    path.write_text(json.dumps({"text": "first"}) + "\n" + json.dumps(record) + "\n")
    return path


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [{"role": "user"}]}, ["bad.jsonl:2", "messages[0].content"]),
        ({"messages": []}, ["bad.jsonl:2", "messages"]),
        ({"messages": [{"role": "user", "content": "hi"}]}, ["bad.jsonl:2", "no assistant"]),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            ["messages[0].content[0]", "image"],
        ),
        (
            {"conversations": [{"from": "martian", "value": "hi"}]},
            ["conversations[0].from", "martian"],
        ),
        ({"instruction": "x", "output": 3}, ["bad.jsonl:2", "output", "int"]),
        ({"prompt": "x", "completion": ""}, ["completion", "empty"]),
        ({"unknown": 1}, ["bad.jsonl:2", "unknown", "--format"]),
        ([1, 2], ["bad.jsonl:2", "list"]),
    ],
)
def test_errors_name_file_line_and_field(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: Any, expected: list[str]
) -> None:
    bad = write(tmp_path / "bad.jsonl", record)
    for processes in ("1", "2"):
        arguments = [str(bad), "--tokenizer", str(data), "-o", str(tmp_path / "out")]
        assert main([*arguments, "-j", processes]) == 1
        error = capsys.readouterr().err
        assert all(text in error for text in expected), error
    assert list((tmp_path / "out").iterdir()) == []


def test_bad_json_and_bad_utf8(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "a"}\n{"text": \n')
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 au lait")
    for name, expected in (("bad.jsonl", "bad.jsonl:2"), ("bad.txt", "byte 3")):
        assert run(tmp_path, tmp_path / "out", "--tokenizer", data, name=name) == 1
        assert expected in capsys.readouterr().err


def test_a_template_that_cannot_be_made_ends_several_processes_too(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for message in messages %}")
    for template in ("no-such-name", broken):
        assert run(data, tmp_path / "out", "--template", template, "-j", 2) == 1
        assert str(template) in capsys.readouterr().err


def kill_a_worker() -> None:
    """As the kernel does to the largest process when memory runs out."""
    while True:
        for child in multiprocessing.active_children():
            try:
                os.kill(child.pid or 0, signal.SIGKILL)
            except ProcessLookupError:
                continue
            return
        time.sleep(0.01)


def test_a_process_that_is_killed_ends_the_preparation(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.dumps({"text": "hello world " * 4000}) + "\n"
    (tmp_path / "large.jsonl").write_text(record * 256)
    killer = threading.Thread(target=kill_a_worker, daemon=True)
    killer.start()
    options = ["--tokenizer", data, "--packing", "stream", "-j", 2]
    assert run(tmp_path, tmp_path / "out", *options, name="large.jsonl") == 1
    killer.join()
    assert "killed" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_sentencepiece_model_says_how_to_convert_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    assert run(data, tmp_path / "out", "--tokenizer", tmp_path) == 1
    assert "save_pretrained" in capsys.readouterr().err


def test_tool_calls_need_a_template_that_has_a_form_for_them(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    record = {
        "conversations": [
            {"from": "human", "value": "1 + 2?"},
            {"from": "function_call", "value": call},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "Three."},
        ]
    }
    (tmp_path / "calls.jsonl").write_text(json.dumps(record) + "\n")
    options = ["--tokenizer", data, "--template"]
    assert run(tmp_path, tmp_path / "out", *options, "chatml", name="calls.jsonl") == 1
    assert "tool calls" in capsys.readouterr().err
    assert run(tmp_path, tmp_path / "out", *options, "qwen", name="calls.jsonl") == 0


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "overspill prepare chats.jsonl --tokenizer" in capsys.readouterr().out
