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
