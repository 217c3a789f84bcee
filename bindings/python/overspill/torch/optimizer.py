"""The optimizer that PyTorch code sees: parameter groups and steps here, state in the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import Error, Plan, Statistics, Status, StepResult
from ..engine import Engine
from .grad_scaler import NOT_PASSED, check_scaler, tell_scaler
from .pager import ManagedParameter, Pager

USED_TWICE = (
    "Where a forward uses a block more than once, reentrant checkpointing gives its gradients in "
    "parts: use checkpoint(..., use_reentrant=False)"
)


def _error(status: Status, text: str) -> Error:
    error = Error(text)
    error.status = status
    return error


class Optimizer(torch.optim.Optimizer):
    """What `wrap` gives. Learning-rate schedulers work on its param_groups.

    A step returns at once: norm, clipping and skipping happen in the background, and each layer is
    updated when it is brought in next. Moments and masters are the engine's: `save` and `load` keep
    them; `state_dict` has the groups alone.
    """

    _step_supports_amp_scaling = True  # GradScaler.step leaves unscaling and skipping to step

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        pager: Pager,
        plan: Plan,
        *,
        in_backward: bool,
        world_size: int = 1,
    ) -> None:
        super().__init__(groups, defaults)
        self.engine: Engine = pager.engine
        self.plan = plan
        self._pager = pager
        self._in_backward = in_backward
        self._world_size = world_size
        self._begun = False
        self._pending = 0  # gradients since the last step
        self._submitted: set[int] = set()  # their layers
        self._loss_scale = 1.0

    def submit(self, managed: ManagedParameter, gradient: torch.Tensor) -> None:
        """A gradient of one micro-batch; called by the hooks."""
        if self._in_backward and not self._begun:
            self.engine.step_begin(
                learning_rates=self._rates(), loss_scale=self._loss_scale, allow_missing=True
            )
            self._begun = True
        self._pending += 1
        self._submitted.add(managed.layer)
        if self._world_size > 1:  # the engine adds up; PyTorch's ranks take the mean
            gradient = gradient / self._world_size
        stream = self._pager.stream()
        try:
            self.engine.submit_gradient(managed.layer, managed.index, gradient, stream)
        except Error as error:
            if error.status == Status.GRADIENT_COMPLETE:
                raise _error(error.status, f"{error}. {USED_TWICE}") from error
            raise

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by before the backward; gradients are divided by it."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        if self._pending:
            raise RuntimeError("loss_scale cannot change between a backward and its step")
        self._loss_scale = float(scale)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> float | None:
        """Ends the step. Parameters without gradient keep their values.

        `grad_scaler` is what GradScaler.step passes: gradients are divided by its scale, and it is
        told whether they were finite, for which this waits for their norm.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = self._loss_scale
        if grad_scaler is not None:
            check_scaler(grad_scaler, self, in_backward=self._in_backward)
            scale *= grad_scaler.get_scale()
        elif hasattr(self, "found_inf"):
            raise RuntimeError(NOT_PASSED)
        self._pager.leave_backward()
        stepped = self._begun or self._pending > 0
        if self._begun:
            self.engine.step_end()
        elif self._pending:
            self.engine.step(learning_rates=self._rates(), loss_scale=scale, allow_missing=True)
        self._begun = False
        self._pending = 0
        skipped = False
        if grad_scaler is not None:
            skipped = stepped and self.result().skipped
            tell_scaler(grad_scaler, self, skipped=skipped)
        if not skipped:
            self._pager.count_updates(self._pager.layers[number] for number in self._submitted)
        self._submitted.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are the engine's from the moment they exist, so there is nothing to clear; and
        what has been given to it cannot be taken back."""
        if self._pending:
            raise RuntimeError(
                "zero_grad between a backward and its step: the engine has added these gradients "
                "already; call step() first"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "engine"):
            raise RuntimeError(
                "parameter groups are fixed by overspill.torch.wrap; give them there"
            )
        super().add_param_group(param_group)

    def result(self) -> StepResult:
        """Norm, clip factor and whether the last step was skipped; waits for it."""
        return self.engine.step_wait()

    def statistics(self) -> Statistics:
        return self.engine.statistics()

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        config_json: str | None = None,
        user_state: Any = None,
        total_limit: int = 0,
        wait: bool = True,
    ) -> None:
        """Saves weights, moments and parameter groups as `directory`/checkpoint-<step>.

        `user_state` is any JSON value, such as a scheduler's state_dict or the data's place. With
        `wait` false the files are written while training goes on; the next save waits for them.
        """
        self._require_whole_step("save", "a checkpoint has no gradients; call step() first")
        state = {"groups": [self._group_state(group) for group in self.param_groups]}
        text = json.dumps({**state, "user_state": user_state})
        self.engine.save_checkpoint(
            os.fspath(directory), config_json=config_json, user_state=text, total_limit=total_limit
        )
        if wait:
            self.engine.wait_checkpoint()

    def load(self, directory: str | os.PathLike[str]) -> Any:
        """Goes on from a checkpoint, bit for bit; gives its `user_state`."""
        self._require_whole_step("load", "call step() first, whose update the checkpoint replaces")
        self.engine.load_checkpoint(os.fspath(directory))
        self._pager.count_updates(self._pager.layers)
        text = self.engine.user_state
        state = json.loads(text) if text else {}
        for group, saved in zip(self.param_groups, state.get("groups", []), strict=False):
            group.update(saved)
        return state.get("user_state")

    def _require_whole_step(self, call: str, cure: str) -> None:
        self._pager.leave_backward()
        if self._pending:
            raise _error(Status.LAYERS_HELD, f"{call} between a backward and its step: {cure}")

    @staticmethod
    def _group_state(group: dict[str, Any]) -> dict[str, Any]:
        simple = (bool, int, float, str, list, tuple, type(None))
        return {k: v for k, v in group.items() if k != "params" and isinstance(v, simple)}

    def close(self) -> None:
        """Frees the engine; the model cannot be used from then on."""
        self._pager.close()
