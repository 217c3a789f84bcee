"""torch.compile of wrapped models: what is between the hooks is compiled, and computes the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
from torch import nn  # noqa: E402

import overspill.torch  # noqa: E402

torch.set_num_threads(1)
STEPS = 3


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class Counting:
    """A backend that computes as AOTAutograd's without a compiler, and counts graphs and calls."""

    def __init__(self) -> None:
        self.graphs = 0
        self.matrices = 0  # products of matrices in all graphs
        self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        self.matrices += sum("linear" in str(node.target) for node in graph.graph.nodes)
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        def run(*arguments: Any) -> Any:
            self.calls += 1
            return compiled(*arguments)

        return run


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return models.train(model, optimizer, range(STEPS), accumulation=2, vocab=128)


def plain_losses() -> list[float]:
    plain = models.small()
    return losses(plain, models.adamw(plain, 1e-3, 0.0))


def wrap(model: nn.Module, folder: Path, **arguments: Any) -> Any:
    config = models.on_nvme(folder, gradient_accumulation_steps=2)
    return overspill.torch.wrap(model, config, lr=1e-3, **arguments)


@pytest.mark.parametrize("spill", [False, True])
def test_a_compiled_model_trains_as_it_does_eagerly(tmp_path: Path, spill: bool) -> None:
    arguments = {"activation_host_bytes": "1MiB"} if spill else {}
    eager, optimizer = wrap(models.small(), tmp_path / "a")
    expected = losses(eager, optimizer)
    optimizer.close()
    backend = Counting()
    model, optimizer = wrap(models.small(), tmp_path / "b", **arguments)
    assert losses(torch.compile(model, backend=backend), optimizer) == expected
    # A block, whose graph serves all three, and the head: graphs end at every group's hooks.
    assert backend.matrices == 7 + 1
    # Embedding, three blocks, norm, head and loss, in each micro-batch.
    assert backend.calls == 7 * 2 * STEPS
    optimizer.close()


@pytest.mark.parametrize("checkpointing", [False, True, "reentrant"])
def test_blocks_that_are_compiled_by_themselves(tmp_path: Path, checkpointing: bool | str) -> None:
    backend = Counting()
    model = models.small()
    model.model.checkpointing = checkpointing
    for block in model.model.layers:
        block.compile(backend=backend)
    model, optimizer = wrap(model, tmp_path)
    assert losses(model, optimizer) == pytest.approx(plain_losses(), abs=1e-5)
    calls = 3 * 2 * STEPS
    assert backend.calls == (2 * calls if checkpointing else calls)  # computed again
    optimizer.close()


def test_a_model_that_was_compiled_and_used_before(tmp_path: Path) -> None:
    model = models.small()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(models.tokens(0, 128))  # a graph without hooks
    _, optimizer = wrap(model, tmp_path)
    assert losses(compiled, optimizer) == pytest.approx(plain_losses(), abs=1e-5)
    optimizer.close()


def test_one_graph_for_a_whole_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = wrap(models.small(), tmp_path)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"overspill\.torch brings"):
        compiled(models.tokens(0, 128))
    optimizer.close()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_inductor(tmp_path: Path) -> None:
    """PyTorch's own compiler, with the C++ that it writes."""
    model, optimizer = wrap(models.small(), tmp_path)
    compiled = torch.compile(model)
    assert losses(compiled, optimizer) == pytest.approx(plain_losses(), abs=1e-4)
    optimizer.close()
