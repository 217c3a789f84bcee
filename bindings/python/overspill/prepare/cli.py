"""The command line of `overspill prepare`."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .encoding import TRAIN_ON, EncodingOptions
from .errors import PrepareError
from .packing import PACKING, TOO_LONG
from .pipeline import PartSummary, PrepareOptions, prepare
from .records import FORMATS, RecordOptions
from .templates import template_names, unknown_tokens
from .tokenizer import load_tokenizer

EXAMPLES = """\
examples:
  # a chat model, its own template; only what the assistant says is trained on
  overspill prepare chats.jsonl --tokenizer /models/Llama-3.2-1B-Instruct -o data

  # a base model and an alpaca data set, 5 % kept for validation
  overspill prepare alpaca.json --tokenizer /models/Llama-3.2-1B --template chatml \\
      --validation 0.05 -o data

  # questions and answers without a template: the answer is trained on
  overspill prepare gsm8k.jsonl --tokenizer /models/Llama-3.2-1B --separator '\\n' -o data

  # plain text as one stream, which the trainer cuts
  overspill prepare books/*.txt --tokenizer /models/Llama-3.2-1B --packing stream -o data

then in the configuration of overspill train:
  datasets:
    - path: data/train.tokens
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overspill prepare",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Tokenises text and JSONL with a model's own tokenizer and chat template into "
        "token files with loss masks and document boundaries.",
    )
    add = parser.add_argument
    add(
        "inputs",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSONL (.jsonl), a JSON list (.json), or text (any other name)",
    )
    add(
        "--tokenizer",
        required=True,
        type=Path,
        metavar="DIR",
        help="the model's directory, or a tokenizer.json",
    )
    add(
        "-o",
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="where train.tokens and validation.tokens go",
    )
    records = parser.add_argument_group("records")
    add = records.add_argument
    add("--format", choices=FORMATS, help="kind of the records (default: from their fields)")
    add("--prompt-field", metavar="NAME", help="field of a completion's prompt")
    add("--completion-field", metavar="NAME", help="field of a completion")
    add("--text-field", default="text", metavar="NAME", help="field of a text (default: text)")
    add("--as-chat", action="store_true", help="make prompt and completion a conversation")
    add(
        "--separator",
        default="",
        metavar="TEXT",
        help=r"between prompt and completion; \n and \t are understood (default: nothing)",
    )
    add(
        "--document-separator",
        metavar="TEXT",
        help="cuts text files into documents, for example '<|endoftext|>'",
    )
    add("--no-end-of-text", action="store_true", help="no end-of-text token after texts")
    chat = parser.add_argument_group("conversations and loss")
    add = chat.add_argument
    add(
        "--template",
        default="model",
        metavar="NAME",
        help=f"model (its own, the default), {', '.join(template_names())}, or a Jinja file",
    )
    add(
        "--train-on",
        choices=TRAIN_ON,
        default="assistant",
        help="assistant: all it says; last: its last message; all: every token",
    )
    add(
        "--date",
        type=datetime.date.fromisoformat,
        metavar="YYYY-MM-DD",
        help="the day that templates write which ask for it (default: today)",
    )
    layout = parser.add_argument_group("sequences")
    add = layout.add_argument
    add("--sequence-len", type=int, default=2048, metavar="N", help="tokens (default: 2048)")
    add(
        "--packing",
        choices=PACKING,
        default="documents",
        help="documents: whole ones share a sequence; one: one each, padded; stream: one after "
        "the other, cut by the trainer (default: documents)",
    )
    add(
        "--too-long",
        choices=TOO_LONG,
        default="cut",
        help="documents longer than a sequence: cut off, split into several, drop, or stop "
        "(default: cut)",
    )
    add(
        "--validation",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the examples, or from 1 on their number (default: 0)",
    )
    add("--shuffle", action="store_true", help="shuffle the examples before they are packed")
    add("--seed", type=int, default=0, help="of split and shuffle (default: 0)")
    add(
        "-j",
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes that encode (default: all processors); the result is the same",
    )
    add("--quiet", action="store_true", help="no progress bar and no summary")
    return parser


def _options(arguments: argparse.Namespace) -> PrepareOptions:
    if arguments.sequence_len < 2 or arguments.processes < 1 or arguments.validation < 0:
        raise PrepareError(
            "--sequence-len must be 2 or more, --processes 1 or more, --validation 0 or more"
        )
    if (arguments.prompt_field is None) != (arguments.completion_field is None):
        raise PrepareError("--prompt-field and --completion-field go together; give both")
    separator = arguments.separator.replace("\\n", "\n").replace("\\t", "\t")
    return PrepareOptions(
        inputs=arguments.inputs,
        tokenizer=arguments.tokenizer,
        output=arguments.output,
        sequence_len=arguments.sequence_len,
        template=arguments.template,
        packing=arguments.packing,
        too_long=arguments.too_long,
        document_separator=arguments.document_separator,
        validation=arguments.validation,
        seed=arguments.seed,
        shuffle=arguments.shuffle,
        processes=arguments.processes,
        date=arguments.date,
        progress=False if arguments.quiet else None,
        records=RecordOptions(
            format=arguments.format,
            prompt_field=arguments.prompt_field,
            completion_field=arguments.completion_field,
            text_field=arguments.text_field,
            as_chat=arguments.as_chat,
        ),
        encoding=EncodingOptions(
            train_on=arguments.train_on,
            separator=separator,
            end_of_text=not arguments.no_end_of_text,
        ),
    )


def _print_summary(part: PartSummary) -> None:
    sequences = f" in {part.sequences} sequences" if part.sequences else ""
    share = part.trained / part.tokens
    padding = f", {part.padding / part.tokens:.1%} padding" if part.padding else ""
    print(
        f"{part.path}: {part.examples} examples, {part.tokens} tokens{sequences}, "
        f"{share:.1%} trained on{padding}"
    )
    if part.cut:
        print(f"  {part.cut} examples were longer than a sequence and lost their rest")
    if part.dropped:
        print(f"  {part.dropped} examples were dropped: too long, or nothing to train on in them")


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = make_parser().parse_args(arguments)
    try:
        options = _options(parsed)
        missing = unknown_tokens(options.template, load_tokenizer(options.tokenizer))
        if missing:
            print(
                f"warning: the tokenizer of {options.tokenizer} has no token "
                f"{', '.join(missing)} of template {options.template}; it spells them out",
                file=sys.stderr,
            )
        parts = prepare(options)
    except PrepareError as error:
        print(f"overspill prepare: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"overspill prepare: {error.filename or ''}: {error.strerror}; check space and "
            f"permissions",
            file=sys.stderr,
        )
        return 1
    if not parsed.quiet:
        for part in parts:
            _print_summary(part)
    return 0
