"""The programs in `examples/` run, and show what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from family import linux

EXAMPLES = Path(__file__).parents[1] / "examples"


@linux
@pytest.mark.federation
def test_three_sites() -> None:
    program = [sys.executable, str(EXAMPLES / "three_sites.py")]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=400)
    assert "the model is that of the simulation: True" in done.stdout
    assert all(f",{hospital}," in done.stdout for hospital in ("bern", "lugano", "zug"))
