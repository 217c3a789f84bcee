"""Trains three steps, plain, paged, or with activations in the engine too (spilled), and prints its
peak resident set and what was moved."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import models
import torch
from safetensors.torch import load_file, save_file

import overspill.torch


def make() -> models.Llama:
    return models.Llama(vocab=4096, size=512, inner=1376, layers=6, heads=8)


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def main() -> None:
    kind, folder, length = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    weights = folder / "model.safetensors"
    torch.set_num_threads(1)
    result = {}
    if kind == "make":
        save_file(make().state_dict(), weights)
    else:
        with torch.device("meta"):
            model = make()
        if kind == "plain":
            model.load_state_dict(load_file(weights), assign=True)
            optimizer: torch.optim.Optimizer = models.adamw(model, 1e-4, 0.0)
        else:
            budgets = {"device_memory": "64MiB", "host_memory": "64MiB"}
            config = models.on_nvme(folder / "swap", offload=budgets)
            stores = {"activation_host_bytes": "64MiB", "activation_nvme_bytes": "1GiB"}
            model, optimizer = overspill.torch.wrap(
                model, config, lr=1e-4, weights=weights, **(stores if kind == "spilled" else {})
            )
            plan = optimizer.plan
            kinds = (plan.weight_bytes, plan.gradient_bytes, plan.optimizer_bytes)
            result["moved"] = sum(sizes[2] for sizes in kinds)
            result["kept"] = plan.device_bytes + plan.host_bytes
        result["losses"] = models.train(model, optimizer, range(3), vocab=4096, length=length)
        if isinstance(optimizer, overspill.torch.Optimizer):
            result["saved"] = optimizer.statistics().activation_bytes_saved
        result["peak"] = peak_bytes()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
