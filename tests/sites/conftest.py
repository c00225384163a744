"""Data of sites."""

from __future__ import annotations

from pathlib import Path

import pytest

from direct_sites import split_arrays


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    split_arrays(tmp_path)
    return tmp_path
