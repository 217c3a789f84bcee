"""The example of docs/python.md runs as it is, on a small model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from overspill.prepare.cli import main  # noqa: E402

EXAMPLE = Path(__file__).parents[1] / "examples" / "finetune.py"


def test_fine_tuning(tmp_path: Path, data: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    options = ["--tokenizer", str(data), "--sequence-len", "128", "--packing", "one", "--quiet"]
    assert main([str(data / "chat.jsonl"), "-o", str(tmp_path / "data"), "-j", "1", *options]) == 0
    tokens, swap, out = (tmp_path / p for p in ("data/train.tokens", "swap", "out"))
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path / "model"), str(tokens), str(swap), str(out)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
    trained = transformers.LlamaForCausalLM.from_pretrained(out)
    assert not torch.equal(trained.lm_head.weight.float(), model.lm_head.weight.float())
