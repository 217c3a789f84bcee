"""A paged run's peak resident set is lower than plain PyTorch's by what moved to files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

PROGRAM = Path(__file__).with_name("memory_program.py")


def run(kind: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), kind, str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_peak_memory_is_lower_by_what_the_plan_moved(tmp_path: Path) -> None:
    run("make", tmp_path)
    plain, paged = run("plain", tmp_path), run("paged", tmp_path)
    assert paged["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    saved = plain["peak"] - paged["peak"]
    # What the engine keeps in memory takes the place of some of it.
    assert saved > 0.9 * paged["moved"] - paged["kept"], (plain, paged)
    assert saved > 0
