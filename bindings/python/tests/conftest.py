"""Places that tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.fixture
def data() -> Path:
    """The committed examples, tokenizer and goldens."""
    return TESTS / "data"


@pytest.fixture
def shared_data() -> Path:
    """Test data beside the repository, or in OVERSPILL_TEST_DATA; skips without."""
    given = os.environ.get("OVERSPILL_TEST_DATA")
    folder = Path(given) if given else TESTS.parents[2].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no test data in {folder}; set OVERSPILL_TEST_DATA to its folder")
    return folder
