"""Which parameters are brought in together: a model's blocks, and the modules around them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass
class Group:
    """A module whose forward needs `parameters`; tied ones belong to the first group alone."""

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    # Parameters that an earlier group owns.
    shared: list[nn.Parameter] = field(default_factory=list)
    depth: int = 1  # groups that are held when this one is: itself and those around it


def is_inside(name: str, outer: str) -> bool:
    return name == outer or outer == "" or name.startswith(outer + ".")


def _elements(name: str, container: nn.Module) -> Iterator[str]:
    """Blocks of a container; containers are never called, so theirs are taken instead."""
    for key, child in container.named_children():
        child_name = f"{name}.{key}" if name else key
        if isinstance(child, _CONTAINERS):
            yield from _elements(child_name, child)
        else:
            yield child_name


def find_blocks(model: nn.Module) -> list[str]:
    """Names of the elements of the outermost ModuleLists, which is where transformers keep their
    blocks; without any, those of the outermost Sequential."""
    for kind in (nn.ModuleList, nn.Sequential):
        found: list[str] = []
        outer: list[str] = []
        for name, module in model.named_modules():
            if isinstance(module, kind) and not any(is_inside(name, o) for o in outer):
                outer.append(name)
                found += _elements(name, module)
        if found:
            return found
    return []


def _chosen_blocks(model: nn.Module, blocks: Iterable[str] | None) -> list[str]:
    if blocks is None:
        return find_blocks(model)
    patterns = list(blocks)
    names = [name for name, _ in model.named_modules() if name]
    chosen = []
    for pattern in patterns:
        matched = [name for name in names if re.fullmatch(pattern, name)]
        if not matched:
            raise ValueError(
                f"blocks: no module's name matches {pattern!r}; names look like "
                f"{', '.join(names[:5])}"
            )
        chosen += matched
    for name in chosen:
        if isinstance(model.get_submodule(name), _CONTAINERS):
            raise ValueError(
                f"blocks: {name} is a container that is never called; name its elements"
            )
    return [n for n in chosen if not any(n != o and is_inside(n, o) for o in chosen)]


def find_groups(model: nn.Module, blocks: Iterable[str] | None = None) -> list[Group]:
    """Groups in the order of the model's modules, which is that of the forward as a rule."""
    block_names = _chosen_blocks(model, blocks)
    groups: list[Group] = []
    owners: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        whole = name in block_names
        if not whole and any(is_inside(name, block) for block in block_names):
            continue
        group = Group(name, module)
        for inner, parameter in module.named_parameters(recurse=whole):
            full = f"{name}.{inner}" if name else inner
            if parameter in owners:
                group.shared.append(parameter)
            else:
                owners[parameter] = full
                group.parameters.append((full, parameter))
        if not group.parameters and not group.shared:
            continue
        if isinstance(module, _CONTAINERS):
            raise ValueError(
                f"{name} holds parameters but is never called; name the module that uses it as a "
                f"block (blocks=[...])"
            )
        group.depth += sum(is_inside(name, g.name) for g in groups)
        groups.append(group)
    return groups
