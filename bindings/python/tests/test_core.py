"""The engine from Python: arrays in and out, errors, callbacks, plans and statistics."""

from __future__ import annotations

import ctypes
import gc
import inspect
import logging
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overspill
from overspill import _core
from overspill.config import load_config

SMALL = {"precision": "float32", "offload": {"device_memory": "16MiB", "host_memory": "16MiB"}}


def make(**arguments: Any) -> overspill.Engine:
    """Two layers: `first` with weight [4, 8] and bias [8], and `second` with weight [8, 2]."""
    engine = overspill.Engine(SMALL, **arguments)
    engine.register_layer(
        "first",
        [overspill.TensorSpec("first.weight", [4, 8]), overspill.TensorSpec("first.bias", [8])],
    )
    engine.register_layer("second", [overspill.TensorSpec("second.weight", [8, 2])])
    return engine


def filled(**arguments: Any) -> overspill.Engine:
    engine = make(**arguments)
    engine.finalize()
    rng = np.random.default_rng(1)
    for name, shape in (("first.weight", (4, 8)), ("first.bias", (8,)), ("second.weight", (8, 2))):
        engine.write(name, rng.standard_normal(shape))
    return engine


def test_tensors_come_back_as_written() -> None:
    with filled() as engine:
        expected = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
        assert np.array_equal(engine.read("first.weight"), expected)
        with engine.layer(0) as weights:
            assert np.array_equal(weights["first.weight"], expected)
            assert not weights["first.weight"].flags.writeable
            assert weights["first.bias"].shape == (8,)


def test_a_step_without_pytorch() -> None:
    with filled() as engine:
        before = engine.read("second.weight")
        engine.submit_gradient(0, 0, np.ones((4, 8), np.float32))
        engine.submit_gradient(0, 1, np.zeros(8, np.float32))
        engine.submit_gradient(1, 0, np.full((8, 2), 2.0, np.float16))
        engine.step(0.01)
        result = engine.step_wait()
        assert result.gradient_norm == pytest.approx(np.sqrt(32 + 16 * 4))
        assert not result.skipped and result.step == 1
        assert engine.step_poll() is not None
        # AdamW's first step is the rate in the gradient's direction.
        assert np.allclose(engine.read("second.weight"), before - 0.01, atol=1e-6)
        assert engine.statistics().updates == 1


def test_dlpack_in_both_directions() -> None:
    torch = pytest.importorskip("torch")
    with filled() as engine:
        engine.write_tensor("first.bias", torch.arange(8.0))
        out = torch.empty(8)
        engine.read_tensor("first.bias", out)
        assert torch.equal(out, torch.arange(8.0))
        (address, _) = engine.acquire(0)
        view = _core.view_memory(address, [4, 8], overspill.DType.FLOAT32, engine, numpy=False)
        tensor = torch.from_dlpack(view)
        assert tensor.data_ptr() == address
        assert np.array_equal(tensor.numpy(), engine_weights(engine))
        engine.release(0)


def engine_weights(engine: overspill.Engine) -> Any:
    del engine
    return np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)


@pytest.mark.parametrize(
    ("call", "status"),
    [
        (lambda e: e.acquire(7), "INVALID_ARGUMENT"),
        (lambda e: e.release(0), "NOT_ACQUIRED"),
        (lambda e: e.acquire(0) and e.acquire(0), "ALREADY_ACQUIRED"),
        (lambda e: e.submit_gradient(0, 1, np.zeros(7, np.float32)), "SIZE_MISMATCH"),
        (lambda e: e.write_tensor("none", np.zeros(1, np.float32)), "UNKNOWN_TENSOR"),
        (lambda e: e.step(0.1), "GRADIENT_MISSING"),
        (lambda e: e.step_wait(), "STEP_NOT_STARTED"),
        (lambda e: e.register_layer("x", [overspill.TensorSpec("x", [1])]), "ALREADY_FINALIZED"),
        (lambda e: e.load_weights("/nowhere"), "NOT_FOUND"),
    ],
)
def test_errors_have_a_status_and_a_text(call: Any, status: str) -> None:
    with filled() as engine, pytest.raises(overspill.Error) as caught:
        call(engine)
    assert caught.value.status == overspill.Status[status]
    assert len(str(caught.value)) > 20


def test_a_wrong_key_is_named() -> None:
    with pytest.raises(overspill.Error, match="hots_memory") as caught:
        overspill.Engine({"offload": {"hots_memory": "1GiB"}})
    assert caught.value.status == overspill.Status.INVALID_CONFIG


def test_yaml_numbers_are_read_as_the_engine_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "run.yaml"
    file.write_text(
        "precision: float32\nadam_epsilon: 1e-8\nlearning_rate: 2E+3\nmax_grad_norm: -.5e1\n"
        "weight_decay: 1.e-1\nname: 1e-8x\nsteps: 10\n"
    )
    assert load_config(file) == {
        "precision": "float32", "adam_epsilon": 1e-8, "learning_rate": 2000.0,
        "max_grad_norm": -5.0, "weight_decay": 0.1, "name": "1e-8x", "steps": 10,
    }  # fmt: skip
    file.write_text("precision: float32\nadam_epsilon: 1e-8\noffload: {host_memory: 16MiB}\n")
    overspill.Engine(file).close()


def test_arrays_of_other_types_are_refused() -> None:
    with filled() as engine:
        with pytest.raises(TypeError, match="float32"):
            engine.submit_gradient(0, 1, np.zeros(8, np.float64))
        with pytest.raises(TypeError):  # a copy would be filled instead
            engine.read_tensor("first.weight", np.zeros((8, 4), np.float32).T)
        read_only = np.zeros(8, np.float32)
        read_only.flags.writeable = False
        with pytest.raises(TypeError):
            engine.read_tensor("first.bias", read_only)


def test_a_closed_engine_says_so() -> None:
    engine = filled()
    engine.close()
    engine.close()
    assert engine.closed
    with pytest.raises(overspill.Error) as caught:
        engine.acquire(0)
    assert caught.value.status == overspill.Status.INVALID_HANDLE


def test_plan_and_description() -> None:
    engine = make()
    plan = engine.finalize()
    assert plan.layers == 2 and plan.parameters == 32 + 8 + 16
    assert sum(plan.weight_bytes) > 0 and plan.host_bytes <= 16 << 20
    assert engine.describe_plan().strip()
    info = engine.tensor_info("first.bias")
    assert (info.layer, info.index, info.count) == (0, 1, 8)
    assert engine.layer_info(0).tensors == 2
    engine.close()


def test_progress_can_end_a_load(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    names = {"first.weight": (4, 8), "first.bias": (8,), "second.weight": (8, 2)}
    tensors = {name: np.ones(shape, np.float32) for name, shape in names.items()}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    seen: list[float] = []

    def progress(what: str, fraction: float) -> bool:
        assert what
        seen.append(fraction)
        return len(seen) > 3  # the second load is ended

    engine = filled(progress=progress)
    seen.clear()  # of the first tensor that was written, before which all are initialised
    engine.load_weights(str(tmp_path))
    assert np.array_equal(engine.read("first.bias"), np.ones(8))
    assert seen and all(0 <= fraction <= 1 for fraction in seen)
    seen.extend([0.0] * 4)
    with pytest.raises(overspill.Error) as caught:
        engine.load_weights(str(tmp_path))
    assert caught.value.status == overspill.Status.CANCELLED
    engine.close()


class Trainer:
    """Gives its engine a callback of its own: a cycle."""

    def __init__(self) -> None:
        self.engine = filled(progress=self.report)

    def report(self, what: str, fraction: float) -> bool:
        return False


@pytest.mark.parametrize("closed", [False, True])
def test_an_engine_in_a_cycle_with_its_callback_is_collected(closed: bool) -> None:
    trainer = Trainer()
    if closed:
        trainer.engine.close()
    engine, owner = weakref.ref(trainer.engine), weakref.ref(trainer)
    del trainer
    gc.collect()
    assert engine() is None and owner() is None


ENDING = """
import overspill

class Failing(overspill.Engine):
    def close(self):
        super().close()
        print("closed", flush=True)
        raise overspill.Error("the drive is gone")

engines = [Failing({"offload": {"host_memory": "16MiB"}}) for _ in range(3)]
"""


def test_all_engines_are_closed_at_the_interpreters_end(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert result.stdout.count("closed") == 3, result.stderr
    assert result.stderr.count("the drive is gone") == 3


def test_lines_go_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "overspill"):
        engine = filled(log_level=overspill.LogLevel.DEBUG)
        engine.set_order([0, 1])
        for number in (0, 1, 0, 0, 1, 1):
            with engine.layer(number):
                pass
        assert engine.statistics().deviations > 0
        engine.close()
    assert any("order" in record.message for record in caplog.records)


def test_activations_come_back() -> None:
    with filled(activation_host_bytes=1 << 20) as engine:
        values = np.arange(1000, dtype=np.float32)
        saved = engine.save_activation(values)
        engine.prefetch_activation(saved)
        out = np.zeros_like(values)
        engine.restore_activation(saved, out)
        assert np.array_equal(out, values)


def test_the_stub_describes_the_module() -> None:
    stub = Path(inspect.getfile(overspill)).with_name("_core.pyi").read_text()
    for name in vars(_core):
        if not name.startswith("_"):
            assert re.search(rf"\b{name}\b", stub), name
    for name in vars(_core.Engine):
        if not name.startswith("_"):
            assert f"def {name}(" in stub, name


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device", ctypes.c_int)]


def dlpack_device(capsule: Any) -> tuple[int, int]:
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = DLTensor.from_address(pointer_of(capsule, b"dltensor"))
    return tensor.device_type, tensor.device


def test_memory_of_a_gpu_is_described_as_such_and_kept_from_the_host() -> None:
    with filled(activation_host_bytes="1MiB") as engine:
        (address, _) = engine.acquire(0)
        shape, float32 = [4, 8], overspill.DType.FLOAT32

        def view(device: int) -> Any:
            return _core.view_memory(
                address, shape, float32, engine, numpy=False, cuda_device=device
            )

        assert dlpack_device(view(3)) == (2, 3)  # kDLCUDA
        assert dlpack_device(view(-1)) == (1, 0)
        saved = engine.save_activation(view(-1))
        for use in (
            lambda: engine.write_tensor("first.weight", view(0)),
            lambda: engine.read_tensor("first.weight", view(0)),
            lambda: engine.submit_gradient(0, 0, view(0)),
            lambda: engine.submit_gradients(0, view(0)),
            lambda: engine.save_activation(view(0)),
            lambda: engine.restore_activation(saved, view(0)),
        ):
            with pytest.raises(TypeError, match=r"host memory|a GPU's"):
                use()
        engine.release(0)
