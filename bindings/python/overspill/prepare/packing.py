"""Which documents share a sequence: whole documents packed together, one each, or a stream."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

PACKING = ("documents", "one", "stream")
TOO_LONG = ("cut", "split", "drop", "error")


@dataclass(frozen=True)
class Piece:
    """Tokens [begin, end) of a document."""

    document: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def pieces_of(document: int, length: int, limit: int, too_long: str) -> list[Piece]:
    """A document as pieces of at most `limit` tokens; none when it is dropped."""
    if length <= limit:
        return [Piece(document, 0, length)]
    if too_long == "drop":
        return []
    if too_long == "cut":
        return [Piece(document, 0, limit)]
    return [Piece(document, b, min(b + limit, length)) for b in range(0, length, limit)]


def pack(pieces: Sequence[Piece], sequence_len: int, *, together: bool) -> list[list[Piece]]:
    """Sequences of pieces. Together: best fit, longest first; otherwise one a sequence.

    Sequences are in the order of their first pieces, and so are the pieces in each.
    """
    if not together:
        return [[piece] for piece in pieces]
    by_length = sorted(range(len(pieces)), key=lambda i: (-pieces[i].length, i))
    bins: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []  # (room, -bin): of equal rooms the oldest bin is last
    for index in by_length:
        length = pieces[index].length
        place = bisect.bisect_left(open_bins, (length, -len(bins)))
        if place == len(open_bins):
            bins.append([index])
            room, number = sequence_len - length, len(bins) - 1
        else:
            room, number = open_bins.pop(place)
            room, number = room - length, -number
            bins[number].append(index)
        if room > 0:
            bisect.insort(open_bins, (room, -number))
    ordered = sorted(sorted(members) for members in bins)
    return [[pieces[i] for i in members] for members in ordered]
