"""Where the engine's ranks meet, when torch.distributed runs."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world_size: int = 1
    master_address: str | None = None


def _free_address() -> str:
    """This host's name for the others, and a port that is free on it now."""
    host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"


def find_ranks() -> Ranks:
    """The process group's ranks; PyTorch's own store keeps its port, so the engine gets another."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Ranks()
    address = [_free_address() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(address, src=0)
    return Ranks(dist.get_rank(), dist.get_world_size(), address[0])


@torch.no_grad()
def take_from_rank_zero(tensor: torch.Tensor) -> None:
    """Gives all ranks rank 0's values, as DDP does: their own may come from another seed."""
    values = tensor.detach()
    if dist.get_backend() == "nccl" and values.device.type == "cpu":
        values = values.cuda()
    flat = values.reshape(-1)
    dist.broadcast(flat.view(torch.uint8), src=0)  # bytes, for any type
    given = flat.view(tensor.shape).to(tensor.device)
    if not torch.equal(given, tensor):  # parts of it may be one memory, which takes no copy
        tensor.detach().copy_(given)
