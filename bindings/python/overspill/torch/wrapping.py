"""`wrap`: a PyTorch model whose parameters, gradients and optimizer state are the engine's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .. import TensorSpec
from ..config import Config, load_config
from ..engine import Engine
from ..units import parse_bytes
from .devices import engine_device, find_device, move_buffers
from .grad_scaler import ignore_warning
from .groups import Group, find_groups, is_inside
from .hooks import Forward, hook_activations, hook_forward, hook_gradient, hook_state_dict
from .meta import is_meta, make_meta_buffers, put_back, replace_meta_parameters
from .optimizer import Optimizer
from .pager import WINDOW_LAYERS, Layer, ManagedParameter, Pager
from .parameter_groups import make_parameter_groups
from .ranks import Ranks, find_ranks, take_from_rank_zero

_PRECISIONS = {torch.float32: "float32", torch.bfloat16: "bf16"}


def _dtype_of(groups: list[Group]) -> torch.dtype:
    """The one type of all parameters; the engine has one precision."""
    first_name, first = next(iter(groups[0].parameters))
    for group in groups:
        for name, parameter in group.parameters:
            if parameter.dtype not in _PRECISIONS:
                raise ValueError(
                    f"{name} is {parameter.dtype}; use float32 or bfloat16 (model.bfloat16())"
                )
            if parameter.dtype != first.dtype:
                raise ValueError(
                    f"{name} is {parameter.dtype} but {first_name} is {first.dtype}; the engine "
                    f"has one precision: convert the model with model.to(...), and use autocast to "
                    f"compute in another"
                )
    return first.dtype


def _engine_config(config: Config | None, dtype: torch.dtype) -> dict[str, Any]:
    """The configuration with what the model says; contradictions are errors."""
    keys = load_config(config)
    precision = _PRECISIONS[dtype]
    if keys.setdefault("precision", precision) != precision:
        raise ValueError(
            f"precision: {keys['precision']}, but the model's parameters are {dtype}; leave the "
            f"key out, or convert the model"
        )
    offload = keys.setdefault("offload", {})
    if offload.get("update", "auto") == "auto":
        offload["update"] = "next_forward"
    return keys


def _activation_bytes(
    keys: dict[str, Any], host: int | str | None, nvme: int | str | None
) -> tuple[int, int]:
    """Takes the two keys, which are wrap's own, out of the configuration."""
    sizes = []
    for name, given in (("activation_host_bytes", host), ("activation_nvme_bytes", nvme)):
        configured = keys["offload"].pop(name, 0)
        sizes.append(parse_bytes(configured if given is None else given, name))
    if sizes[1] > 0 and sizes[0] == 0:
        raise ValueError(
            "activation_nvme_bytes without activation_host_bytes: what goes to NVMe passes through "
            "host memory; set both"
        )
    return sizes[0], sizes[1]


def _register(
    engine: Engine, groups: list[Group], parameter_groups: list[dict[str, Any]], explicit: bool,
    rename: Callable[[str], str],
) -> list[list[ManagedParameter]]:  # fmt: skip
    """Registers each group that owns parameters; what was registered, by layer."""
    of_group = {p: i for i, g in enumerate(parameter_groups) for p in g["params"]}
    layers: list[list[ManagedParameter]] = []
    for group in groups:
        if not group.parameters:
            continue
        number = len(layers)
        managed, specs = [], []
        for index, (name, parameter) in enumerate(group.parameters):
            place = of_group.get(parameter, 0)
            decay = parameter_groups[place]["weight_decay"] != 0 if explicit else None
            shape = list(parameter.shape)
            specs.append(
                TensorSpec(
                    rename(name), shape, decay=decay, group=place,
                    frozen=not parameter.requires_grad,
                )
            )  # fmt: skip
            managed.append(ManagedParameter(rename(name), parameter, number, index, shape))
        assert engine.register_layer(group.name or "(root)", specs) == number
        layers.append(managed)
    return layers


def _set_trained(parameters: list[tuple[nn.Parameter, bool]]) -> None:
    for parameter, trained in parameters:
        parameter.requires_grad_(trained)


def _fill(pager: Pager, weights: str | os.PathLike[str] | None, ranks: Ranks) -> None:
    """Gives the engine all values, and frees the parameters' own memory one by one."""
    for layer in pager.layers:
        for managed in layer.parameters:
            parameter = managed.parameter
            if weights is None:
                if ranks.world_size > 1:
                    take_from_rank_zero(parameter)
                pager.engine.write_tensor(managed.name, parameter.detach().cpu().contiguous())
            pager.take_away(managed)
            parameter.grad = None
    if weights is not None:
        pager.engine.load_weights(os.fspath(weights))


def _install_hooks(
    groups: list[Group], pager: Pager, optimizer: Optimizer, model: nn.Module
) -> None:
    by_parameter = {m.parameter: m for layer in pager.layers for m in layer.parameters}
    for group in groups:
        needed = {by_parameter[p].layer for _, p in group.parameters}
        needed |= {by_parameter[p].layer for p in group.shared}
        hook_forward(group, [pager.layers[number] for number in sorted(needed)], pager)
    if pager.activations is not None:
        pager.activations.keep(model.buffers())
        names = [group.name for group in groups]
        for name, module in model.named_modules():
            if name not in names and any(is_inside(n, name) for n in names):
                hook_activations(module, pager)
    for parameter, managed in by_parameter.items():
        if parameter.requires_grad:
            hook_gradient(parameter, managed, optimizer)
    for module in model.modules():
        if any(p in by_parameter for p in module.parameters(recurse=False)):
            hook_state_dict(module, pager)


def wrap(
    model: nn.Module,
    config: Config | None = None,
    *,
    lr: float | None = None,
    params: Iterable[Any] | None = None,
    weights: str | os.PathLike[str] | None = None,
    blocks: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    rename: Callable[[str], str] | None = None,
    activation_host_bytes: int | str | None = None,
    activation_nvme_bytes: int | str | None = None,
    progress: Callable[[str, float], bool | None] | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Moves a model's parameters to the engine; gives the same model, and its optimizer.

    `config`: keys of the training file (docs/configuration.md); precision is the parameters' own.
    `lr`: the learning rate (default: the configuration's learning_rate).
    `params`: parameters, or groups of them with `lr` and `weight_decay`, as torch.optim takes them;
    a trainable parameter that is in none is frozen. Without, all that requires gradients trains,
    and decays from rank 2 on.
    `weights`: a safetensors file or a Hugging Face directory, from which the engine loads, so that
    a model on the meta device never is in memory. `rename` makes the file's names from the model's.
    `blocks`: regular expressions of the modules whose parameters come together (default: the
    elements of the model's ModuleLists).
    `device`: where the model computes, "cpu" or "cuda:N" (default: where its parameters are, and
    the CPU for a model on the meta device).
    `activation_host_bytes`, `activation_nvme_bytes`: how much of what autograd saves moves to the
    engine, in host memory and behind it on NVMe; bytes or text such as "2GiB" (default: those of
    the configuration's offload section, or 0). On top of the other budgets.
    With torch.distributed initialised, its ranks are the engine's, and train rank 0's model.
    """
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "overspill_name"):
            raise ValueError(
                f"{name} has no values any more: an earlier wrap took them to its engine; build "
                f"the model again"
            )
    where = find_device(model, device)
    if is_meta(model) and weights is None:
        raise ValueError("the model is on the meta device: give weights=, a safetensors directory")
    with ExitStack() as undo:
        undo.callback(_set_trained, [(p, p.requires_grad) for p in model.parameters()])
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        if is_meta(model):
            make_meta_buffers(model, where)
            replaced = replace_meta_parameters(model, where)
            undo.callback(put_back, model, replaced)
        move_buffers(model, where)
        groups = find_groups(model, blocks)
        if not any(group.parameters for group in groups):
            raise ValueError("the model has no parameters")
        dtype = _dtype_of([group for group in groups if group.parameters])
        keys = _engine_config(config, dtype)
        sizes = _activation_bytes(keys, activation_host_bytes, activation_nvme_bytes)
        rate = float(keys.pop("learning_rate", 1e-3) if lr is None else lr)
        keys.pop("learning_rate", None)
        parameter_groups = make_parameter_groups(groups, params, keys, rate, replaced)
        ranks = find_ranks()
        if ranks.world_size > 1:
            for buffer in model.buffers():
                take_from_rank_zero(buffer)
        engine = Engine(
            keys, rank=ranks.rank, world_size=ranks.world_size,
            master_address=ranks.master_address, device=engine_device(where),
            held_layers=max(group.depth + len(group.shared) for group in groups) + WINDOW_LAYERS,
            activation_host_bytes=sizes[0], activation_nvme_bytes=sizes[1], progress=progress,
        )  # fmt: skip
        undo.callback(engine.close)
        registered = _register(
            engine, groups, parameter_groups, params is not None, rename or (lambda name: name)
        )
        plan = engine.finalize()
        pager = Pager(engine, where, dtype, sizes[0])
        for number, managed in enumerate(registered):
            pager.add_layer(Layer(number, managed))
            for entry in managed:  # what unfrozen_parameters does not match
                if engine.tensor_info(entry.name).frozen:
                    entry.parameter.requires_grad_(False)
        _fill(pager, weights, ranks)
        ignore_warning()
        optimizer = Optimizer(
            parameter_groups, {"lr": rate, "weight_decay": 0.0}, pager, plan,
            in_backward=keys["offload"]["update"] == "in_backward", world_size=ranks.world_size,
        )  # fmt: skip
        undo.pop_all()
    _install_hooks(groups, pager, optimizer, model)
    model.overspill_pager = pager  # type: ignore[assignment]
    return model, optimizer


@contextmanager
def hold(model: nn.Module, *modules: nn.Module) -> Iterator[None]:
    """Holds the layers of modules, or of their parameters, outside of their own forward: to look at
    weights, or for a function that uses them directly. As many as slots allow. A backward of what
    was computed inside may come after it."""
    pager: Pager = model.overspill_pager  # type: ignore[assignment]
    numbers: dict[int, None] = {}
    for module in modules:
        for parameter in module.parameters():
            managed = pager.managed(parameter)
            if managed is not None:
                numbers[managed.layer] = None
    forward = Forward(pager, [pager.layers[number] for number in numbers])
    try:
        yield
    finally:
        forward.end()
