"""The peak of memory of a process, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PEAKS = """
import sys
import numpy as np
from fedadc.system.memory import forget_peak, give_memory_back, peak_memory
before = peak_memory()
many = [np.ones(2_000) for _ in range(12_500)]  # 200 MB in small blocks, which glibc keeps once they are free
high = peak_memory()
kept = np.ones(1)  # at the end of the heap
del many
assert high - before > 180e6, (before, high)
assert peak_memory() >= high
give_memory_back()
forget_peak()
if sys.platform == "linux":
    assert peak_memory() < high - 150e6, (before, high, peak_memory())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell")
def test_a_peak_is_seen_and_forgotten() -> None:
    done = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
