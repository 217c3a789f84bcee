"""overspill.torch against plain PyTorch, with all state in files."""

from __future__ import annotations

import functools
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
from torch import nn  # noqa: E402

import overspill  # noqa: E402
import overspill.torch  # noqa: E402

STEPS = 30
torch.set_num_threads(1)  # other programs of the machine would be waited for at every step


def wrap(model: nn.Module, folder: Path, **arguments: Any) -> Any:
    keys = {k: arguments.pop(k) for k in list(arguments) if k in KEYS}
    return overspill.torch.wrap(model, models.on_nvme(folder, **keys), **arguments)


KEYS = ("weight_decay", "gradient_accumulation_steps", "max_grad_norm", "unfrozen_parameters",
        "offload", "precision")  # fmt: skip


def largest_difference(left: list[float], right: list[float]) -> float:
    assert len(left) == len(right)
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


@functools.cache
def plain_losses(accumulation: int) -> list[float]:
    """Checkpointing changes no bit of plain PyTorch's."""
    plain = models.Llama()
    optimizer = models.adamw(plain, 3e-4, 0.1)
    return models.train(plain, optimizer, range(STEPS), accumulation=accumulation)


@pytest.mark.parametrize("checkpointing", [False, True, "reentrant"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_losses_equal_adamw(tmp_path: Path, accumulation: int, checkpointing: bool | str) -> None:
    expected = plain_losses(accumulation)
    model, paged = wrap(
        models.Llama(), tmp_path, lr=3e-4, weight_decay=0.1,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    model.model.checkpointing = checkpointing
    actual = models.train(model, paged, range(STEPS), accumulation=accumulation)
    assert largest_difference(expected, actual) < 1e-5
    assert paged.result().step == STEPS
    paged.close()


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_transformers_llama_equals_adamw(
    tmp_path: Path, accumulation: int, checkpointing: bool
) -> None:
    transformers = pytest.importorskip("transformers")

    def make() -> nn.Module:
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).float().train()
        if checkpointing:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        return model  # type: ignore[no-any-return]

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(input_ids=batch, labels=batch, use_cache=False).loss  # type: ignore[no-any-return]

    plain = make()
    expected = models.train(
        plain, models.adamw(plain, 3e-4, 0.1), range(STEPS), accumulation=accumulation,
        loss_of=loss_of,
    )  # fmt: skip
    model, paged = wrap(
        make(), tmp_path, lr=3e-4, weight_decay=0.1, gradient_accumulation_steps=accumulation
    )
    actual = models.train(model, paged, range(STEPS), accumulation=accumulation, loss_of=loss_of)
    assert largest_difference(expected, actual) < 1e-5
    paged.close()


def run_small(folder: Path, model: nn.Module, steps: range, **arguments: Any) -> list[float]:
    wrapped, optimizer = wrap(model, folder, lr=1e-3, **arguments)
    losses = models.train(wrapped, optimizer, steps, vocab=128)
    optimizer.close()
    return losses


def test_resuming_is_exact(tmp_path: Path) -> None:
    whole = run_small(tmp_path / "a", models.small(), range(12), weight_decay=0.1)
    model, optimizer = wrap(models.small(), tmp_path / "b", lr=1e-3, weight_decay=0.1)
    first = models.train(model, optimizer, range(6), vocab=128)
    optimizer.save(tmp_path / "saved", user_state={"next": 6})
    optimizer.close()
    model, optimizer = wrap(models.small(seed=9), tmp_path / "c", lr=0.5, weight_decay=0.1)
    state = optimizer.load(tmp_path / "saved")
    assert state == {"next": 6} and optimizer.param_groups[0]["lr"] == 1e-3
    rest = models.train(model, optimizer, range(state["next"], 12), vocab=128)
    assert first + rest == whole
    optimizer.close()


def test_tied_weights(tmp_path: Path) -> None:
    plain = models.small(tied=True)
    expected = models.train(plain, models.adamw(plain, 1e-3, 0.1), range(8), vocab=128)
    actual = run_small(tmp_path, models.small(tied=True), range(8), weight_decay=0.1)
    assert largest_difference(expected, actual) < 1e-5


def freeze(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "lm_head" in name)
    return model


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    plain = freeze(models.small())
    expected = models.train(plain, models.adamw(plain, 1e-3, 0.1), range(8), vocab=128)
    model, optimizer = wrap(freeze(models.small()), tmp_path, lr=1e-3, weight_decay=0.1)
    actual = models.train(model, optimizer, range(8), vocab=128)
    assert largest_difference(expected, actual) < 1e-5
    before = models.small().state_dict()
    for name, value in model.state_dict().items():
        trained = "layers.1" in name or "lm_head" in name
        assert torch.equal(value, before[name]) is not trained, name
    optimizer.close()


def test_unfrozen_parameters_of_the_configuration(tmp_path: Path) -> None:
    model, optimizer = wrap(models.small(), tmp_path, lr=1e-3, unfrozen_parameters=["lm_head"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lm_head.weight"}
    models.train(model, optimizer, range(2), vocab=128)
    before = models.small().state_dict()
    after = model.state_dict()
    assert {n for n in before if not torch.equal(before[n], after[n])} == trained
    optimizer.close()


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, 4, bias=False)
        self.lora_b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def with_lora() -> nn.Module:
    model = models.small()
    torch.manual_seed(5)
    model.requires_grad_(False)
    for block in model.model.layers:
        block.self_attn.q_proj = Lora(block.self_attn.q_proj)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora(tmp_path: Path, checkpointing: bool) -> None:
    plain = with_lora()
    expected = models.train(plain, models.adamw(plain, 1e-2, 0.0), range(8), vocab=128)
    model = with_lora()
    model.model.checkpointing = checkpointing
    # Without an input that needs gradients, a checkpoint of frozen layers would have none.
    model, optimizer = wrap(model, tmp_path, lr=1e-2)
    actual = models.train(model, optimizer, range(8), vocab=128)
    assert largest_difference(expected, actual) < 1e-5
    optimizer.close()


def test_clipping_and_the_norm(tmp_path: Path) -> None:
    plain = models.small()
    reference = models.adamw(plain, 1e-3, 0.0)
    model, optimizer = wrap(models.small(), tmp_path, lr=1e-3, max_grad_norm=0.5)
    for step in range(5):
        batch = models.tokens(step, 128)
        plain(batch).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        result = optimizer.result()
        assert result.gradient_norm == pytest.approx(float(norm), rel=1e-5)
        assert result.clip_factor == pytest.approx(min(1.0, 0.5 / float(norm)), rel=1e-4)


def test_schedulers_and_parameter_groups(tmp_path: Path) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        return [{"params": matrices, "lr": 2e-3}, {"params": vectors, "weight_decay": 0.0}]

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)

    plain = models.small()
    reference = torch.optim.AdamW(groups(plain), lr=1e-3, weight_decay=0.1)
    expected = models.train(plain, reference, range(8), vocab=128, scheduler=schedule(reference))
    model = models.small()
    model, optimizer = wrap(model, tmp_path, lr=1e-3, params=groups(model), weight_decay=0.1)
    actual = models.train(model, optimizer, range(8), vocab=128, scheduler=schedule(optimizer))
    assert largest_difference(expected, actual) < 1e-5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(reference.param_groups[0]["lr"])
    optimizer.close()


def gradients_under_autocast(model: nn.Module, batch: torch.Tensor) -> tuple[float, dict[str, Any]]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def test_autocast_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = models.tokens(0, 128)
    expected_loss, expected = gradients_under_autocast(models.small(), batch)
    model, optimizer = wrap(models.small(), tmp_path)
    seen: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(
        type(optimizer), "submit", lambda _, managed, g: seen.update({managed.name: g.clone()})
    )
    loss, _ = gradients_under_autocast(model, batch)
    assert loss == expected_loss and seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], expected[name]) for name in seen)
    optimizer.close()


def test_bf16_models(tmp_path: Path) -> None:
    plain = models.small().bfloat16()
    expected = models.train(plain, models.adamw(plain, 1e-3, 0.0), range(1), vocab=128)
    model, optimizer = wrap(models.small().bfloat16(), tmp_path, lr=1e-3)
    losses = models.train(model, optimizer, range(20), vocab=128)
    assert losses[0] == expected[0]
    assert model.lm_head.weight.dtype == torch.bfloat16
    optimizer.close()


def test_updates_in_the_backward(tmp_path: Path) -> None:
    offload = {"update": "in_backward", "gradients": "auto"}
    plain = models.small()
    expected = models.train(plain, models.adamw(plain, 1e-3, 0.1), range(8), vocab=128)
    actual = run_small(tmp_path, models.small(), range(8), weight_decay=0.1, offload=offload)
    assert largest_difference(expected, actual) < 1e-5


def test_state_dict_goes_both_ways(tmp_path: Path) -> None:
    model, optimizer = wrap(models.small(), tmp_path)
    original = models.small().state_dict()
    state = model.state_dict()
    assert state.keys() == original.keys()
    assert all(torch.equal(state[name], original[name]) for name in state)
    assert torch.equal(model.model.norm.state_dict()["weight"], original["model.norm.weight"])
    other = models.small(seed=3).state_dict()
    model.load_state_dict(other)
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match="Missing"):
        model.load_state_dict({})
    optimizer.close()


def test_parameters_outside_of_their_layer_are_nan_and_take_no_memory(tmp_path: Path) -> None:
    model, optimizer = wrap(models.small(), tmp_path)
    weight = model.lm_head.weight
    assert weight.shape == (128, 32) and weight.isnan().all()
    assert weight.untyped_storage().nbytes() == 4
    with overspill.torch.hold(model, model.lm_head):
        assert torch.equal(weight, models.small().lm_head.weight)
    assert weight.isnan().all()
    optimizer.close()


def test_evaluation_and_mixed_use(tmp_path: Path) -> None:
    model, optimizer = wrap(models.small(), tmp_path, lr=1e-3)
    plain = models.small()
    with torch.no_grad():
        assert model(models.tokens(1, 128)).item() == plain(models.tokens(1, 128)).item()
    left = model(models.tokens(1, 128))  # two graphs at once, and one that is dropped
    right = model(models.tokens(2, 128))
    model(models.tokens(3, 128))
    (left + right).backward()
    optimizer.step()
    assert optimizer.result().gradient_norm > 0
    optimizer.close()


def test_a_meta_model_is_loaded_from_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    source = models.small()
    safetensors.save_file(source.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = models.small()
    model, optimizer = wrap(model, tmp_path / "swap", lr=1e-3, weights=tmp_path)
    actual = models.train(model, optimizer, range(5), vocab=128)
    expected = models.train(source, models.adamw(source, 1e-3, 0.0), range(5), vocab=128)
    assert largest_difference(expected, actual) < 1e-5
    optimizer.close()


def test_a_meta_transformers_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(2)
    source = transformers.LlamaForCausalLM(config).float()
    source.save_pretrained(tmp_path / "model")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).float()
    model, optimizer = wrap(model, tmp_path / "swap", weights=tmp_path / "model")
    batch = models.tokens(0, 128)
    with torch.no_grad():
        expected = source(input_ids=batch).logits
        assert torch.equal(model(input_ids=batch).logits, expected)
    optimizer.close()


def test_misuse_is_named(tmp_path: Path) -> None:
    model, optimizer = wrap(models.small(), tmp_path)
    model(models.tokens(0, 128)).backward()
    with pytest.raises(RuntimeError, match="zero_grad between"):
        optimizer.zero_grad()
    with pytest.raises(overspill.Error) as caught:
        model(models.tokens(0, 128)).backward()
    assert caught.value.status == overspill.Status.GRADIENT_COMPLETE
    optimizer.step()
    with pytest.raises(RuntimeError, match="fixed by"):
        optimizer.add_param_group({"params": []})
    optimizer.close()
    mixed = models.small()
    mixed.lm_head.bfloat16()
    with pytest.raises(ValueError, match="one precision"):
        wrap(mixed, tmp_path / "b")
    with pytest.raises(ValueError, match="no module"):
        wrap(models.small(), tmp_path / "c", blocks=["nothing"])
    with pytest.raises(overspill.Error) as caught:
        overspill.torch.wrap(
            models.Llama(), {"offload": {"device_memory": "1MiB", "host_memory": "1MiB"}}
        )
    assert caught.value.status == overspill.Status.DOES_NOT_FIT


def test_nothing_outlives_the_model(tmp_path: Path) -> None:
    model, optimizer = wrap(models.small(), tmp_path)
    models.train(model, optimizer, range(2), vocab=128)
    engine = weakref.ref(optimizer.engine)
    del model, optimizer
    gc.collect()
    assert engine() is None


def test_groups_are_blocks_and_the_modules_around_them() -> None:
    names = [g.name for g in overspill.torch.find_groups(models.small())]
    layers = [f"model.layers.{i}" for i in range(3)]
    assert names == ["model.embed_tokens", *layers, "model.norm", "lm_head"]
    tied = overspill.torch.find_groups(models.small(tied=True))[-1]
    assert tied.name == "lm_head" and not tied.parameters and len(tied.shared) == 1
    chosen = overspill.torch.find_groups(models.small(), [r"model\.layers\.\d+\.mlp", "lm_head"])
    assert "model.layers.0.mlp" in [g.name for g in chosen]
    assert sum(len(g.parameters) for g in chosen) == len(list(models.small().parameters()))
