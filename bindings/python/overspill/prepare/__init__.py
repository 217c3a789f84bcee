"""`overspill prepare`: text and JSONL to token files with loss masks and document boundaries.

Needs Hugging Face `tokenizers`, `jinja2` and NumPy; nothing here needs the engine.
"""

from .encoding import EncodingOptions
from .errors import PrepareError
from .pipeline import PartSummary, PrepareOptions, prepare
from .records import RecordOptions
from .token_file import TokenFile, TokenFileWriter, read_token_file

__all__ = [
    "EncodingOptions",
    "PartSummary",
    "PrepareError",
    "PrepareOptions",
    "RecordOptions",
    "TokenFile",
    "TokenFileWriter",
    "prepare",
    "read_token_file",
]
