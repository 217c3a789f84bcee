"""The two passes of a preparation: encode every example (in several processes), then split, pack
and write. The result depends on inputs, options and seed alone, not on the number of processes.
"""

from __future__ import annotations

import datetime
import itertools
import multiprocessing
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .encoding import EncodingOptions, ExampleEncoder, Mask, Tokens
from .errors import PrepareError
from .packing import Piece, pack, pieces_of
from .progress import Progress
from .records import RecordOptions, examples_of, read_raw
from .spool import Spool
from .templates import load_template
from .token_file import TokenFileWriter
from .tokenizer import ModelTokenizer, load_tokenizer

BATCH_RECORDS = 64
Batch = list[tuple[str, Any, int]]
Encoded = tuple[list[tuple[Tokens, Mask]], int]  # documents, bytes of input


@dataclass(frozen=True)
class PrepareOptions:
    """Everything `overspill prepare` can be told; docs/python.md explains the fields."""

    inputs: list[Path]
    tokenizer: Path
    output: Path
    sequence_len: int = 2048
    template: str = "model"
    packing: str = "documents"
    too_long: str = "cut"
    document_separator: str | None = None
    validation: float = 0.0
    seed: int = 0
    shuffle: bool = False
    processes: int = 1
    date: datetime.date | None = None
    progress: bool | None = None
    records: RecordOptions = field(default_factory=RecordOptions)
    encoding: EncodingOptions = field(default_factory=EncodingOptions)


@dataclass
class PartSummary:
    """What one token file holds."""

    path: Path
    part: str
    examples: int = 0
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    trained: int = 0
    padding: int = 0
    cut: int = 0
    dropped: int = 0


def _make_encoder(options: PrepareOptions) -> ExampleEncoder:
    tokenizer = load_tokenizer(options.tokenizer)
    template = load_template(options.template, tokenizer, options.date)
    return ExampleEncoder(tokenizer, template, options.encoding)


def _encode_batch(encoder: ExampleEncoder, options: RecordOptions, batch: Batch) -> Encoded:
    documents = []
    for where, raw, _ in batch:
        for example in examples_of(where, raw, options):
            tokens, mask = encoder.encode(example)
            if len(tokens) > 0:
                documents.append((tokens, mask))
    return documents, sum(size for _, _, size in batch)


class _Worker:
    """What each process of the pool keeps."""

    encoder: ExampleEncoder
    options: RecordOptions

    @classmethod
    def start(cls, options: PrepareOptions) -> None:
        cls.encoder = _make_encoder(options)
        cls.options = options.records

    @classmethod
    def run(cls, batch: Batch) -> Encoded | PrepareError:
        try:
            return _encode_batch(cls.encoder, cls.options, batch)
        except PrepareError as error:
            return error


def _batches(options: PrepareOptions) -> Iterator[Batch]:
    records = itertools.chain.from_iterable(
        read_raw(path, options.document_separator) for path in options.inputs
    )
    while batch := list(itertools.islice(records, BATCH_RECORDS)):
        yield batch


def _encode_all(options: PrepareOptions) -> Iterator[Encoded]:
    """In input order. At most a few batches a process are under way, however long the input."""
    encoder = _make_encoder(options)  # here as well, where its errors are the caller's
    if options.processes == 1:
        for batch in _batches(options):
            yield _encode_batch(encoder, options.records, batch)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        options.processes, multiprocessing.get_context("spawn"), _Worker.start, (options,)
    )
    try:
        pending: deque[Future[Encoded | PrepareError]] = deque()
        for batch in _batches(options):
            pending.append(_submit(pool, batch))
            if len(pending) >= 4 * options.processes:
                yield _result_of(pending.popleft())
        while pending:
            yield _result_of(pending.popleft())
    except BrokenProcessPool as error:
        # The pool leaves out those that it was just starting, and would wait for them for ever.
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise PrepareError(
            f"one of the {options.processes} processes that encode was killed, most often because "
            f"memory ran out, or could not start; use fewer with -j, and look into the system's log"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, batch: Batch) -> Future[Encoded | PrepareError]:
    try:
        return pool.submit(_Worker.run, batch)
    except Exception as error:  # starting processes fails in many ways where another is killed
        raise BrokenProcessPool(str(error)) from error


def _result_of(result: Future[Encoded | PrepareError]) -> Encoded:
    value = result.result()
    if isinstance(value, PrepareError):
        raise value
    return value


def _fill_spool(options: PrepareOptions, spool: Spool) -> None:
    progress = Progress(sum(path.stat().st_size for path in options.inputs), shown=options.progress)
    for documents, size in _encode_all(options):
        for tokens, mask in documents:
            spool.append(tokens, mask)
        progress.advance(size, len(documents), sum(len(tokens) for tokens, _ in documents))
    progress.close()
    spool.finish()
    if len(spool) == 0:
        raise PrepareError(
            f"{', '.join(map(str, options.inputs))}: no record with text; check the files"
        )


def split_documents(count: int, validation: float, seed: int) -> tuple[list[int], list[int]]:
    """Document numbers of the training and validation parts: a share below 1, or a number."""
    wanted = round(validation * count) if validation < 1 else int(validation)
    if validation > 0 and not 0 < wanted < count:
        raise PrepareError(
            f"--validation {validation:g} of {count} examples leaves {wanted} for validation and "
            f"{count - wanted} for training; both need one at least"
        )
    chosen = set(np.random.default_rng(seed).permutation(count)[:wanted].tolist())
    return [d for d in range(count) if d not in chosen], sorted(chosen)


class _PartWriter:
    """Packs and writes one part."""

    def __init__(self, options: PrepareOptions, tokenizer: ModelTokenizer, spool: Spool) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._spool = spool

    def write(self, path: Path, part: str, documents: list[int]) -> PartSummary:
        options = self._options
        summary = PartSummary(path, part, examples=len(documents))
        if options.shuffle:
            order = np.random.default_rng([options.seed, 1]).permutation(len(documents))
            documents = [documents[i] for i in order]
        pieces = self._pieces(documents, summary)
        if not pieces:
            raise PrepareError(
                f"{part}: none of {len(documents)} examples has a token to train on within "
                f"{options.sequence_len} tokens; raise --sequence-len, or use --train-on all"
            )
        stream = options.packing == "stream"
        length = 0 if stream else options.sequence_len
        writer = TokenFileWriter(
            path,
            vocab_size=self._tokenizer.vocab_size,
            sequence_len=length,
            pad_token=self._tokenizer.padding_id,
        )
        try:
            if stream:
                sequences = [pieces]
            else:
                sequences = pack(pieces, length, together=options.packing == "documents")
            for sequence in sequences:
                for piece in sequence:
                    writer.append(*self._spool.read(piece.document, piece.begin, piece.end))
                if not stream:
                    writer.pad(length - sum(piece.length for piece in sequence))
            self._summarise(writer, summary, 0 if stream else len(sequences))
            writer.close(self._metadata(summary))
        except BaseException:
            writer.abort()
            raise
        return summary

    def _pieces(self, documents: list[int], summary: PartSummary) -> list[Piece]:
        options = self._options
        pieces: list[Piece] = []
        for document in documents:
            length = self._spool.length(document)
            limit = length if options.packing == "stream" else options.sequence_len
            if length > limit and options.too_long == "error":
                raise PrepareError(
                    f"example {document + 1}: {length} tokens, longer than --sequence-len "
                    f"{limit}; raise it, or choose --too-long cut, split or drop"
                )
            kept = [
                piece
                for piece in pieces_of(document, length, limit, options.too_long)
                # A first token has no prediction, so a piece trains on what follows it.
                if self._spool.read(document, piece.begin + 1, piece.end)[1].any()
            ]
            summary.dropped += not kept
            summary.cut += bool(kept) and sum(piece.length for piece in kept) < length
            pieces += kept
        return pieces

    def _summarise(self, writer: TokenFileWriter, summary: PartSummary, sequences: int) -> None:
        summary.documents = writer.document_count
        summary.sequences = sequences
        summary.tokens = writer.token_count
        summary.trained = writer.trained_count
        summary.padding = writer.padding_count

    def _metadata(self, summary: PartSummary) -> dict[str, Any]:
        options = self._options
        return {
            "created_by": "overspill prepare",
            "sources": [path.name for path in options.inputs],
            "tokenizer": {"path": str(options.tokenizer), "sha256": self._tokenizer.sha256},
            "template": options.template,
            "train_on": options.encoding.train_on,
            "packing": options.packing,
            "too_long": options.too_long,
            "seed": options.seed,
            "shuffle": options.shuffle,
            "part": summary.part,
            "examples": summary.examples,
            "dropped": summary.dropped,
            "cut": summary.cut,
            "padding_count": summary.padding,
            "records": asdict(options.records),
        }


def prepare(options: PrepareOptions) -> list[PartSummary]:
    """Writes `output`/train.tokens, and validation.tokens when a share is asked for.

    Throws PrepareError; files of an earlier run are replaced only when the new ones are complete.
    """
    for path in options.inputs:
        if not path.is_file():
            raise PrepareError(f"{path}: no such file; give files of text, JSON or JSONL")
    tokenizer = load_tokenizer(options.tokenizer)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".prepare-", dir=options.output) as scratch:
        spool = Spool(Path(scratch))
        _fill_spool(options, spool)
        train, validation = split_documents(len(spool), options.validation, options.seed)
        writer = _PartWriter(options, tokenizer, spool)
        parts = [writer.write(options.output / "train.tokens", "train", train)]
        if validation:
            path = options.output / "validation.tokens"
            parts.append(writer.write(path, "validation", validation))
    return parts
