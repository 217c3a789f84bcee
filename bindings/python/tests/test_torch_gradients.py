"""Gradients of what is done with weights otherwise than in a plain forward: plain PyTorch's, or an
error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import overspill.torch  # noqa: E402

torch.set_num_threads(1)


def batch(rows: int = 8, columns: int = 64) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(7))


def paged_gradients(
    model: nn.Module, loss_of: Callable[[Any], torch.Tensor], folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What the engine gets of a backward."""
    model, optimizer = overspill.torch.wrap(model, models.on_nvme(folder))
    seen: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(
        type(optimizer), "submit", lambda _, managed, g: seen.update({managed.name: g.clone()})
    )
    loss_of(model).backward()
    optimizer.close()
    return seen


def plain_gradients(
    model: nn.Module, loss_of: Callable[[Any], torch.Tensor]
) -> dict[str, torch.Tensor]:
    loss_of(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


class WithHead(nn.Module):
    """A head whose weight a function outside of it uses."""

    def __init__(self, blocks: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(blocks))
        self.head = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu() + x
        return x


def test_what_hold_computes_has_its_gradients_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, plain_x = batch().requires_grad_(), batch().requires_grad_()

    def loss_of(model: WithHead) -> torch.Tensor:
        with overspill.torch.hold(model, model.head):
            y = F.linear(x, model.head.weight)
        return model(y).square().mean()

    plain = WithHead()
    expected = plain_gradients(plain, lambda m: m(F.linear(plain_x, m.head.weight)).square().mean())
    actual = paged_gradients(WithHead(), loss_of, tmp_path, monkeypatch)
    assert same(actual, expected)
    assert torch.equal(x.grad, plain_x.grad)


class Complex(nn.Module):
    """Multiplies by a weight whose two columns are real and imaginary parts."""

    def __init__(self, *, conjugate: bool, negative: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(64, 2))
        self.conjugate, self.negative = conjugate, negative

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.view_as_complex(self.weight)
        weight = weight.conj() if self.conjugate else weight
        if self.negative:
            return self.linear(x) * weight.conj().imag  # a view that is negative by a bit alone
        return (torch.fft.fft(self.linear(x)) * weight).real.square()


class One(nn.Module):
    """A model of one block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).float().sum()


@pytest.mark.parametrize(("conjugate", "negative"), [(False, False), (True, False), (False, True)])
def test_views_of_another_type_or_sign_have_plain_pytorchs_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conjugate: bool, negative: bool
) -> None:
    def make() -> nn.Module:
        return One(Complex(conjugate=conjugate, negative=negative))

    expected = plain_gradients(make(), lambda m: m(batch()))
    assert same(paged_gradients(make(), lambda m: m(batch()), tmp_path, monkeypatch), expected)


class Copies(nn.Module):
    """Multiplies by a copy of its weight that it has changed."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.change(self.weight)
        return F.linear(self.linear(x).to(weight.dtype), weight).square()


def clamped_copy(weight: torch.Tensor) -> torch.Tensor:
    copy = weight.bfloat16()
    copy.data.clamp_(-0.5, 0.5)
    return copy


def copy_of_the_same_type(weight: torch.Tensor) -> torch.Tensor:
    copy = weight.to(torch.float32, copy=True)
    copy.data.clamp_(-0.5, 0.5)
    return copy


def doubled_copy(weight: torch.Tensor) -> torch.Tensor:
    copy = weight.bfloat16()
    with torch.no_grad():
        return copy.mul_(2)


@pytest.mark.parametrize(
    ("change", "autocast"),
    [
        (clamped_copy, False),
        (copy_of_the_same_type, False),
        (copy_of_the_same_type, True),
        (doubled_copy, False),
        (doubled_copy, True),
    ],
)
def test_copies_that_the_model_changes_have_plain_pytorchs_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any], autocast: bool
) -> None:
    def loss_of(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(batch())  # type: ignore[no-any-return]

    expected = plain_gradients(One(Copies(change)), loss_of)
    assert same(paged_gradients(One(Copies(change)), loss_of, tmp_path, monkeypatch), expected)


class InPlace(nn.Module):
    """Changes a tensor that the backward needs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).sigmoid()
        z = y * 3
        y += 1
        return z + y


@pytest.mark.parametrize("host", [None, "1MiB"])
def test_a_saved_tensor_that_is_changed_in_place_is_an_error(
    tmp_path: Path, host: str | None
) -> None:
    model, optimizer = overspill.torch.wrap(
        One(nn.Sequential(nn.Linear(64, 64), InPlace())), models.on_nvme(tmp_path),
        activation_host_bytes=host,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"by an inplace operation: a .* shape \[8, 64\]"):
        model(batch()).backward()
    optimizer.close()


def test_an_output_saved_by_an_operation_in_place_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return One(nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 64)))

    expected = plain_gradients(make(), lambda m: m(batch()))
    assert same(paged_gradients(make(), lambda m: m(batch()), tmp_path, monkeypatch), expected)


@pytest.mark.parametrize("change", ["step", "load", "load_state_dict"])
def test_a_backward_after_its_weights_have_changed_is_an_error(tmp_path: Path, change: str) -> None:
    model, optimizer = overspill.torch.wrap(models.small(), models.on_nvme(tmp_path / "swap"))
    optimizer.save(tmp_path / "saved")
    first, second = model(models.tokens(0, 128)), model(models.tokens(1, 128))
    if change == "step":
        first.backward()
        optimizer.step()
    elif change == "load":
        optimizer.load(tmp_path / "saved")
    else:
        model.load_state_dict(models.small().state_dict())
    with pytest.raises(RuntimeError, match=r"inplace operation: .* was updated after the forward"):
        second.backward()
    optimizer.close()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2)
        )

    def forward(self, branch: int, x: torch.Tensor) -> torch.Tensor:
        return self.layers[branch](x).square().sum()


def test_a_step_of_other_layers_leaves_a_graph_as_it_is(tmp_path: Path) -> None:
    model, optimizer = overspill.torch.wrap(Branches(), models.on_nvme(tmp_path))
    first, second = model(0, batch()), model(1, batch())
    for loss in (first, second):
        loss.backward()
        optimizer.step()
    assert optimizer.result().step == 2
    optimizer.close()


class Codebook(nn.Module):
    """Follows its inputs by a frozen parameter that it changes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.code = nn.Parameter(torch.zeros(64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.code.add_(1)
        return self.linear(x) + self.code


def test_a_parameter_that_the_forward_changes_is_an_error(tmp_path: Path) -> None:
    model, optimizer = overspill.torch.wrap(One(Codebook()), models.on_nvme(tmp_path))
    with pytest.raises(RuntimeError, match=r"layers\.0\.code was changed in place"):
        model(batch())
    assert model.layers[0].code.isnan().all()
    optimizer.close()
