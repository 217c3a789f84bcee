#!/usr/bin/env python3
"""Regenerates every committed golden file of this folder: `pip install torch numpy transformers`,
then run it.

demo_model.json     the demo's model on a fixed prompt (float64) and trained for ten steps on the
                    repository's LICENSE (float32, bf16 weights with a float32 master, and
                    float32 with frozen tensors and groups of learning rates)
adamw_pytorch.json  see adamw_pytorch.py
adafactor_transformers.json  see adafactor_transformers.py
packed_pytorch.json  see packed_pytorch.py
"""
import dataclasses
import json
import pathlib
import sys

import torch

sys.dont_write_bytecode = True

import adafactor_transformers
import adamw_pytorch
import packed_pytorch
import reference_trainer as reference

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROMPT = "Permission is hereby granted to copy and distribute this license document."
SETTINGS = reference.Settings(
    sequence_len=64, micro_batch=2, accumulation=2, steps=10, learning_rate=5e-4,
    scheduler="cosine", warmup_steps=2, weight_decay=0.1, beta2=0.95, max_grad_norm=1.0)
GROUPS = {"unfrozen": ["model.layers.[2-5].", "model.layers.1.mlp.down_proj", "model.norm"],
          "lr_groups": {"mlp": 1e-3, "norm": 2e-4}}


def demo_model():
    config, tensors = reference.load_model(ROOT / "tests/demo/model")
    ids = [byte + 3 for byte in PROMPT.encode()]
    wide = {name: t.double() for name, t in tensors.items()}
    tokens = torch.tensor([ids])
    losses = reference.token_losses(config, wide, tokens[:, :-1], tokens[:, 1:])
    stream = reference.read_tokens(ROOT / "LICENSE", "bytes")
    curves = {
        "float32": dataclasses.replace(SETTINGS, precision="float32"),
        "bf16": dataclasses.replace(SETTINGS, precision="bf16", round_gradients=True),
        "groups": dataclasses.replace(SETTINGS, precision="float32", **GROUPS),
    }
    return {
        "prompt": PROMPT,
        "last_logits": reference.logits_of(config, wide, tokens)[0, -1].tolist(),
        "token_losses": losses.tolist(),
        "settings": dataclasses.asdict(SETTINGS),
        "groups": GROUPS,
        "curves": {key: reference.train(config, tensors, stream, s) for key, s in curves.items()},
    }


def main():
    torch.set_num_threads(1)
    for name, content in {"demo_model.json": demo_model(),
                          "adamw_pytorch.json": adamw_pytorch.golden(),
                          "adafactor_transformers.json": adafactor_transformers.golden(),
                          "packed_pytorch.json": packed_pytorch.golden()}.items():
        (HERE / name).write_text(json.dumps(content, indent=1) + "\n")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
