"""On which device a wrapped model computes, in PyTorch's terms and the engine's."""

from __future__ import annotations

import torch
from torch import nn


def find_device(model: nn.Module, given: str | torch.device | None) -> torch.device:
    """The given one, or else the one that has the parameters; a GPU always with its number."""
    if given is None:
        kinds = {p.device for p in model.parameters() if not p.is_meta}
        if len(kinds) > 1:
            names = ", ".join(sorted(map(str, kinds)))
            raise ValueError(
                f"the model's parameters are on {names}; give device=, where it computes"
            )
        given = kinds.pop() if kinds else "cpu"
    device = torch.device(given)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device}: the engine computes on cpu or cuda:N")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def engine_device(device: torch.device) -> str:
    return "host" if device.type == "cpu" else f"cuda:{device.index}"


def stream_of(device: torch.device) -> int:
    """The cudaStream_t that PyTorch puts work on now; 0 on the host."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Puts buffers where the model computes; parameters come there by themselves."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)
