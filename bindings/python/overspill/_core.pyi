"""The extension module: the C API. Made with nanobind.stubgen, docstrings left out."""

import enum
from collections.abc import Sequence
from typing import Any, TypeAlias

# NumPy arrays, PyTorch tensors, anything that exports DLPack: contiguous, float32, bf16 or float16.
Array: TypeAlias = Any

__version__: str

class Error(RuntimeError):
    status: Status

class Status(enum.IntEnum):
    SUCCESS = 0

    INVALID_ARGUMENT = 1

    INVALID_HANDLE = 2

    INVALID_CONFIG = 3

    NOT_FINALIZED = 4

    ALREADY_FINALIZED = 5

    UNKNOWN_TENSOR = 6

    DUPLICATE_NAME = 7

    SIZE_MISMATCH = 8

    DTYPE_MISMATCH = 9

    ALREADY_ACQUIRED = 10

    NOT_ACQUIRED = 11

    NO_SLOT = 12

    LAYERS_HELD = 13

    FROZEN = 14

    GRADIENT_COMPLETE = 15

    GRADIENT_MISSING = 16

    STEP_NOT_STARTED = 17
    NO_WEIGHTS = 18

    INVALID_FILE = 32

    NOT_FOUND = 33

    DOES_NOT_FIT = 34

    UNSUPPORTED = 35

    CANCELLED = 36

    IO = 48

    NON_FINITE = 49

    RANK_LOST = 50

    INTERNAL = 51

class DType(enum.Enum):
    DEFAULT = 0

    FLOAT32 = 1

    BFLOAT16 = 2

    FLOAT16 = 3

class Loop(enum.Enum):
    MICRO_BATCH_MAJOR = 0

    LAYER_MAJOR = 1

class Tier(enum.Enum):
    DEVICE = 0

    HOST = 1

    NVME = 2

class LogLevel(enum.IntEnum):
    DEBUG = 0

    INFO = 1

    WARNING = 2

class Plan:
    @property
    def layers(self) -> int: ...
    @property
    def parameters(self) -> int: ...
    @property
    def trainable_parameters(self) -> int: ...
    @property
    def device_bytes(self) -> int: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def nvme_bytes(self) -> int: ...
    @property
    def weight_bytes(self) -> list[int]: ...
    @property
    def gradient_bytes(self) -> list[int]: ...
    @property
    def optimizer_bytes(self) -> list[int]: ...
    @property
    def prefetch_depth(self) -> int: ...
    @property
    def weight_slots(self) -> int: ...

class LayerInfo:
    @property
    def tensors(self) -> int: ...
    @property
    def flat_count(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def weights(self) -> Tier: ...
    @property
    def gradients(self) -> Tier: ...
    @property
    def optimizer(self) -> Tier: ...

class TensorInfo:
    @property
    def layer(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def owner_layer(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def frozen(self) -> bool: ...

class StepResult:
    @property
    def step(self) -> int: ...
    @property
    def updates(self) -> int: ...
    @property
    def gradient_norm(self) -> float: ...
    @property
    def clip_factor(self) -> float: ...
    @property
    def skipped(self) -> bool: ...

class Statistics:
    @property
    def steps(self) -> int: ...
    @property
    def updates(self) -> int: ...
    @property
    def skipped(self) -> int: ...
    @property
    def lane_bytes(self) -> list[int]: ...
    @property
    def lane_ops(self) -> list[int]: ...
    @property
    def lane_seconds(self) -> list[float]: ...
    @property
    def acquires(self) -> int: ...
    @property
    def acquires_waited(self) -> int: ...
    @property
    def acquire_wait_seconds(self) -> float: ...
    @property
    def deviations(self) -> int: ...
    @property
    def deviation_bytes(self) -> int: ...
    @property
    def activation_bytes_saved(self) -> int: ...
    @property
    def activation_bytes_spilled(self) -> int: ...

LANES: tuple[str, ...]

class TensorSpec:
    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        *,
        dtype: DType = DType.DEFAULT,
        decay: bool | None = None,
        group: int = 0,
        frozen: bool = False,
        tied_to: str | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def decay(self) -> bool | None: ...
    @property
    def group(self) -> int: ...
    @property
    def frozen(self) -> bool: ...
    @property
    def tied_to(self) -> str | None: ...

class Engine:
    def __init__(
        self,
        configuration: str = "",
        *,
        rank: int = 0,
        world_size: int = 1,
        master_address: str | None = None,
        device: str | None = None,
        held_layers: int = 1,
        loop: Loop = Loop.MICRO_BATCH_MAJOR,
        activation_host_bytes: int = 0,
        activation_nvme_bytes: int = 0,
        log: object | None = None,
        log_level: LogLevel = LogLevel.WARNING,
        progress: object | None = None,
    ) -> None: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def register_layer(self, name: str, tensors: Sequence[TensorSpec]) -> int: ...
    def set_order(self, layers: Sequence[int]) -> None: ...
    def finalize(self) -> Plan: ...
    def layer_info(self, layer: int) -> LayerInfo: ...
    def tensor_info(self, tensor: str) -> TensorInfo: ...
    def describe_plan(self) -> str: ...
    def load_weights(self, path: str) -> None: ...
    def initialize_weights(self, seed: int, deviation: float) -> None: ...
    def write_tensor(self, tensor: str, values: Array) -> None: ...
    def read_tensor(self, tensor: str, out: Array) -> None: ...
    def export_weights(self, directory: str, config_json: str | None = None) -> None: ...
    def acquire(self, layer: int, stream: int = 0) -> list[int]: ...
    def prefetch(self, layer: int) -> None: ...
    def release(self, layer: int, stream: int = 0) -> None: ...
    def submit_gradient(
        self, layer: int, tensor: int, gradient: Array, stream: int = 0
    ) -> None: ...
    def submit_gradients(self, layer: int, gradients: Array, stream: int = 0) -> None: ...
    def gradients_done(self, layer: int) -> None: ...
    def step_begin(
        self,
        learning_rate: float = 0.0,
        *,
        learning_rates: Sequence[float] = [],
        loss_scale: float = 1.0,
        allow_missing: bool = False,
    ) -> None: ...
    def step(
        self,
        learning_rate: float = 0.0,
        *,
        learning_rates: Sequence[float] = [],
        loss_scale: float = 1.0,
        allow_missing: bool = False,
    ) -> None: ...
    def step_end(self) -> None: ...
    def step_poll(self) -> StepResult | None: ...
    def step_wait(self) -> StepResult: ...
    def flush(self) -> None: ...
    def save_checkpoint(
        self,
        directory: str,
        *,
        config_json: str | None = None,
        user_state: str | None = None,
        total_limit: int = 0,
        only_model: bool = False,
    ) -> None: ...
    def poll_checkpoint(self) -> bool: ...
    def wait_checkpoint(self) -> None: ...
    def load_checkpoint(self, directory: str) -> None: ...
    @property
    def user_state(self) -> str: ...
    def statistics(self) -> Statistics: ...
    def trace_start(self) -> None: ...
    def trace_write(self, path: str) -> None: ...
    def save_activation(self, buffer: Array, stream: int = 0) -> int: ...
    def prefetch_activation(self, activation: int) -> None: ...
    def restore_activation(self, activation: int, buffer: Array, stream: int = 0) -> None: ...
    def discard_activation(self, activation: int) -> None: ...
    def allocate(self, bytes: int, node: int = -1) -> int: ...
    def free(self, memory: int) -> None: ...

def view_memory(
    address: int,
    shape: Sequence[int],
    dtype: DType,
    owner: object,
    *,
    numpy: bool = True,
    writable: bool = False,
    cuda_device: int = -1,
) -> Any: ...
