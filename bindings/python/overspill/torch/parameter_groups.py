"""PyTorch's parameter groups, from what `wrap` is given: parameters of the model, each once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .groups import Group


def _parameters_of(
    listed: Any, known: set[nn.Parameter], replaced: Mapping[nn.Parameter, nn.Parameter]
) -> list[nn.Parameter]:
    """As torch.optim reads them: one parameter, or several, with their names or without."""
    result = []
    for entry in [listed] if isinstance(listed, torch.Tensor) else listed:
        name, parameter = entry if isinstance(entry, tuple) else ("", entry)
        parameter = replaced.get(parameter, parameter)
        if parameter not in known:
            what = name or f"a {type(parameter).__name__} of shape {list(parameter.shape)}"
            raise ValueError(
                f"params: {what} is no parameter of the model; give those of the model that is "
                f"wrapped, as they are when wrap is called"
            )
        result.append(parameter)
    return result


def make_parameter_groups(
    groups: list[Group], given: Iterable[Any] | None, keys: Mapping[str, Any], lr: float,
    replaced: Mapping[nn.Parameter, nn.Parameter],
) -> list[dict[str, Any]]:  # fmt: skip
    """As given, or one group with all that trains. `replaced`: what stands for meta parameters."""
    decay = float(keys.get("weight_decay", 0.0))
    parameters = [p for g in groups for _, p in g.parameters]
    if given is None:
        trainable = [p for p in parameters if p.requires_grad]
        return [{"params": trainable, "lr": lr, "weight_decay": decay}]
    entries = list(given)
    if not all(isinstance(entry, Mapping) for entry in entries):
        entries = [{"params": entries}]
    result = []
    grouped: set[nn.Parameter] = set()
    for entry in entries:
        group = {"lr": lr, "weight_decay": decay, **entry}
        group["params"] = _parameters_of(group["params"], set(parameters), replaced)
        if group["weight_decay"] not in (0, 0.0, decay):
            raise ValueError(
                f"a parameter group has weight_decay {group['weight_decay']}: the engine knows 0 "
                f"and the configuration's weight_decay, which is {decay}"
            )
        if not grouped.isdisjoint(group["params"]):
            raise ValueError("params: a parameter is in several groups; put it into one")
        grouped.update(group["params"])
        result.append(group)
    for parameter in parameters:
        if parameter.requires_grad and parameter not in grouped:
            parameter.requires_grad_(False)  # as any optimizer leaves what it is not given
    return result
