#!/usr/bin/env python3
"""An independent reference of what Overspill computes, in PyTorch: `pip install torch numpy`.

Reads a Hugging Face Llama directory (F32 or BF16 safetensors, single or sharded) and trains it with
AdamW exactly as Overspill's configuration says, one process, everything in memory, file order. Used
by make_goldens.py; as a program it prints a curve as JSON, with every number's full precision:

    reference_trainer.py MODEL TOKENS --format u16 --sequence-len 128 --micro-batch 4 \\
        --accumulation 2 --steps 20 --learning-rate 1e-3 --precision bf16

It shares no code with the engine and none of its structure: one autograd graph over whole
matrices, and torch.optim.AdamW.
"""
import argparse
import dataclasses
import json
import math
import pathlib
import re
import struct

import numpy
import torch
import torch.nn.functional as F


@dataclasses.dataclass
class Settings:
    """The keys of Overspill's configuration that change results."""

    sequence_len: int
    micro_batch: int = 1
    accumulation: int = 1
    steps: int = 10
    learning_rate: float = 1e-3
    scheduler: str = "constant"  # constant, linear, cosine
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    precision: str = "float32"  # float64, float32, bf16
    round_gradients: bool = False  # bf16 rounding of the summed gradients, as the engine does
    unfrozen: tuple = ()  # regular expressions of what trains; empty: everything
    lr_groups: dict = dataclasses.field(default_factory=dict)  # part of a name -> its peak rate


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "F32":
            values = numpy.frombuffer(raw[first:last], "<f4").copy()
        elif entry["dtype"] == "BF16":
            halves = numpy.frombuffer(raw[first:last], "<u2").astype("<u4")
            values = (halves << 16).view("<f4")
        else:
            raise SystemExit(f"{path}: {name}: dtype {entry['dtype']} is not read here")
        tensors[name] = torch.from_numpy(values).reshape(entry["shape"])
    return tensors


def load_model(directory):
    """(config, {name: float32 tensor}); a tied model has no lm_head."""
    directory = pathlib.Path(directory)
    config = json.loads((directory / "config.json").read_text())
    index = directory / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors = {}
    for file in files:
        tensors.update(read_safetensors(directory / file))
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    return config, tensors


def rotary_tables(config, length, dtype):
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    scaling = rope if rope.get("rope_type", "default") != "default" else config.get("rope_scaling")
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = smooth * frequency + (1 - smooth) * frequency / scaling["factor"]
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def normalize(x, weight, epsilon):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def attention(config, w, prefix, x, tables):
    batch, length, _ = x.shape
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    cos, sin = (table[:, None, :] for table in tables)

    def split(name, count):
        return (x @ w[f"{prefix}{name}.weight"].T).view(batch, length, count, -1)

    def rotate(v):
        a, b = v.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q = rotate(split("q_proj", heads)).transpose(1, 2)
    k = rotate(split("k_proj", kv_heads)).transpose(1, 2)
    v = split("v_proj", kv_heads).transpose(1, 2)
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    return mixed.transpose(1, 2).reshape(batch, length, -1) @ w[f"{prefix}o_proj.weight"].T


def logits_of(config, w, tokens):
    """tokens [batch, length] -> logits [batch, length, vocabulary]."""
    epsilon = config["rms_norm_eps"]
    table = w["model.embed_tokens.weight"]
    x = table[tokens]
    tables = rotary_tables(config, tokens.shape[1], x.dtype)
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}."
        h = normalize(x, w[block + "input_layernorm.weight"], epsilon)
        x = x + attention(config, w, block + "self_attn.", h, tables)
        h = normalize(x, w[block + "post_attention_layernorm.weight"], epsilon)
        gate = F.silu(h @ w[block + "mlp.gate_proj.weight"].T)
        up = h @ w[block + "mlp.up_proj.weight"].T
        x = x + (gate * up) @ w[block + "mlp.down_proj.weight"].T
    x = normalize(x, w["model.norm.weight"], epsilon)
    return x @ w.get("lm_head.weight", table).T


def token_losses(config, w, tokens, targets):
    return F.cross_entropy(logits_of(config, w, tokens).flatten(0, 1), targets.flatten(),
                           reduction="none")


def nearest_bf16_ties_away(master):
    """Overspill's split master: the bf16 weight is (bits + 0x8000) >> 16."""
    bits = master.detach().contiguous().view(torch.int32).to(torch.int64)
    high = ((bits + 0x8000) & 0xFFFF0000) & 0xFFFFFFFF
    return (high - ((high >> 31) << 32)).to(torch.int32).view(torch.float32)


def rate_at(s, step, peak):
    if step < s.warmup_steps:
        return peak * step / s.warmup_steps
    progress = min(1.0, (step - s.warmup_steps) / max(1, s.steps - s.warmup_steps))
    if s.scheduler == "linear":
        return peak * (1 - progress)
    if s.scheduler == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak


def trains(s, name):
    return not s.unfrozen or any(re.match(pattern, name) for pattern in s.unfrozen)


def parameter_groups(s, masters):
    """One group for each tensor that trains, with its peak rate."""
    groups = []
    for name, master in masters.items():
        peaks = [rate for part, rate in s.lr_groups.items() if part in name] or [s.learning_rate]
        groups.append({"params": [master], "peak": peaks[0], "lr": peaks[0],
                       "weight_decay": s.weight_decay if master.dim() >= 2 else 0.0})
    return groups


def sequence_batch(stream, s, first):
    rows = [stream[i * s.sequence_len : (i + 1) * s.sequence_len + 1]
            for i in range(first, first + s.micro_batch)]
    rows = torch.stack(rows)
    return rows[:, :-1], rows[:, 1:]


def train(config, tensors, stream, s):
    """[{"step", "loss", "grad_norm"}]: loss before the update, norm before clipping."""
    dtype = torch.float64 if s.precision == "float64" else torch.float32
    masters = {name: t.to(dtype).clone() for name, t in tensors.items() if trains(s, name)}
    frozen = {name: t.to(dtype) for name, t in tensors.items() if not trains(s, name)}
    optimizer = torch.optim.AdamW(parameter_groups(s, masters), betas=(s.beta1, s.beta2),
                                  eps=s.epsilon, foreach=False)
    epoch = (len(stream) - 1) // s.sequence_len
    cursor, curve = 0, []
    for step in range(s.steps):
        weights = {name: (nearest_bf16_ties_away(m) if s.precision == "bf16" else m.clone())
                   .requires_grad_() for name, m in masters.items()}
        tokens_in_step = s.accumulation * s.micro_batch * s.sequence_len
        loss = 0.0
        for _ in range(s.accumulation):
            if cursor + s.micro_batch > epoch:
                raise SystemExit("the token file is too short for this many steps")
            inputs, targets = sequence_batch(stream, s, cursor)
            cursor += s.micro_batch
            losses = token_losses(config, weights | frozen, inputs, targets)
            loss += losses.detach().double().sum().item() / tokens_in_step
            (losses.sum() / tokens_in_step).backward()
        gradients = {name: w.grad for name, w in weights.items()}
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
        clip = min(1.0, s.max_grad_norm / (norm + 1e-6)) if s.max_grad_norm > 0 else 1.0
        for name, master in masters.items():
            gradient = gradients[name]
            if s.round_gradients:
                gradient = gradient.to(torch.bfloat16).to(dtype)
            master.grad = gradient * clip
        for group in optimizer.param_groups:
            group["lr"] = rate_at(s, step, group["peak"])
        optimizer.step()
        curve.append({"step": step + 1, "loss": loss, "grad_norm": norm})
    return curve


def read_tokens(path, form):
    """u16: headerless little-endian uint16; bytes: ByT5's ids of a text, byte + 3."""
    raw = pathlib.Path(path).read_bytes()
    if form == "u16":
        return torch.from_numpy(numpy.frombuffer(raw, "<u2").astype(numpy.int64))
    return torch.from_numpy(numpy.frombuffer(raw, "u1").astype(numpy.int64)) + 3


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("tokens")
    parser.add_argument("--format", choices=["u16", "bytes"], default="u16")
    parser.add_argument("--threads", type=int)
    for field in dataclasses.fields(Settings):
        name = "--" + field.name.replace("_", "-")
        if field.name == "unfrozen":
            parser.add_argument(name, nargs="*", default=())
        elif field.name == "lr_groups":
            parser.add_argument(name, type=json.loads, default={}, help='{"mlp": 1e-4, ...}')
        elif field.type in (bool, "bool"):
            parser.add_argument(name, action="store_true")
        elif field.default is dataclasses.MISSING:
            parser.add_argument(name, type=field.type, required=True)
        else:
            parser.add_argument(name, type=field.type, default=field.default)
    arguments = vars(parser.parse_args())
    threads = arguments.pop("threads")
    if threads:
        torch.set_num_threads(threads)
    config, tensors = load_model(arguments.pop("model"))
    stream = read_tokens(arguments.pop("tokens"), arguments.pop("format"))
    print(json.dumps(train(config, tensors, stream, Settings(**arguments))))


if __name__ == "__main__":
    main()
