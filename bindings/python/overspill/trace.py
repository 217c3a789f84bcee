"""Traces in Chrome's format, which Perfetto shows: the operations of a step on their lanes."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Operation:
    """One operation; times in seconds since the trace's start."""

    name: str
    lane: str
    start: float
    duration: float
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.start + self.duration


def read_trace(path: str | os.PathLike[str]) -> list[Operation]:
    """All operations of a trace.json, by their start."""
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    events = content["traceEvents"] if isinstance(content, dict) else content
    lanes = {
        (event.get("pid"), event.get("tid")): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    operations = [
        Operation(
            event.get("name", ""),
            lanes.get((event.get("pid"), event.get("tid")), str(event.get("tid"))),
            event["ts"] / 1e6,
            event.get("dur", 0) / 1e6,
            event.get("args", {}),
        )
        for event in events
        if event.get("ph") == "X"
    ]
    return sorted(operations, key=lambda operation: operation.start)


def busy_seconds(operations: list[Operation]) -> dict[str, float]:
    """Seconds that each lane was at work."""
    busy: dict[str, float] = defaultdict(float)
    for operation in operations:
        busy[operation.lane] += operation.duration
    return dict(busy)
