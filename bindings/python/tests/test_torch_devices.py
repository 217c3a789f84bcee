"""The choice of device and stream, as far as it can be seen without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from overspill.torch.devices import (  # noqa: E402
    engine_device,
    find_device,
    move_buffers,
    stream_of,
)


def on(*devices: str) -> Any:
    """A model whose parameters say that they are there."""
    parameters = [SimpleNamespace(device=torch.device(d), is_meta=d == "meta") for d in devices]
    return SimpleNamespace(parameters=lambda: iter(parameters))


@pytest.mark.parametrize(
    ("devices", "given", "expected"),
    [
        (["cpu"], None, "cpu"),
        (["cuda:1", "cuda:1"], None, "cuda:1"),
        (["meta"], None, "cpu"),
        (["meta", "cuda:2"], None, "cuda:2"),
        (["cpu"], "cuda:3", "cuda:3"),
        (["cpu"], torch.device("cuda"), "cuda:5"),
        (["cuda:0"], "cpu", "cpu"),
    ],
)
def test_the_models_device_is_the_engines(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], given: Any, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    device = find_device(on(*devices), given)
    assert str(device) == expected
    assert engine_device(device) == ("host" if expected == "cpu" else expected)


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="on cpu, cuda:0; give device="):
        find_device(on("cpu", "cuda:0"), None)
    with pytest.raises(ValueError, match="cpu or cuda:N"):
        find_device(on("cpu"), "xpu:0")


def test_the_stream_is_pytorchs_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def current(device: torch.device) -> Any:
        asked.append(device)
        return SimpleNamespace(cuda_stream=0x7F00)

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    assert stream_of(torch.device("cpu")) == 0 and not asked
    assert stream_of(torch.device("cuda:1")) == 0x7F00
    assert asked == [torch.device("cuda:1")]


def test_buffers_go_where_the_model_computes() -> None:
    model = nn.BatchNorm1d(4)
    move_buffers(model, torch.device("cpu"))
    assert model.running_mean is not None and model.running_mean.device.type == "cpu"
    move_buffers(model, torch.device("meta"))
    assert {str(buffer.device) for buffer in model.buffers()} == {"meta"}
    assert model.weight.device.type == "cpu"
