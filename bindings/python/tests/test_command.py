"""Plans and benchmarks by the command, and the files that runs write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import overspill
from overspill.trace import busy_seconds

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000,
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def command() -> str:
    try:
        return overspill.command_path()
    except overspill.CommandError as error:
        pytest.skip(str(error))


def test_plan_and_trace(command: str, tmp_path: Path) -> None:
    assert command
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    settings = {"sequence_len": 128, "offload.device_memory": "256MiB",
                "offload.host_memory": "512MiB"}  # fmt: skip
    forecast = overspill.plan(tmp_path / "config.json", settings=settings, advice=False)
    assert isinstance(forecast, dict) and forecast


def test_a_plan_that_cannot_fit_says_why(command: str, tmp_path: Path) -> None:
    assert command
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 513}))
    with pytest.raises(overspill.CommandError, match="513"):
        overspill.plan(tmp_path / "config.json", advice=False)


def test_bench(command: str) -> None:
    assert command
    result = overspill.bench("copy", quick=True, arguments=["--seconds", "0.01"])
    assert isinstance(result, dict) and result


def test_metrics_leave_out_an_unfinished_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2}\n{"st')
    assert [m["step"] for m in overspill.read_metrics(tmp_path)] == [1, 2]


def test_traces(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "pid": 1, "tid": 3, "name": "thread_name", "args": {"name": "nvme_read"}},
        {"ph": "X", "pid": 1, "tid": 3, "ts": 2000.0, "dur": 500.0, "name": "b", "args": {"op": 1}},
        {"ph": "X", "pid": 1, "tid": 3, "ts": 1000.0, "dur": 250.0, "name": "a"},
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    first, second = overspill.read_trace(tmp_path / "trace.json")
    assert (first.name, first.lane, first.start, first.end) == ("a", "nvme_read", 1e-3, 1.25e-3)
    assert second.arguments == {"op": 1}
    assert busy_seconds([first, second]) == {"nvme_read": pytest.approx(0.75e-3)}
