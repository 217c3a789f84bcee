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
