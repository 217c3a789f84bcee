"""A small Llama with Hugging Face's names, in plain PyTorch, and the loop that trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class RmsNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class Attention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(size, size, bias=False) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, size = x.shape
        q, k, v = (
            p(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, size))


class Mlp(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, size: int, inner: int, heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(size, heads)
        self.mlp = Mlp(size, inner)
        self.input_layernorm = RmsNorm(size)
        self.post_attention_layernorm = RmsNorm(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, vocab: int, size: int, inner: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, size)
        self.layers = nn.ModuleList(Block(size, inner, heads) for _ in range(layers))
        self.norm = RmsNorm(size)
        self.checkpointing: bool | str = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = layer(x)
        return self.norm(x)


class Llama(nn.Module):
    """`model(tokens)` gives the mean loss of predicting each next token."""

    def __init__(
        self, vocab: int = 1024, size: int = 192, inner: int = 512, layers: int = 4, heads: int = 4,
        *, tied: bool = False, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(seed)
        self.model = Trunk(vocab, size, inner, layers, heads)
        self.lm_head = nn.Linear(size, vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head(self.model(tokens))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def small(**arguments: Any) -> Llama:
    """A tiny one, for tests of behaviour."""
    return Llama(vocab=128, size=32, inner=64, layers=3, heads=2, **arguments)


def tokens(number: int, vocab: int = 1024, length: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, vocab, (2, length), generator=generator)


def adamw(model: nn.Module, lr: float, decay: float) -> torch.optim.AdamW:
    """Plain PyTorch's, which decays matrices only, as the engine does."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[int] | range,
    *,
    accumulation: int = 1,
    vocab: int = 1024,
    length: int = 48,
    scheduler: Any = None,
    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
) -> list[float]:
    """The losses of the steps, whose data their numbers name."""
    losses = []
    for step in steps:
        total = 0.0
        for part in range(accumulation):
            batch = tokens(step * accumulation + part, vocab, length)
            loss = (loss_of(model, batch) if loss_of else model(batch)) / accumulation
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(total)
    return losses


def on_nvme(folder: Any, **keys: Any) -> dict[str, Any]:
    """A configuration that keeps all state in files."""
    offload = {
        "device_memory": "48MiB", "host_memory": "48MiB", "nvme_paths": [str(folder)],
        "weights": "nvme", "optimizer": "nvme", "gradients": "nvme",
    }  # fmt: skip
    offload.update(keys.pop("offload", {}))
    return {"max_grad_norm": 0, **keys, "offload": offload}
