"""A progress line on a terminal, and nothing elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """`[#####.....] 52 %  120000 examples  3.1 M tokens  0:12`, at most ten times a second."""

    def __init__(
        self, total_bytes: int, *, shown: bool | None = None, out: TextIO | None = None
    ) -> None:
        self._out = out or sys.stderr
        self._shown = self._out.isatty() if shown is None else shown
        self._total = max(1, total_bytes)
        self._bytes = self._examples = self._tokens = 0
        self._start = self._last = time.monotonic()

    def advance(self, input_bytes: int, examples: int, tokens: int) -> None:
        self._bytes += input_bytes
        self._examples += examples
        self._tokens += tokens
        now = time.monotonic()
        if self._shown and now - self._last >= 0.1:
            self._last = now
            self._draw(now)

    def _draw(self, now: float) -> None:
        share = min(1.0, self._bytes / self._total)
        bar = ("#" * round(20 * share)).ljust(20, ".")
        minutes, seconds = divmod(int(now - self._start), 60)
        self._out.write(
            f"\r[{bar}] {share:4.0%}  {self._examples} examples  "
            f"{self._tokens / 1e6:.1f} M tokens  {minutes}:{seconds:02d} "
        )
        self._out.flush()

    def close(self) -> None:
        if self._shown:
            self._draw(time.monotonic())
            self._out.write("\n")
