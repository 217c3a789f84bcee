"""The token file: its bytes, what a reader gets back, and damage that it names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from overspill.prepare import PrepareError, TokenFileWriter, read_token_file


def write_example(path: Path) -> None:
    """The example of docs/formats/tokens.md."""
    writer = TokenFileWriter(path, vocab_size=10, sequence_len=8, pad_token=0)
    writer.append([1, 5, 6, 7], [0, 0, 1, 1])
    writer.append([1, 8, 9], [1, 0, 1])
    writer.pad(1)
    writer.close({})


def test_bytes_are_the_documents_example(tmp_path: Path) -> None:
    path = tmp_path / "example.tokens"
    write_example(path)
    expected = bytearray(16386)
    for line in (Path(__file__).parent / "token_file_example.tokens.hex").read_text().splitlines():
        offset, content = line.split(": ")
        place = int(offset, 16)
        expected[place : place + len(content) // 2] = bytes.fromhex(content)
    assert path.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [path]


def test_reads_what_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    documents = [rng.integers(0, 100_000, n) for n in (1, 2, 7, 8, 9, 500, 4097)]
    masks = [rng.integers(0, 2, len(d)) for d in documents]
    writer = TokenFileWriter(tmp_path / "a.tokens", vocab_size=100_000)
    for document, mask in zip(documents, masks, strict=True):
        writer.append(document, mask)
        mask[0] = 0
    writer.close({"seed": 3})
    file = read_token_file(tmp_path / "a.tokens")
    assert file.document_count == len(documents)
    assert file.tokens.dtype == np.uint32 and file.sequence_len == 0 and file.pad_token is None
    assert file.trained_count == sum(mask.sum() for mask in masks)
    assert file.metadata == {"seed": 3}
    for index, (document, mask) in enumerate(zip(documents, masks, strict=True)):
        tokens, bits = file.document(index)
        assert np.array_equal(tokens, document) and np.array_equal(bits, mask)


@pytest.mark.parametrize(
    ("offset", "part"),
    [
        (0, "OSPTOKEN"),
        (24, "header"),
        (4096, "tokens"),
        (8192, "loss mask"),
        (12288, "document starts"),
        (16384, "metadata"),
    ],
)
def test_a_changed_byte_is_named(tmp_path: Path, offset: int, part: str) -> None:
    path = tmp_path / "example.tokens"
    write_example(path)
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    with pytest.raises(PrepareError, match=part):
        read_token_file(path)


@pytest.mark.parametrize("size", [0, 100, 256, 4096, 16385])
def test_a_short_file_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "example.tokens"
    write_example(path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(PrepareError, match=str(path)):
        read_token_file(path)


def test_an_aborted_file_leaves_nothing(tmp_path: Path) -> None:
    writer = TokenFileWriter(tmp_path / "a.tokens", vocab_size=10)
    writer.append([1, 2], [1, 1])
    writer.abort()
    assert list(tmp_path.iterdir()) == []
