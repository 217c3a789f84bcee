"""Token files as docs/formats/tokens.md describes them: a writer that streams, and a reader.

The writer keeps tokens out of memory; mask and document starts are buffered (a bit a token, eight
bytes a document). Not thread-safe.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import PrepareError

MAGIC = b"OSPTOKEN"
VERSION = 1
HEADER_BYTES = 256
ALIGNMENT = 4096
NO_PADDING = 0xFFFFFFFF
FLAG_MASK = 1
# The fields after the magic, in file order; the header's own checksum is its last 4 bytes.
HEADER = struct.Struct("<8s4I4Q2I6Q4I")
BLOCK_TOKENS = 1 << 20


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class TokenFileWriter:
    """Appends documents to a new file, which gets its name when `close` has written all of it."""

    def __init__(
        self, path: Path, *, vocab_size: int, sequence_len: int = 0, pad_token: int | None = None
    ) -> None:
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.vocab_size = vocab_size
        self.sequence_len = sequence_len
        self.pad_token = pad_token
        self.dtype = np.dtype("<u2" if vocab_size <= 65536 else "<u4")
        self.token_count = 0
        self.trained_count = 0
        self.padding_count = 0
        self._starts: list[int] = []
        self._mask = bytearray()
        self._pending_bits: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._crc = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.partial, "wb")
        self._file.write(bytes(ALIGNMENT))

    @property
    def document_count(self) -> int:
        return len(self._starts)

    def append(self, tokens: npt.ArrayLike, mask: npt.ArrayLike) -> None:
        """One document; its first token's mask bit is cleared, because nothing stands before it."""
        values = np.ascontiguousarray(tokens, dtype=self.dtype)
        bits = (np.asarray(mask) != 0).astype(np.uint8)
        if len(values) == 0 or len(values) != len(bits):
            raise ValueError(f"a document of {len(values)} tokens and a mask of {len(bits)}")
        bits[0] = 0
        self._starts.append(self.token_count)
        self.token_count += len(values)
        self.trained_count += int(bits.sum())
        encoded = values.tobytes()
        self._crc = zlib.crc32(encoded, self._crc)
        self._file.write(encoded)
        bits = np.concatenate([self._pending_bits, bits])
        whole = len(bits) // 8 * 8
        self._mask += np.packbits(bits[:whole], bitorder="little").tobytes()
        self._pending_bits = bits[whole:]

    def pad(self, count: int) -> None:
        """Ends a sequence with a document of padding."""
        if count > 0:
            if self.pad_token is None:
                raise ValueError("padding without a pad_token")
            self.append(np.full(count, self.pad_token), np.zeros(count, np.uint8))
            self.padding_count += count

    def abort(self) -> None:
        """Removes what was written."""
        self._file.close()
        self.partial.unlink(missing_ok=True)

    def close(self, metadata: dict[str, Any]) -> None:
        """Writes the other sections and the header, and gives the file its name."""
        if self.token_count == 0:
            raise ValueError("a token file without tokens")
        self._mask += np.packbits(self._pending_bits, bitorder="little").tobytes()
        starts = np.array([*self._starts, self.token_count], dtype="<u8").tobytes()
        encoded = json.dumps(metadata, ensure_ascii=False).encode()
        offsets = [ALIGNMENT]
        crcs = [self._crc]
        for section in (bytes(self._mask), starts, encoded):
            offset = _aligned(self._file.tell())
            self._file.write(bytes(offset - self._file.tell()))
            self._file.write(section)
            offsets.append(offset)
            crcs.append(zlib.crc32(section))
        self._write_header(offsets, crcs, len(encoded))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self.partial, self.path)

    def _write_header(self, offsets: list[int], crcs: list[int], metadata_bytes: int) -> None:
        file_bytes = self._file.tell()
        header = HEADER.pack(
            MAGIC,
            VERSION,
            HEADER_BYTES,
            self.dtype.itemsize,
            FLAG_MASK,
            self.token_count,
            len(self._starts),
            self.sequence_len,
            self.trained_count,
            self.vocab_size,
            self.pad_token if self.padding_count else NO_PADDING,
            *offsets,
            metadata_bytes,
            file_bytes,
            *crcs,
        )
        header = header.ljust(HEADER_BYTES - 4, b"\0")
        self._file.seek(0)
        self._file.write(header + struct.pack("<I", zlib.crc32(header)))


@dataclass(frozen=True)
class TokenFile:
    """A token file's header, and its sections as read-only maps."""

    path: Path
    token_count: int
    document_count: int
    sequence_len: int
    trained_count: int
    vocab_size: int
    pad_token: int | None
    tokens: npt.NDArray[Any]
    starts: npt.NDArray[np.uint64]
    metadata: dict[str, Any]
    packed_mask: npt.NDArray[np.uint8] | None

    def mask(self, begin: int = 0, end: int | None = None) -> npt.NDArray[np.uint8]:
        """Whether tokens [begin, end) are trained on, one byte each."""
        end = self.token_count if end is None else end
        if self.packed_mask is None:
            trained = np.ones(end - begin, np.uint8)
            firsts = self.starts[(self.starts >= begin) & (self.starts < end)]
            trained[(firsts - np.uint64(begin)).astype(np.int64)] = 0
            return trained
        packed = self.packed_mask[begin // 8 : -(-end // 8)]
        bits = np.unpackbits(packed, bitorder="little")
        return bits[begin % 8 : begin % 8 + end - begin]

    def document(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
        """Tokens and mask of one document."""
        begin, end = int(self.starts[index]), int(self.starts[index + 1])
        return self.tokens[begin:end], self.mask(begin, end)


def _damaged(path: Path, cause: str) -> PrepareError:
    return PrepareError(f"{path}: {cause}; copy the file again, or make it with overspill prepare")


def _read_header(path: Path) -> tuple[Any, ...]:
    with open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
    if header[:8] != MAGIC:
        raise _damaged(path, "not a token file (it does not begin with OSPTOKEN)")
    if len(header) < HEADER_BYTES:
        raise _damaged(path, f"{len(header)} bytes, shorter than its header of {HEADER_BYTES}")
    if zlib.crc32(header[:-4]) != struct.unpack("<I", header[-4:])[0]:
        raise _damaged(path, "the header's checksum does not match")
    fields = HEADER.unpack_from(header)
    if fields[1] != VERSION or fields[2] != HEADER_BYTES:
        raise PrepareError(f"{path}: version {fields[1]}, this program reads {VERSION}; update it")
    return fields[3:]


def read_token_file(path: str | os.PathLike[str], *, check: bool = True) -> TokenFile:
    """Maps a file. `check` also reads all of it and compares the checksums."""
    path = Path(path)
    fields = _read_header(path)
    token_bytes, flags, count, documents, sequence_len, trained, vocab_size, pad = fields[:8]
    tokens_at, mask_at, documents_at, metadata_at, metadata_bytes, file_bytes = fields[8:14]
    if path.stat().st_size != file_bytes:
        raise _damaged(path, f"{path.stat().st_size} bytes, its header says {file_bytes}")

    def section(dtype: str, offset: int, length: int) -> npt.NDArray[Any]:
        return np.memmap(path, np.dtype(dtype), "r", offset, (length,))

    tokens = section(f"<u{token_bytes}", tokens_at, count)
    mask = section("u1", mask_at, -(-count // 8)) if flags & FLAG_MASK else None
    starts = section("<u8", documents_at, documents + 1)
    metadata = section("u1", metadata_at, metadata_bytes)
    if check:
        sections = (tokens, mask, starts, metadata)
        names = ("tokens", "loss mask", "document starts", "metadata")
        for name, values, crc in zip(names, sections, fields[14:18], strict=True):
            if values is not None and zlib.crc32(values.data) != crc:
                raise _damaged(path, f"the checksum of the {name} does not match")
    return TokenFile(
        path,
        count,
        documents,
        sequence_len,
        trained,
        vocab_size,
        None if pad == NO_PADDING else pad,
        tokens,
        starts,
        json.loads(metadata.tobytes()),
        mask,
    )
