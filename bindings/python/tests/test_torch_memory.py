"""A paged run's peak resident set is lower than plain PyTorch's by what moved to files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

PROGRAM = Path(__file__).with_name("memory_program.py")


def run(kind: str, folder: Path, length: int = 48) -> dict[str, Any]:
    arguments = [sys.executable, str(PROGRAM), kind, str(folder), str(length)]
    # glibc would keep memory that was freed in pieces, which hides who needs how much.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"} if length > 48 else None
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
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


def test_peak_memory_is_lower_by_the_activations_in_files(tmp_path: Path) -> None:
    run("make", tmp_path)
    paged, spilled = run("paged", tmp_path, 512), run("spilled", tmp_path, 512)
    assert spilled["losses"] == paged["losses"]
    moved = spilled["saved"] / 3 - (64 << 20)  # a step's, less the store's host memory
    assert moved > 100 << 20
    assert paged["peak"] - spilled["peak"] > 0.8 * moved, (paged, spilled)
