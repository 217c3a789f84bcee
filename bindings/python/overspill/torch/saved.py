"""A tensor that autograd saved, and PyTorch's check that nobody has changed it since: with hooks
for saved tensors PyTorch leaves that to the hooks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SavedTensor:
    tensor: torch.Tensor
    version: int

    def get(self) -> torch.Tensor:
        version = self.tensor._version
        if version != self.version:
            raise changed_in_place(
                f"a {self.tensor.dtype} tensor of shape {list(self.tensor.shape)} is at version "
                f"{version}; expected version {self.version} instead"
            )
        return self.tensor


def save(tensor: torch.Tensor) -> SavedTensor:
    # Not the tensor itself, which would keep the graph that made it alive for ever.
    return SavedTensor(tensor.detach(), tensor._version)


def changed_in_place(what: str) -> RuntimeError:
    """Begins as PyTorch's own error does, for those who look for it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {what}"
    )
