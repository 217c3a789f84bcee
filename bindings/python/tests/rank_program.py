"""One rank of test_torch_ranks: trains on its part of each batch, and rank 0 writes the losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import models
import torch
import torch.distributed as dist

import overspill.torch


def main() -> None:
    folder, stage = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = models.on_nvme(folder / f"swap{rank}", zero_stage=stage, weight_decay=0.1)
    plain = models.small(seed=rank)  # all train rank 0's
    plain.register_buffer("place", torch.full((), bool(rank)))
    model, optimizer = overspill.torch.wrap(plain, config, lr=1e-3)
    assert not model.place
    losses = []
    for step in range(6):
        loss = model(models.tokens(step * world + rank, 128))
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    state = {name: value.sum().item() for name, value in model.state_dict().items()}
    del state["place"]
    shares = list(optimizer.plan.optimizer_bytes)
    optimizer.close()
    if rank == 0:
        result = {"losses": losses, "state": state, "optimizer_bytes": sum(shares)}
        (folder / "result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
