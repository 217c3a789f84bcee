"""Models on the meta device: parameters without memory, and buffers made for real."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def is_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def replace_meta_parameters(
    model: nn.Module, device: torch.device
) -> dict[nn.Parameter, nn.Parameter]:
    """Puts a parameter of the device, NaN and without memory, in each meta parameter's place; ties
    stay ties. Gives what stands for which."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                continue
            if parameter not in replaced:
                nan = torch.full((), float("nan"), dtype=parameter.dtype, device=device)
                replaced[parameter] = nn.Parameter(
                    nan.expand(parameter.shape), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = replaced[parameter]
    return replaced


def put_back(model: nn.Module, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Undoes replace_meta_parameters: a placeholder looks like a parameter with values."""
    meta = {new: old for old, new in replaced.items()}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module._parameters[name] = meta.get(parameter, parameter)


def make_meta_buffers(model: nn.Module, device: torch.device) -> None:
    """Computes meta buffers again, by building the module that has them from its configuration, as
    Hugging Face's rotary embeddings allow it. Throws ValueError where that is not possible."""
    for name, module in model.named_modules():
        lacking = [n for n, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not lacking:
            continue
        config = getattr(module, "config", None)
        try:
            fresh = type(module)(config).to(device)
            buffers = {n: fresh.get_buffer(n) for n in lacking}
        except Exception as error:
            raise ValueError(
                f"buffer {name}.{lacking[0]} is on the meta device, and {type(module).__name__} "
                f"cannot be built from its config to compute it ({error}); build the model with "
                f"real buffers, for example accelerate's init_empty_weights(include_buffers=False)"
            ) from error
        for buffer_name, buffer in buffers.items():
            module._buffers[buffer_name] = buffer
        for key, value in vars(fresh).items():  # such as original_inv_freq, which is no buffer
            if isinstance(getattr(module, key, None), torch.Tensor) and isinstance(
                value, torch.Tensor
            ):
                setattr(module, key, value)
