"""Backwards that throw, and calls at a wrong moment: errors that leave everything usable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import overspill  # noqa: E402
import overspill.torch  # noqa: E402

torch.set_num_threads(1)


def wrap(model: nn.Module, folder: Path, **keys: Any) -> Any:
    return overspill.torch.wrap(model, models.on_nvme(folder, **keys), lr=1e-3)


class Fails(torch.autograd.Function):
    """Does nothing forward, and throws backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no memory in the backward")


def failing() -> nn.Module:
    """Its backward brings in the last layers, and throws in the first, which alone is trained."""
    model = models.small()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name)
    return model


def fail_in_backward(model: nn.Module) -> None:
    hook = model.model.layers[0].register_forward_hook(lambda _, __, y: Fails.apply(y))
    loss = model(models.tokens(0, 128))
    hook.remove()
    with pytest.raises(MemoryError):
        loss.backward()


def held(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if not p.isnan().all()]


def test_a_backward_that_threw_holds_nothing_from_the_next_call_on(tmp_path: Path) -> None:
    model, optimizer = wrap(failing(), tmp_path / "swap")
    for call in (
        model.state_dict,
        optimizer.step,
        lambda: optimizer.save(tmp_path / "saved"),
        lambda: optimizer.load(tmp_path / "saved" / "checkpoint-0"),
        lambda: model.load_state_dict(models.small().state_dict()),
        lambda: model(models.tokens(1, 128)),
        optimizer.close,
    ):
        fail_in_backward(model)
        assert held(model)
        call()
        assert not held(model)


def test_a_backward_after_one_that_threw_is_as_ever(tmp_path: Path) -> None:
    expected = None
    for throws in (False, True):
        model, optimizer = wrap(failing(), tmp_path / str(throws))
        second = model(models.tokens(1, 128))
        for _ in range(3 * throws):
            fail_in_backward(model)
        second.backward()
        optimizer.step()
        norm = optimizer.result().gradient_norm
        expected = expected or norm
        assert norm == expected
        assert not model.state_dict()["lm_head.weight"].isnan().any()
        optimizer.close()


def test_a_gradient_that_the_engine_refuses_leaves_the_next_steps_as_they_are(
    tmp_path: Path,
) -> None:
    model, optimizer = wrap(models.small(), tmp_path / "swap")
    model(models.tokens(0, 128)).backward()
    with pytest.raises(overspill.Error) as caught:
        model(models.tokens(0, 128)).backward()
    assert caught.value.status == overspill.Status.GRADIENT_COMPLETE
    optimizer.step()
    model(models.tokens(1, 128)).backward()
    assert not held(model)
    optimizer.step()
    optimizer.save(tmp_path / "saved")
    optimizer.close()


def test_a_closed_engine_leaves_no_parameter_that_points_to_its_memory(tmp_path: Path) -> None:
    model, optimizer = wrap(models.small(), tmp_path)
    with overspill.torch.hold(model, model.lm_head):
        assert held(model) == ["lm_head.weight"]
        optimizer.close()
        assert not held(model)


def test_a_look_at_a_nodes_saved_tensors_holds_nothing(tmp_path: Path) -> None:
    model, optimizer = wrap(models.small(), tmp_path)
    with overspill.torch.hold(model, model.lm_head):
        y = torch.ones(1, 32, requires_grad=True) @ model.lm_head.weight.T
    assert torch.equal(y.grad_fn._saved_mat2, models.small().lm_head.weight.T)
    assert not held(model)
    optimizer.close()


def test_a_state_dict_that_does_not_fit_changes_nothing_else(tmp_path: Path) -> None:
    model, optimizer = wrap(models.small(), tmp_path)
    before, other = models.small().state_dict(), models.small(seed=3).state_dict()
    for wrong in (torch.zeros(7, 32), torch.zeros(128, 32, device="meta")):
        with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
            model.load_state_dict({**other, "lm_head.weight": wrong})
        after = model.state_dict()
        assert torch.equal(after.pop("lm_head.weight"), before["lm_head.weight"])
        assert all(torch.equal(after[name], other[name]) for name in after)
    assert not held(model)
    optimizer.close()


def test_parameters_that_are_not_the_engines_are_not_loaded(tmp_path: Path) -> None:
    model, optimizer = wrap(models.small(), tmp_path)
    before, other = models.small().state_dict(), models.small(seed=3).state_dict()
    with pytest.raises(RuntimeError, match="leave assign out"):
        model.load_state_dict(other, assign=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.lm_head.weight = nn.Parameter(torch.zeros(128, 32))
    with pytest.raises(RuntimeError, match=r"lm_head\.weight is not the parameter"):
        model.load_state_dict(other)
    optimizer.close()


@pytest.mark.parametrize("offload", [{}, {"update": "in_backward", "gradients": "auto"}])
def test_checkpoints_are_of_whole_steps(tmp_path: Path, offload: dict[str, Any]) -> None:
    model, optimizer = wrap(models.small(), tmp_path / "swap", offload=offload)
    optimizer.save(tmp_path / "saved")
    model(models.tokens(0, 128)).backward()
    for call in (optimizer.save, optimizer.load):
        with pytest.raises(overspill.Error, match=r"call step\(\) first"):
            call(tmp_path / "saved")
    optimizer.step()
    optimizer.load(tmp_path / "saved")
    before = models.small().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(models.tokens(1, 128)).backward()
    optimizer.step()
    assert optimizer.result().step == 1
    optimizer.close()


def fill(model: Any) -> None:
    with torch.no_grad():
        nn.init.ones_(model.model.norm.weight)


def fill_data(model: Any) -> None:
    model.model.norm.weight.data.fill_(1)


def replace_data(model: Any) -> None:
    model.model.norm.weight.data = torch.ones(32)


@pytest.mark.parametrize("write", [fill, fill_data, replace_data])
def test_values_written_to_a_parameter_that_is_not_here_are_an_error(
    tmp_path: Path, write: Callable[[Any], None]
) -> None:
    model, optimizer = wrap(models.small(), tmp_path)
    write(model)
    assert model.lm_head.weight.isnan().all()  # the others' guard is their own
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight was written to"):
        model(models.tokens(0, 128))
    assert not held(model)
    model.load_state_dict(models.small(seed=3).state_dict())
    with torch.no_grad():
        expected = models.small(seed=3)(models.tokens(0, 128)).item()
        assert model(models.tokens(0, 128)).item() == expected
    write(model)
    model.load_state_dict(models.small().state_dict())  # sets it all the same
    model(models.tokens(0, 128)).backward()
    optimizer.close()


class Recurrent(nn.Module):
    """Uses its one block twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = False
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layers[0], x, use_reentrant=self.reentrant)
        return x.square().mean()


def test_a_block_that_is_used_twice_wants_checkpointing_that_is_not_reentrant(
    tmp_path: Path,
) -> None:
    plain = Recurrent()
    plain(torch.ones(2, 16)).backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm().item()
    model, optimizer = wrap(Recurrent(), tmp_path)
    model.reentrant = True
    with pytest.raises(overspill.Error, match="use_reentrant=False") as caught:
        model(torch.ones(2, 16)).backward()
    assert caught.value.status == overspill.Status.GRADIENT_COMPLETE
    optimizer.step()
    model.reentrant = False
    model(torch.ones(2, 16)).backward()
    optimizer.step()
    optimizer.close()
    model, optimizer = wrap(Recurrent(), tmp_path)
    model(torch.ones(2, 16)).backward()
    optimizer.step()
    assert optimizer.result().gradient_norm == pytest.approx(expected, rel=1e-5)
    optimizer.close()
