"""What `wrap` takes: parameter groups in all forms, and models it must refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
from torch import nn  # noqa: E402

import overspill  # noqa: E402
import overspill.torch  # noqa: E402

torch.set_num_threads(1)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def saved(folder: Path) -> Path:
    """A small model's weights as safetensors."""
    safetensors = pytest.importorskip("safetensors.torch")
    folder.mkdir()
    safetensors.save_file(models.small().state_dict(), folder / "model.safetensors")
    return folder


def meta() -> nn.Module:
    with torch.device("meta"):
        return models.small()


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_a_meta_models_parameter_groups_train(tmp_path: Path) -> None:
    weights, model = saved(tmp_path / "weights"), meta()
    model, optimizer = overspill.torch.wrap(
        model, models.on_nvme(tmp_path / "swap"), weights=weights, params=groups_of(model)
    )
    assert trained(model) == {name for name, _ in models.small().named_parameters()}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters()
    }
    model(models.tokens(0, 128)).backward()
    optimizer.step()
    assert optimizer.result().gradient_norm > 0
    optimizer.close()


@pytest.mark.parametrize(
    "params_of",
    [
        lambda m: [m.lm_head.weight, m.model.norm.weight],
        lambda m: [{"params": m.lm_head.weight}, {"params": m.model.norm.weight}],
        lambda m: [("a", m.lm_head.weight), ("b", m.model.norm.weight)],
        lambda m: [{"params": [("a", m.lm_head.weight)]}, {"params": [("b", m.model.norm.weight)]}],
        lambda m: (p for p in (m.lm_head.weight, m.model.norm.weight)),
    ],
)
def test_parameters_come_in_all_forms_of_torch_optim(
    tmp_path: Path, params_of: Callable[[Any], Any]
) -> None:
    model = models.small()
    torch.optim.SGD(params_of(model))
    _, optimizer = overspill.torch.wrap(model, models.on_nvme(tmp_path), params=params_of(model))
    assert trained(model) == {"lm_head.weight", "model.norm.weight"}
    optimizer.close()


def test_groups_with_wrong_parameters_are_refused(tmp_path: Path) -> None:
    model, other = models.small(), models.small()
    for params, message in (
        ([{"params": [other.lm_head.weight]}], r"shape \[128, 32\] is no parameter of the model"),
        (list(other.named_parameters()), r"embed_tokens.weight is no parameter of the model"),
        ([{"params": model.lm_head.weight}] * 2, "several groups"),
    ):
        with pytest.raises(ValueError, match=message):
            overspill.torch.wrap(model, models.on_nvme(tmp_path), params=params)
    assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_a_model_is_wrapped_once(tmp_path: Path) -> None:
    model, optimizer = overspill.torch.wrap(models.small(), models.on_nvme(tmp_path / "a"))
    for part in (model, model.model.layers[0]):
        with pytest.raises(ValueError, match="build the model again"):
            overspill.torch.wrap(part, models.on_nvme(tmp_path / "b"))
    model(models.tokens(0, 128)).backward()
    optimizer.close()
    with pytest.raises(ValueError, match="build the model again"):
        overspill.torch.wrap(model, models.on_nvme(tmp_path / "b"))


def test_a_meta_model_stays_one_where_wrap_fails(tmp_path: Path) -> None:
    weights, model = saved(tmp_path / "weights"), meta()
    before = list(model.parameters())
    with pytest.raises(overspill.Error) as caught:  # after all was planned
        overspill.torch.wrap(model, models.on_nvme(tmp_path), weights=tmp_path / "nowhere")
    assert caught.value.status == overspill.Status.NOT_FOUND
    with pytest.raises(overspill.Error):
        overspill.torch.wrap(model, {"offload": {"host_memory": "1KiB"}}, weights=weights)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ValueError, match="meta device: give weights"):
        overspill.torch.wrap(model, models.on_nvme(tmp_path))
    params = groups_of(model)
    model, optimizer = overspill.torch.wrap(
        model, models.on_nvme(tmp_path), weights=weights, params=params
    )
    with torch.no_grad():
        expected = models.small()(models.tokens(0, 128)).item()
        assert model(models.tokens(0, 128)).item() == expected
    optimizer.close()


def test_a_model_that_does_not_fit_is_as_it_was(tmp_path: Path) -> None:
    model = models.Llama()
    small = {"device_memory": "1MiB", "host_memory": "1MiB"}
    with pytest.raises(overspill.Error) as caught:
        overspill.torch.wrap(model, {"offload": small}, params=[model.lm_head.weight])
    assert caught.value.status == overspill.Status.DOES_NOT_FIT
    assert trained(model) == {name for name, _ in model.named_parameters()}
    before = models.Llama().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    _, optimizer = overspill.torch.wrap(model, models.on_nvme(tmp_path))
    assert trained(model) == set(before)
    optimizer.close()
