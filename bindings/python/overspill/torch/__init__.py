"""PyTorch models whose state does not fit: `model, optimizer = wrap(model, config)`.

Hooks bring a block's parameters in before it computes, forward and backward, and take its gradients
as they appear. See docs/python.md.
"""

from .groups import Group, find_blocks, find_groups
from .optimizer import Optimizer
from .wrapping import hold, wrap

__all__ = ["Group", "Optimizer", "find_blocks", "find_groups", "hold", "wrap"]
