"""packed_pytorch.json: the demo's model trained on documents packed into sequences, some of whose
tokens are trained on. Every document is run alone, from position 0, through PyTorch in float64:
what packing must not change. One micro-batch has no trained token at all.
"""
import dataclasses
import math
import pathlib
import random

import torch

import reference_trainer as reference

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SETTINGS = reference.Settings(
    sequence_len=64, micro_batch=2, accumulation=2, steps=6, learning_rate=5e-4,
    weight_decay=0.1, beta2=0.95, epsilon=1e-6, max_grad_norm=1.0, precision="float64")
SEQUENCES = SETTINGS.steps * SETTINGS.accumulation * SETTINGS.micro_batch
SILENT = (8, 9)  # sequences without trained tokens: a micro-batch


def pack(seed):
    """(starts of documents, a mask bit a token) of all sequences; no document crosses one."""
    draw = random.Random(seed)
    starts, trained = [], []
    for sequence in range(SEQUENCES):
        left = SETTINGS.sequence_len
        while left > 0:
            size = min(left, draw.choice((1, 2, 5, 11, 23, 40)))
            starts.append(len(trained))
            prompt = draw.randrange(size + 1)
            bits = [int(i > 0 and i >= prompt and sequence not in SILENT) for i in range(size)]
            trained += bits
            left -= size
    return starts, trained


def trained_losses(config, weights, tokens, trained):
    """Losses of a document's trained tokens, which is run alone."""
    if not any(trained):
        return None
    ids = torch.tensor(tokens)
    losses = reference.token_losses(config, weights, ids[None, :-1], ids[None, 1:])
    return losses[torch.tensor(trained[1:], dtype=torch.bool)]


def train(config, tensors, tokens, starts, trained):
    s = SETTINGS
    masters = {name: t.double() for name, t in tensors.items()}
    optimizer = torch.optim.AdamW(reference.parameter_groups(s, masters), betas=(s.beta1, s.beta2),
                                  eps=s.epsilon, foreach=False)
    ends = starts[1:] + [len(tokens)]
    step_tokens = s.accumulation * s.micro_batch * s.sequence_len
    curve = []
    for step in range(s.steps):
        first, last = step * step_tokens, (step + 1) * step_tokens
        count = sum(trained[first:last])
        weights = {name: m.clone().requires_grad_() for name, m in masters.items()}
        loss = 0.0
        for begin, end in zip(starts, ends):
            if not first <= begin < last:
                continue
            losses = trained_losses(config, weights, tokens[begin:end], trained[begin:end])
            if losses is None:
                continue
            loss += losses.detach().sum().item() / count
            (losses.sum() / count).backward()
        norm = math.sqrt(sum(w.grad.square().sum().item() for w in weights.values()))
        clip = min(1.0, s.max_grad_norm / (norm + 1e-6))
        for name, master in masters.items():
            master.grad = weights[name].grad * clip
        optimizer.step()
        curve.append({"step": step + 1, "loss": loss, "grad_norm": norm, "trained_tokens": count})
    return curve


def golden():
    config, tensors = reference.load_model(ROOT / "tests/demo/model")
    starts, trained = pack(20)
    tokens = [byte + 3 for byte in (ROOT / "LICENSE").read_bytes()[:len(trained)]]
    return {
        "settings": dataclasses.asdict(SETTINGS),
        "starts": " ".join(map(str, starts)),
        "trained": "".join(map(str, trained)),
        "curve": train(config, tensors, tokens, starts, trained),
    }
