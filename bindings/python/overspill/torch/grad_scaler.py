"""torch.amp.GradScaler with the engine, which has the gradients and finds what is not finite.

PyTorch's scaler looks for infinities in `.grad` before the optimizer's step, and there are none
here. An optimizer whose step takes the scaler itself is trusted to do the whole step instead: the
engine divides by the scale, finds out, and the scaler is told.
"""

from __future__ import annotations

import warnings

import torch
from torch.amp.grad_scaler import OptState

NOT_PASSED = (
    "this GradScaler does not pass itself to the optimizer's step, and the gradients in which it "
    "looks for infinities are the engine's; use optimizer.loss_scale and optimizer.result().skipped"
)


def ignore_warning() -> None:
    """PyTorch warns that it may stop passing the scaler, and set two tensors instead. It makes them
    from gradients, which it does not have; if it comes to that, NOT_PASSED says what to do."""
    warnings.filterwarnings(
        "ignore", message="GradScaler is going to stop passing itself", category=FutureWarning
    )


def check_scaler(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *, in_backward: bool
) -> None:
    """Throws where the scaler is used in a way that the engine cannot follow."""
    if in_backward:
        raise RuntimeError(
            "GradScaler with offload.update: in_backward: layers are updated before the scaler "
            "tells its scale; set optimizer.loss_scale before the backward, or use next_forward"
        )
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
        raise RuntimeError(
            "GradScaler.unscale_ found no gradients, for they are the engine's, so clipping after "
            "it does nothing; leave unscale_ out, and clip by max_grad_norm of the configuration"
        )


def tell_scaler(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *, skipped: bool
) -> None:
    """What GradScaler.update reads: whether this step's gradients were not finite."""
    scale = scaler._get_scale_async()
    device = None if scale is None else scale.device
    found = torch.full((), float(skipped), dtype=torch.float32, device=device)
    state = scaler._per_optimizer_states[id(optimizer)]
    state["found_inf_per_device"] = {found.device: found}
