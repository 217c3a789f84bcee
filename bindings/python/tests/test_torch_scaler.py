"""torch.amp.GradScaler with a wrapped model: its scale reaches the engine, and what the engine
finds reaches the scaler."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402

import overspill.torch  # noqa: E402

torch.set_num_threads(1)


def wrap(folder: Path, **keys: Any) -> Any:
    return overspill.torch.wrap(models.small(), models.on_nvme(folder, **keys), lr=1e-3)


def scaler_of(scale: float = 2.0**16, **arguments: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **arguments)


def train(folder: Path, scaler: torch.amp.GradScaler | None, steps: int = 8) -> list[float]:
    model, optimizer = wrap(folder, gradient_accumulation_steps=2, max_grad_norm=0.5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, steps)  # wraps step
    losses = []
    for step in range(steps):
        for part in range(2):
            loss = model(models.tokens(2 * step + part, 128)) / 2
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        scheduler.step()
        losses += [loss.item(), optimizer.result().gradient_norm]
    optimizer.close()
    return losses


def test_a_scale_changes_nothing_else(tmp_path: Path) -> None:
    scaler = scaler_of(growth_interval=3)
    scaled = train(tmp_path / "a", scaler)
    assert scaled == pytest.approx(train(tmp_path / "b", None), rel=1e-5)
    assert scaler.get_scale() == 2.0**18  # of eight steps, each third doubles it


def test_a_disabled_scaler_does_nothing(tmp_path: Path) -> None:
    plain = train(tmp_path / "b", None, 3)
    assert train(tmp_path / "a", scaler_of(enabled=False), 3) == plain


def test_a_gradient_that_is_not_finite_halves_the_scale_and_skips(tmp_path: Path) -> None:
    model, optimizer = wrap(tmp_path)
    scaler = scaler_of(4.0)
    before = model.state_dict()
    for factor, scale, changed in ((float("inf"), 2.0, False), (1.0, 2.0, True)):
        scaler.scale(model(models.tokens(0, 128)) * factor).backward()
        scaler.step(optimizer)
        assert optimizer.result().skipped is not changed
        scaler.update()
        assert scaler.get_scale() == scale
        after = model.state_dict()
        assert any(not torch.equal(after[name], before[name]) for name in before) is changed
    assert optimizer.statistics().skipped == 1
    optimizer.close()


def test_a_step_without_gradients_leaves_the_scale(tmp_path: Path) -> None:
    _, optimizer = wrap(tmp_path)
    scaler = scaler_of(4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0 and optimizer.statistics().steps == 0
    optimizer.close()


def test_both_scales_count(tmp_path: Path) -> None:
    norms = []
    for own in (1.0, 8.0):
        model, optimizer = wrap(tmp_path / str(own))
        optimizer.loss_scale = own
        scaler = scaler_of(4.0)
        scaler.scale(model(models.tokens(0, 128)) * own).backward()
        scaler.step(optimizer)
        norms.append(optimizer.result().gradient_norm)
        optimizer.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_unscaling_before_the_step_is_refused(tmp_path: Path) -> None:
    model, optimizer = wrap(tmp_path)
    scaler = scaler_of()
    scaler.scale(model(models.tokens(0, 128))).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match="clip by max_grad_norm"):
        scaler.step(optimizer)
    assert optimizer.statistics().steps == 0
    optimizer.close()


def test_updates_in_the_backward_have_no_scaler(tmp_path: Path) -> None:
    model, optimizer = wrap(tmp_path, offload={"update": "in_backward", "gradients": "auto"})
    scaler = scaler_of()
    scaler.scale(model(models.tokens(0, 128))).backward()
    with pytest.raises(RuntimeError, match=r"set optimizer\.loss_scale"):
        scaler.step(optimizer)
    optimizer.close()


def test_a_scaler_that_does_not_pass_itself_is_named(tmp_path: Path) -> None:
    model, optimizer = wrap(tmp_path)
    model(models.tokens(0, 128)).backward()
    optimizer.found_inf = torch.zeros(())  # what PyTorch announces instead
    with pytest.raises(RuntimeError, match=r"use optimizer\.loss_scale"):
        optimizer.step()
    optimizer.close()


def test_pytorchs_warning_to_optimizers_is_not_the_users(tmp_path: Path) -> None:
    model, optimizer = wrap(tmp_path)
    scaler = scaler_of()
    scaler.scale(model(models.tokens(0, 128))).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter("always")
        overspill.torch.grad_scaler.ignore_warning()
        scaler.step(optimizer)
    assert [str(w.message) for w in caught] == []
    optimizer.close()
