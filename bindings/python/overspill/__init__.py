"""Overspill for Python: the engine, plans and benchmarks, metrics and traces.

`overspill.torch` trains PyTorch models; `overspill.prepare` makes token files. Neither of them, nor
PyTorch, is imported from here.
"""

from ._core import (
    LANES,
    DType,
    Error,
    LayerInfo,
    LogLevel,
    Loop,
    Plan,
    Statistics,
    Status,
    StepResult,
    TensorInfo,
    TensorSpec,
    Tier,
    __version__,
)
from .command import CommandError, bench, command_path, plan
from .engine import Engine
from .metrics import read_metrics
from .trace import Operation, read_trace

__all__ = [
    "LANES",
    "CommandError",
    "DType",
    "Engine",
    "Error",
    "LayerInfo",
    "LogLevel",
    "Loop",
    "Operation",
    "Plan",
    "Statistics",
    "Status",
    "StepResult",
    "TensorInfo",
    "TensorSpec",
    "Tier",
    "__version__",
    "bench",
    "command_path",
    "plan",
    "read_metrics",
    "read_trace",
]
