"""Two torch.distributed processes on the engine's ranks, against one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402

import overspill.torch  # noqa: E402

PROGRAM = Path(__file__).with_name("rank_program.py")


def run_ranks(folder: Path, stage: int) -> dict[str, object]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(folder), str(stage)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return json.loads((folder / "result.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", [3, 0])
def test_two_ranks_equal_one_with_both_batches(tmp_path: Path, stage: int) -> None:
    two = run_ranks(tmp_path, stage)
    config = models.on_nvme(tmp_path / "one", gradient_accumulation_steps=2, weight_decay=0.1)
    model, optimizer = overspill.torch.wrap(models.small(), config, lr=1e-3)
    losses = models.train(model, optimizer, range(6), accumulation=2, vocab=128)
    assert two["losses"] == pytest.approx(losses, abs=1e-5)
    sums = {name: value.sum().item() for name, value in model.state_dict().items()}
    assert two["state"] == pytest.approx(sums, abs=1e-3)
    if stage == 3:
        # Half, and small layers are rounded up to pages.
        assert two["optimizer_bytes"] < 0.8 * sum(optimizer.plan.optimizer_bytes)
    optimizer.close()
