"""Hooks on modules and parameters: hold around the forward, and gradients to the engine."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .compiling import untraced
from .groups import Group
from .optimizer import Optimizer
from .pager import Layer, ManagedParameter, Pager


def _outer_hooks() -> tuple[Any, Any] | None:
    """The hooks for saved tensors around ours, such as gradient checkpointing's."""
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return autograd._top_saved_tensors_default_hooks(False)  # type: ignore[no-any-return]


def _saving(pager: Pager) -> saved_tensors_hooks:
    """Hooks that remember weights by their place, and give all else to the hooks around them; or,
    where there are none, to the engine. What a backward computes again stays: it is wanted soon."""
    outer_pack, outer_unpack = _outer_hooks() or (None, None)
    if outer_pack is None and pager.activations and torch._C._current_graph_task_id() == -1:
        pager.activations.begin_forward()
        outer_pack, outer_unpack = pager.activations.pack, pager.activations.unpack
    return saved_tensors_hooks(
        untraced(lambda tensor: pager.pack(tensor, outer_pack)),
        untraced(lambda saved: pager.unpack(saved, outer_unpack)),
    )


class Forward:
    """One call of a module, between its two hooks, or any other use of weights while it lasts."""

    def __init__(self, pager: Pager, layers: list[Layer]) -> None:
        self._pager = pager
        self._held: list[Layer] = []
        self._saved: saved_tensors_hooks | None = None
        self._cache_enabled = torch.is_autocast_cache_enabled()
        try:
            pager.leave_backward()
            for layer in layers:
                pager.hold(layer)
                self._held.append(layer)
        except BaseException:
            self._release()
            raise
        # Autocast would keep its copies of all weights until its context ends.
        torch.set_autocast_cache_enabled(False)
        if torch.is_grad_enabled():
            self._saved = _saving(pager)
            self._saved.__enter__()

    def end(self) -> None:
        if self._saved is not None:
            self._saved.__exit__(None, None, None)
        torch.set_autocast_cache_enabled(self._cache_enabled)
        self._release()

    def _release(self) -> None:
        if self._held:
            try:
                self._pager.release(self._held.pop())
            finally:
                self._release()


def _nodes_of(output: Any) -> list[torch.autograd.graph.Node]:
    """Where the backward enters what made an output: a tensor, or several in any structure."""
    if isinstance(output, torch.Tensor):
        return [] if output.grad_fn is None else [output.grad_fn]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (tuple, list)):
        return [node for entry in output for node in _nodes_of(entry)]
    return []


def hook_forward(group: Group, layers: list[Layer], pager: Pager) -> None:
    """Holds `layers` while the group's module computes, in recomputation as well."""
    calls: list[Forward] = []  # a module that calls itself has several

    def begin(*_: Any) -> None:
        calls.append(Forward(pager, layers))

    def end(_: nn.Module, __: Any, output: Any) -> None:
        if not calls:
            return
        calls.pop().end()
        # Checkpointing inside the module computes it again without its hooks.
        for node in _nodes_of(output):
            node.register_prehook(untraced(lambda _: pager.begin_backward(layers)))

    group.module.register_forward_pre_hook(untraced(begin))
    # Also when the module throws: checkpointing stops a recomputation that way.
    group.module.register_forward_hook(untraced(end), always_call=True)


def hook_activations(module: nn.Module, pager: Pager) -> None:
    """Moves what is saved between a module's groups: checkpointed blocks' inputs, and losses."""
    calls: list[saved_tensors_hooks | None] = []

    def begin(*_: Any) -> None:
        calls.append(None)
        if not torch.is_grad_enabled() or pager.activations is None:
            return
        if _outer_hooks() is None:
            pager.activations.keep(module.buffers())
        saving = _saving(pager)
        saving.__enter__()
        calls[-1] = saving

    def end(*_: Any) -> None:
        saving = calls.pop() if calls else None
        if saving is not None:
            saving.__exit__(None, None, None)

    # Around the module's other hooks: the first to begin, and the last to end.
    module.register_forward_pre_hook(untraced(begin), prepend=True)
    module.register_forward_hook(untraced(end), always_call=True)


def hook_gradient(parameter: nn.Parameter, managed: ManagedParameter, optimizer: Optimizer) -> None:
    """Gives each gradient to the engine, and frees it."""
    # Parameters do not show their hooks to the garbage collector: a reference would be for ever.
    target = weakref.ref(optimizer)

    def accumulated(source: torch.Tensor) -> None:
        gradient = source.grad
        source.grad = None
        optimizer = target()
        if gradient is None or optimizer is None:
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        optimizer.submit(managed, gradient.detach().contiguous())

    parameter.register_post_accumulate_grad_hook(untraced(accumulated))


def _fits(value: Any, shape: list[int]) -> bool:
    """Whether PyTorch copies it to a parameter of the shape; a scalar may come as a vector."""
    if not isinstance(value, torch.Tensor):
        return False
    return list(value.shape) == shape or (not shape and value.dim() == 1)


def hook_state_dict(module: nn.Module, pager: Pager) -> None:
    """state_dict has the engine's values, and load_state_dict sets them, a module at a time."""

    own = module.named_parameters(recurse=False, remove_duplicate=False)
    owned = {name: m for name, p in own if (m := pager.managed(p)) is not None}

    def saving(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        pager.leave_backward()
        for name, managed in owned.items():
            if prefix + name in state:
                values = torch.empty(managed.shape, dtype=managed.parameter.dtype)
                pager.engine.read_tensor(managed.name, values)
                state[prefix + name] = values

    def loading(_: nn.Module, state: dict[str, Any], prefix: str, local: Any, *__: Any) -> None:
        if local.pop("assign_to_params_buffers", False):  # it would stay in the caller's dict
            raise RuntimeError(
                "load_state_dict(assign=True) would give the model parameters that the engine does "
                "not know; leave assign out, which copies the values to the engine"
            )
        pager.leave_backward()
        for name, managed in owned.items():
            parameter = managed.parameter
            if module._parameters.get(name) is not parameter:
                raise RuntimeError(
                    f"{prefix}{name} is not the parameter that overspill.torch.wrap took, so it is "
                    f"not trained; change the model before wrap"
                )
            # PyTorch itself names keys that are missing and shapes that differ.
            if prefix + name in state and _fits(state[prefix + name], managed.shape):
                parameter.data = torch.empty(
                    managed.shape, dtype=parameter.dtype, device=pager.device
                )
                loaded.append((managed, parameter._version))

    def writing(*_: Any) -> None:
        for managed, version in loaded:
            if managed.parameter._version != version:  # or else PyTorch could not copy the values
                pager.engine.write_tensor(managed.name, managed.parameter.data.cpu())
                managed.updates += 1
            managed.nan = None  # it may have been written to
            pager.take_away(managed)
        loaded.clear()

    loaded: list[tuple[ManagedParameter, int]] = []
    module.register_state_dict_post_hook(saving)
    module.register_load_state_dict_pre_hook(loading)
    module.register_load_state_dict_post_hook(writing)
