"""Layers held and released around forward and backward.

A parameter's `.data` is the engine's memory while its layer is held, and otherwise NaN in the
parameter's shape that takes no memory. Autograd saves weights, and views of them, for the backward:
they are remembered by their place in the layer instead, and found again in whatever memory the
layer has by then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.dlpack

from .. import _core
from ..engine import Engine
from .activations import Activations
from .devices import stream_of
from .saved import changed_in_place, save

WINDOW_LAYERS = 2  # of the backward: one whose gradients are computed, and the one that follows


@dataclass
class ManagedParameter:
    """A parameter whose values are the engine's."""

    name: str
    parameter: torch.nn.Parameter
    layer: int
    index: int
    shape: list[int]
    updates: int = 0  # how often its values have changed
    version: int = 0  # PyTorch's, when its layer was brought in or left last
    nan: torch.Tensor | None = None  # what it points to while its layer is not here


@dataclass
class Layer:
    """A registered layer, how often it is held now, and where its tensors are."""

    number: int
    parameters: list[ManagedParameter]
    holds: int = 0
    views: list[torch.Tensor] = field(default_factory=list)
    unpacked: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def in_use(self) -> bool:
        """Whether a computation still has a tensor that was found for it."""
        self.unpacked = [reference for reference in self.unpacked if reference() is not None]
        return bool(self.unpacked)


@dataclass(frozen=True)
class _SavedWeight:
    """A weight, or a view of it, as autograd keeps it; `cast` where autocast had converted it."""

    parameter: ManagedParameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    cast: torch.dtype | None
    updates: int


class Pager:
    """Acquires and releases layers for one model. Thread-safe: the backward has its own thread on
    GPUs."""

    def __init__(
        self, engine: Engine, device: torch.device, dtype: torch.dtype,
        activation_host_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.engine = engine
        self.device = device
        self.layers: list[Layer] = []
        self.activations: Activations | None = None
        if activation_host_bytes > 0:
            self.activations = Activations(engine, device, self.stream, activation_host_bytes)
        self._lock = threading.RLock()
        self._by_address: dict[int, ManagedParameter] = {}
        self._by_parameter: dict[torch.nn.Parameter, ManagedParameter] = {}
        self._views: dict[tuple[int, int, int], torch.Tensor] = {}
        self._window: list[Layer] = []
        self._current: list[Layer] = []  # whose backward has begun last
        self._tasks: set[int] = set()  # backwards whose end calls _end_task, unless they throw
        self._dtype = dtype

    def add_layer(self, layer: Layer) -> None:
        self.layers.append(layer)
        for managed in layer.parameters:
            self._by_parameter[managed.parameter] = managed

    def managed(self, parameter: torch.nn.Parameter) -> ManagedParameter | None:
        return self._by_parameter.get(parameter)

    def take_away(self, managed: ManagedParameter) -> None:
        """Leaves NaN in the parameter's shape: a use without its layer shows in the loss at once.
        Each has its own, so that writing to one shows in no other."""
        if managed.nan is None:
            nan = torch.full((), float("nan"), dtype=self._dtype, device=self.device)
            managed.nan = nan.expand(managed.shape)
        managed.parameter.data = managed.nan
        managed.parameter.overspill_name = managed.name  # type: ignore[attr-defined]
        managed.version = managed.parameter._version

    def _require_untouched(self, layer: Layer) -> None:
        for managed in layer.parameters:
            parameter, nan = managed.parameter, managed.nan
            assert nan is not None
            same = parameter.data_ptr() == nan.data_ptr() and parameter._version == managed.version
            if same and (self.device.type != "cpu" or bool(nan.as_strided((), ()).isnan())):
                continue
            managed.nan = None
            self.take_away(managed)
            raise RuntimeError(
                f"{managed.name} was written to while its layer was not here, and the engine has "
                f"not got these values; use load_state_dict or engine.write_tensor"
            )

    def stream(self) -> int:
        return stream_of(self.device)

    def hold(self, layer: Layer) -> None:
        """Brings a layer in, unless it is there, and points its parameters to it."""
        with self._lock:
            layer.holds += 1
            if layer.holds > 1:
                return
            try:
                self._require_untouched(layer)
                self._trim_window()
                addresses = self.engine.acquire(layer.number, self.stream())
            except BaseException:
                layer.holds -= 1
                raise
            layer.views = [
                self._view(managed, address)
                for managed, address in zip(layer.parameters, addresses, strict=True)
            ]
            for managed, address, view in zip(
                layer.parameters, addresses, layer.views, strict=True
            ):
                managed.parameter.data = view
                managed.version = managed.parameter._version
                self._by_address[address] = managed

    def release(self, layer: Layer) -> None:
        with self._lock:
            layer.holds -= 1
            if layer.holds > 0 or self.engine.closed:
                return
            changed = [m.name for m in layer.parameters if m.parameter._version != m.version]
            for managed, view in zip(layer.parameters, layer.views, strict=True):
                self.take_away(managed)
                self._by_address.pop(view.data_ptr(), None)
            layer.views = []
            self.engine.release(layer.number, self.stream())
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} was changed in place while its layer was here, and the "
                f"engine does not take such changes; use engine.write_tensor or load_state_dict, "
                f"or make it a buffer"
            )

    def count_updates(self, layers: Iterable[Layer]) -> None:
        """Trained parameters of these have other values from now on."""
        for layer in layers:
            for managed in layer.parameters:
                managed.updates += managed.parameter.requires_grad

    def close(self) -> None:
        """Frees the engine, whose memory no parameter points to from then on."""
        self.leave_backward()
        with self._lock:
            for layer in self.layers:
                layer.views = []
                for managed in layer.parameters:
                    self.take_away(managed)
            self._by_address.clear()
            self._views.clear()
            self.engine.close()

    def _view(self, managed: ManagedParameter, address: int) -> torch.Tensor:
        """The same tensor object for the same slot: slots are reused for as long as a run lasts."""
        key = (managed.layer, managed.index, address)
        view = self._views.get(key)
        if view is None:
            cuda_device = self.device.index if self.device.type == "cuda" else -1
            view = torch.utils.dlpack.from_dlpack(
                _core.view_memory(
                    address, managed.shape, self.engine.dtype, self.engine,
                    numpy=False, writable=True, cuda_device=cuda_device,
                )
            )  # fmt: skip
            self._views[key] = view
        return view

    # What autograd saves.

    def pack(self, tensor: torch.Tensor, outer: Callable[[Any], Any] | None) -> Any:
        """What is kept of a tensor for the backward: a weight's place, or the tensor itself."""
        managed = self._by_address.get(_storage_address(tensor))
        if managed is not None and _is_plain_view(tensor, managed.parameter.dtype):
            return _describe(tensor, managed, None)
        if managed is not None:  # its memory will be another weight's
            tensor = tensor.detach().clone()
        else:
            managed = self._cast_weight(tensor)
            if managed is not None:
                return _describe(tensor, managed, tensor.dtype)
        return save(tensor) if outer is None else outer(tensor)

    def _cast_weight(self, tensor: torch.Tensor) -> ManagedParameter | None:
        """The weight that autocast converted to make this tensor, or the tensor it views."""
        if not torch.is_autocast_enabled(self.device.type) or tensor._version > 0:
            return None  # a copy of the model's own, which may have changed it
        base = tensor if tensor._base is None else tensor._base
        node = base.grad_fn
        if node is None or node.name() != "ToCopyBackward0" or not base.is_contiguous():
            return None
        source = getattr(node.next_functions[0][0], "variable", None)
        managed = self._by_parameter.get(source) if source is not None else None
        if managed is None or base.dtype == managed.parameter.dtype:
            return None
        same = list(base.shape) == managed.shape and _is_plain_view(tensor, base.dtype)
        return managed if same else None

    def unpack(self, saved: Any, outer: Callable[[Any], Any] | None) -> torch.Tensor:
        """The tensor, for a computation of the backward; brings its layer in first."""
        if not isinstance(saved, _SavedWeight):
            tensor: torch.Tensor = saved.get() if outer is None else outer(saved)
            return tensor
        if saved.updates != saved.parameter.updates:
            raise changed_in_place(
                f"{saved.parameter.name} was updated after the forward that used it; call "
                f"backward before the optimizer's step, or the forward again"
            )
        layer = self.layers[saved.parameter.layer]
        with self._lock:
            if torch._C._current_graph_task_id() == -1:  # somebody looks at a node's saved tensors
                self.hold(layer)
                try:
                    return self._find(saved, layer).clone()
                finally:
                    self.release(layer)
            self._hold_in_window(layer)
            found = self._find(saved, layer)
            if saved.cast is None:
                layer.unpacked.append(weakref.ref(found))
            return found

    def _find(self, saved: _SavedWeight, layer: Layer) -> torch.Tensor:
        base = layer.views[saved.parameter.index]
        if saved.cast is not None:
            base = base.to(saved.cast)
        return base.as_strided(saved.size, saved.stride, saved.offset)

    # The backward's window: layers that it has brought in and not yet left.

    def begin_backward(self, layers: list[Layer]) -> None:
        """The backward reaches a module: holds its layers, which it may compute forward again."""
        with self._lock:
            self._current = layers
            for layer in layers:
                self._hold_in_window(layer)

    def _hold_in_window(self, layer: Layer) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            # Before anything is held: called at the end of the whole backward, unless it throws.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_task(task))
            self._tasks.add(task)
        if layer in self._window:
            return
        self.hold(layer)
        self._window.append(layer)

    def _trim_window(self) -> None:
        """Leaves layers that nothing computes with any more."""
        for layer in [entry for entry in self._window if not entry.in_use()]:
            if layer in self._current:
                continue
            self._window.remove(layer)
            self.release(layer)

    def _end_task(self, task: int) -> None:
        """A backward ends, perhaps inside of another, as those of reentrant checkpointing do."""
        with self._lock:
            self._tasks.discard(task)
            self._current = []
            if not self._tasks:
                self._end_backward()

    def leave_backward(self) -> None:
        """Leaves what a backward that threw has brought in; within a backward does nothing."""
        if torch._C._current_graph_task_id() == -1:
            self._end_backward()

    def _end_backward(self) -> None:
        with self._lock:
            self._tasks.clear()
            self._current = []
            while self._window:
                layer = self._window.pop()
                layer.unpacked.clear()
                self.release(layer)


def _is_plain_view(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether size, strides and offset say all about a view, so that it can be made again."""
    return tensor.dtype == dtype and not tensor.is_conj() and not tensor.is_neg()


def _describe(
    tensor: torch.Tensor, managed: ManagedParameter, cast: torch.dtype | None
) -> _SavedWeight:
    return _SavedWeight(
        managed, tensor.size(), tensor.stride(), tensor.storage_offset(), cast, managed.updates
    )


def _storage_address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, functional or other wrapped tensors
        return 0
