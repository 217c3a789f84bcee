"""What autograd saves, in the engine's activation store: the same bits, counted bytes, no leak."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
from torch import nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import overspill  # noqa: E402
import overspill.torch  # noqa: E402
from overspill.units import parse_bytes  # noqa: E402

torch.set_num_threads(1)
WIDTH = 256
TENSOR = WIDTH * WIDTH * 4  # bytes of what goes from layer to layer of Chain


class Chain(nn.Module):
    """Linear and ReLU in turn, on WIDTH rows: autograd saves each linear's input, and nothing else
    but weights, for a ReLU's output is the next one's input."""

    def __init__(self, linears: int = 3, *, checkpointing: bool | str = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointing = checkpointing
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())
            for _ in range(linears - 1)
        )
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = layer(x)
        return self.head(x).mean()


def rows(number: int = 0) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number))


def wrap(model: nn.Module, folder: Path, host: int, nvme: int = 0, **keys: Any) -> Any:
    """With room for so many of Chain's tensors."""
    return overspill.torch.wrap(
        model, models.on_nvme(folder, **keys), lr=1e-3,
        activation_host_bytes=host * TENSOR, activation_nvme_bytes=nvme * TENSOR,
    )  # fmt: skip


def counts(optimizer: overspill.torch.Optimizer) -> tuple[float, float]:
    """Saved and spilled, in tensors of Chain."""
    statistics = optimizer.statistics()
    bytes_ = statistics.activation_bytes_saved, statistics.activation_bytes_spilled
    return bytes_[0] / TENSOR, bytes_[1] / TENSOR


@functools.cache
def losses_in_memory(
    folder: Path, accumulation: int, checkpointing: bool | str, autocast: bool
) -> list[float]:
    return train_llama(folder, accumulation, checkpointing, autocast)[0]


def train_llama(
    folder: Path, accumulation: int, checkpointing: bool | str, autocast: bool, **arguments: Any
) -> tuple[list[float], overspill.Statistics]:
    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(batch)  # type: ignore[no-any-return]

    config = models.on_nvme(folder, gradient_accumulation_steps=accumulation, weight_decay=0.1)
    model, optimizer = overspill.torch.wrap(models.Llama(), config, lr=3e-4, **arguments)
    model.model.checkpointing = checkpointing
    losses = models.train(
        model, optimizer, range(4), accumulation=accumulation, loss_of=loss_of, length=96
    )
    statistics = optimizer.statistics()
    optimizer.close()
    return losses, statistics


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True, "reentrant"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_have_the_same_bits(
    tmp_path: Path, accumulation: int, checkpointing: bool | str, autocast: bool
) -> None:
    case = accumulation, checkpointing, autocast
    losses, statistics = train_llama(
        tmp_path / "a", *case, activation_host_bytes="1MiB", activation_nvme_bytes="64MiB"
    )
    assert losses == losses_in_memory(tmp_path / "b", *case)
    assert statistics.activation_bytes_saved > 0
    if not checkpointing:
        assert statistics.activation_bytes_spilled > statistics.activation_bytes_saved // 2


def freeze_all_but_heads(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "lm_head" in name)
    return model


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (lambda: models.Llama(tied=True), {}),
        (lambda: freeze_all_but_heads(models.Llama()), {}),
        (lambda: models.Llama().bfloat16(), {}),
        (models.Llama, {"offload": {"update": "in_backward", "gradients": "auto"}}),
    ],
    ids=["tied", "frozen", "bf16", "in_backward"],
)
def test_other_models_have_the_same_bits_too(
    tmp_path: Path, make: Callable[[], nn.Module], keys: dict[str, Any]
) -> None:
    results = []
    for arguments in ({}, {"activation_host_bytes": "1MiB", "activation_nvme_bytes": "64MiB"}):
        config = models.on_nvme(tmp_path / str(len(arguments)), **copy.deepcopy(keys))
        model, optimizer = overspill.torch.wrap(make(), config, lr=3e-4, **arguments)
        results.append(models.train(model, optimizer, range(3), length=96))
        assert (optimizer.statistics().activation_bytes_spilled > 0) is bool(arguments)
        optimizer.close()
    assert results[0] == results[1]


def test_each_storage_is_saved_once_and_the_oldest_go_to_files(tmp_path: Path) -> None:
    model, optimizer = wrap(Chain(3), tmp_path, host=1, nvme=2)
    model(rows()).backward()
    assert counts(optimizer) == (3, 2)  # the input, and two outputs of ReLU
    optimizer.step()
    model(rows()).backward()
    assert counts(optimizer) == (6, 4)
    optimizer.close()


@pytest.mark.parametrize("checkpointing", [True, "reentrant"])
def test_of_a_checkpointed_block_its_input_is_saved(
    tmp_path: Path, checkpointing: bool | str
) -> None:
    model, optimizer = wrap(Chain(4, checkpointing=checkpointing), tmp_path, host=4)
    model(rows().requires_grad_() * 1).backward()
    assert counts(optimizer) == (4, 0)  # three blocks' inputs and the head's
    optimizer.close()


def test_the_sizes_come_from_the_configuration_too(tmp_path: Path) -> None:
    config = models.on_nvme(tmp_path, offload={"activation_host_bytes": "1MiB"})
    model, optimizer = overspill.torch.wrap(Chain(3), config)
    model(rows())
    assert counts(optimizer) == (3, 0)
    optimizer.close()


def test_a_graph_that_is_dropped_discards_what_it_saved(tmp_path: Path) -> None:
    model, optimizer = wrap(Chain(3), tmp_path, host=3)
    for number in range(4):  # two graphs at once would not fit
        loss = model(rows(number))
        del loss
    model(rows()).backward()
    assert counts(optimizer) == (15, 0)
    optimizer.close()


def test_what_is_wanted_next_is_fetched_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[int] = []
    real = overspill.Engine.prefetch_activation

    def prefetch(engine: overspill.Engine, activation: int) -> None:
        fetched.append(activation)
        real(engine, activation)

    monkeypatch.setattr(overspill.Engine, "prefetch_activation", prefetch)
    model, optimizer = wrap(Chain(9), tmp_path, host=4, nvme=9)
    model(rows()).backward()
    assert counts(optimizer)[0] == 9
    assert fetched == sorted(fetched, reverse=True) and len(set(fetched)) == len(fetched) == 8
    optimizer.close()


def test_memory_that_was_written_again_is_saved_again(tmp_path: Path) -> None:
    def norm(folder: Path, host: int) -> float:
        model, optimizer = wrap(Chain(3), folder, host=host)
        x = rows(1)
        earlier = model(x)  # noqa: F841  a graph that is still there
        x.copy_(rows(2))
        model(x).backward()
        optimizer.step()
        result = optimizer.result().gradient_norm
        optimizer.close()
        return result  # type: ignore[no-any-return]

    assert norm(tmp_path / "a", 8) == norm(tmp_path / "b", 0)


def test_memory_that_others_write_is_saved_again(tmp_path: Path) -> None:
    def norm(folder: Path, host: int) -> float:
        model, optimizer = wrap(Chain(3), folder, host=host)
        buffer = rows(1).numpy()
        x = torch.from_numpy(buffer)
        earlier = model(x)  # noqa: F841  a graph that is still there
        buffer[:] = rows(2).numpy()  # PyTorch's version stays
        model(x).backward()
        optimizer.step()
        result = optimizer.result().gradient_norm
        optimizer.close()
        return result  # type: ignore[no-any-return]

    assert norm(tmp_path / "a", 8) == norm(tmp_path / "b", 0)


def test_a_batch_that_is_used_twice_in_a_forward_is_saved_once(tmp_path: Path) -> None:
    model, optimizer = wrap(Twice(), tmp_path, host=8)
    for number in range(2):
        model(rows(number)).backward()
        optimizer.step()
    assert counts(optimizer) == (2, 0)
    optimizer.close()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers[0](x) + self.layers[1](x)).mean()


def test_full_stores_are_the_engines_error(tmp_path: Path) -> None:
    model, optimizer = wrap(Chain(3), tmp_path, host=2)
    with pytest.raises(overspill.Error, match="raise activation_host_bytes") as caught:
        model(rows())
    assert caught.value.status == overspill.Status.DOES_NOT_FIT
    del caught
    gc.collect()
    with torch.no_grad():
        assert model(rows()).item() == Chain(3)(rows()).item()
    with pytest.raises(overspill.Error, match="raise activation_host_bytes"):
        model(rows())  # the hooks of the forward that failed are gone, so it fails alike
    optimizer.close()


def test_a_graph_can_be_used_twice(tmp_path: Path) -> None:
    model, optimizer = wrap(Chain(3), tmp_path, host=1, nvme=4, gradient_accumulation_steps=2)
    x = rows().requires_grad_()
    loss = model(x)
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)
    optimizer.close()


class Scaled(nn.Module):
    """Saves a buffer, a leaf of the caller, a slice of the data, and a small tensor: all stay."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("table", rows(1))

    def forward(self, data: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        scale = self.weight * 2
        part = data[:8] * leaf[:8]
        return (leaf * leaf * self.table).sum() * (scale * scale) + part.sum()


def test_what_has_another_owner_stays(tmp_path: Path) -> None:
    model, optimizer = wrap(Scaled(), tmp_path, host=4)
    model(rows(2), rows(3).requires_grad_()).backward()
    assert counts(optimizer) == (0, 0)
    optimizer.close()


class Softmax(nn.Module):
    """Saves its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).softmax(-1)
        self.seen.append(StorageWeakRef(y.untyped_storage()))
        return y


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Softmax()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).square().sum()


@pytest.mark.parametrize(
    ("host", "count", "moves"), [(0, WIDTH, False), (8, WIDTH, True), (8, 4, False)]
)
def test_an_output_that_is_saved_is_freed_with_its_graph(
    tmp_path: Path, host: int, count: int, moves: bool
) -> None:
    model, optimizer = wrap(Blocks(), tmp_path, host=host)
    loss = model(rows()[:count].clone())
    assert model.layers[0].seen[0].expired() is moves  # or else the graph keeps it
    del loss
    gc.collect()
    assert model.layers[0].seen[0].expired()
    optimizer.close()


def test_wrong_sizes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set both"):
        wrap(Chain(), tmp_path, host=0, nvme=1)
    with pytest.raises(ValueError, match="activation_host_bytes: '1 page'"):
        overspill.torch.wrap(Chain(), models.on_nvme(tmp_path), activation_host_bytes="1 page")


def test_sizes_are_read_as_the_engine_reads_them() -> None:
    sizes = {"4096": 4096, "1.5GiB": 3 << 29, "2 kb": 2000, "1MiB": 1 << 20, "0": 0}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    assert parse_bytes(7) == 7
    for wrong in ("", "GiB", "-1", "1.2.3", "1 page", -1, True, 1.5):
        with pytest.raises(ValueError, match="is not a byte size"):
            parse_bytes(wrong)  # type: ignore[arg-type]
