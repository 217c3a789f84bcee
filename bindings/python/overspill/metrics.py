"""metrics.jsonl, one object a step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_metrics(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects of a metrics.jsonl, or of the one in a run's output directory, in file order.

    A last line that a running trainer has not finished is left out.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "metrics.jsonl"
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}:{number}: not JSON ({error})") from error
