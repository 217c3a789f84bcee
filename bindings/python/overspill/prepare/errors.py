"""The one error of `overspill prepare`: file, line, field, cause and what to do."""

from __future__ import annotations


class PrepareError(Exception):
    """An input, tokenizer or option that cannot be used: what, where, why, and the fix."""


def at(where: str, field: str, cause: str, fix: str) -> PrepareError:
    """An error in one field of one record: `chat.jsonl:12: messages[2].role: ...; ...`."""
    place = f"{where}: {field}" if field else where
    return PrepareError(f"{place}: {cause}; {fix}")
