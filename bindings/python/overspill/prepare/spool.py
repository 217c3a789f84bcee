"""Encoded documents on disk between the two passes: appended, then read by number."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .encoding import Mask, Tokens


class Spool:
    """Tokens and masks in two files; only the documents' places are in memory."""

    def __init__(self, directory: Path) -> None:
        self._paths = (directory / "tokens", directory / "mask")
        self._files = [open(path, "wb") for path in self._paths]
        self._ends = [0]
        self._tokens: Tokens = np.zeros(0, np.uint32)
        self._mask: Mask = np.zeros(0, np.uint8)

    def append(self, tokens: Tokens, mask: Mask) -> None:
        self._files[0].write(tokens.tobytes())
        self._files[1].write(mask.tobytes())
        self._ends.append(self._ends[-1] + len(tokens))

    def finish(self) -> None:
        """From here on documents can be read, and none appended."""
        for file in self._files:
            file.close()
        if self._ends[-1] > 0:
            self._tokens = np.memmap(self._paths[0], np.uint32, "r")
            self._mask = np.memmap(self._paths[1], np.uint8, "r")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def length(self, document: int) -> int:
        return self._ends[document + 1] - self._ends[document]

    def read(self, document: int, begin: int, end: int) -> tuple[Tokens, Mask]:
        first = self._ends[document]
        return self._tokens[first + begin : first + end], self._mask[first + begin : first + end]
