"""The engine with Python's conveniences: dicts, NumPy arrays, logging and `with`."""

from __future__ import annotations

import atexit
import json
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core
from ._core import DType, LogLevel, Loop, Plan, TensorSpec
from .config import Config, load_config
from .units import parse_bytes

logger = logging.getLogger("overspill")
_LEVELS = {0: logging.DEBUG, 1: logging.INFO, 2: logging.WARNING}
_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _log(level: int, line: str) -> None:
    logger.log(_LEVELS.get(level, logging.INFO), "%s", line)


@atexit.register
def _close_all() -> None:
    # An engine's threads must not call a logger of an interpreter that ends.
    for engine in list(_open_engines):
        try:
            engine.close()
        except Exception:  # the others are closed all the same
            logger.exception("closing an engine at the interpreter's end")


class Engine(_core.Engine):
    """Keeps a model's state in device memory, host memory and on NVMe.

    `config` has the keys of the training file (docs/configuration.md): a mapping, text, or a path.
    Sizes are bytes or text such as "2GiB". Lines go to the logger "overspill". Threads: as the C
    API says, any may call.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        master_address: str | None = None,
        device: str | None = None,
        held_layers: int = 1,
        loop: Loop = Loop.MICRO_BATCH_MAJOR,
        activation_host_bytes: int | str = 0,
        activation_nvme_bytes: int | str = 0,
        log_level: LogLevel = LogLevel.WARNING,
        progress: Callable[[str, float], bool | None] | None = None,
    ) -> None:
        self._layers: list[list[TensorSpec]] = []
        self._dtype = DType.BFLOAT16
        keys = load_config(config)
        if keys.get("precision", "bf16") == "float32":
            self._dtype = DType.FLOAT32
        on_gpu = (keys.get("offload") or {}).get("device") == "cuda"
        if device is None and not on_gpu:
            device = "host"  # as the C API takes it; said so that a GPU's arrays are refused
        self._on_host = device == "host"
        super().__init__(
            json.dumps(keys),
            rank=rank,
            world_size=world_size,
            master_address=master_address,
            device=device,
            held_layers=held_layers,
            loop=loop,
            activation_host_bytes=parse_bytes(activation_host_bytes, "activation_host_bytes"),
            activation_nvme_bytes=parse_bytes(activation_nvme_bytes, "activation_nvme_bytes"),
            log=_log,
            log_level=log_level,
            progress=progress,
        )
        _open_engines.add(self)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dtype(self) -> DType:
        """The type of weights in compute, the precision's."""
        return self._dtype

    def register_layer(self, name: str, tensors: Sequence[TensorSpec]) -> int:
        """Registers tensors that are acquired together; gives the layer's number."""
        number = super().register_layer(name, tensors)
        self._layers.append(list(tensors))
        return number

    def finalize(self) -> Plan:
        """Plans and allocates everything."""
        return super().finalize()

    @contextmanager
    def layer(self, number: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Holds a layer while the block runs; its weights by name, read-only, valid inside alone.

        With bf16 precision the arrays hold its bits as uint16, because NumPy has no bf16. Of an
        engine on a GPU, use `acquire`: NumPy reads host memory alone.
        """
        if not self._on_host:
            raise TypeError("NumPy cannot read a GPU's memory; use acquire and release")
        addresses = self.acquire(number)
        try:
            yield {
                spec.name: _core.view_memory(address, spec.shape, self._dtype, self)
                for spec, address in zip(self._layers[number], addresses, strict=True)
            }
        finally:
            self.release(number)

    def read(self, tensor: str) -> npt.NDArray[np.float32]:
        """A copy of a whole tensor's float32 master."""
        values = np.empty(self._shape(tensor), np.float32)
        self.read_tensor(tensor, values)
        return values

    def write(self, tensor: str, values: npt.ArrayLike) -> None:
        """Sets a whole tensor from float32 values."""
        array = np.ascontiguousarray(values, np.float32)
        if array.size != math.prod(self._shape(tensor)):
            raise ValueError(f"{tensor} has shape {self._shape(tensor)}, not {list(array.shape)}")
        self.write_tensor(tensor, array)

    def _shape(self, tensor: str) -> list[int]:
        for layer in self._layers:
            for spec in layer:
                if spec.name == tensor:
                    return list(spec.shape)
        raise KeyError(f"no tensor {tensor} was registered")
