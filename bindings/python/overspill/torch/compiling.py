"""torch.compile of wrapped models: modules that hold parameters are compiled one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_REASON = "overspill.torch brings a module's parameters here, which no graph can hold"


def untraced(function: _Function) -> _Function:
    """A hook that torch.compile calls and does not look into, nor at what it calls: the graph
    ends before it, and begins again inside the module."""
    disable: Callable[..., Any] = torch.compiler.disable
    if "reason" in inspect.signature(disable).parameters:
        return disable(function, reason=_REASON)  # type: ignore[no-any-return]
    return disable(function)  # type: ignore[no-any-return]
