"""The optional parts: all of them install together, and none is needed to import the package."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires, version

import pytest

EXTRAS = ["sweep", "ray", "flower", "pandas"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_installed_beside_the_others(extra: str) -> None:
    """`make setup` installs all of them into one environment."""
    wanted = [line for line in requires("fedadc") or () if f'extra == "{extra}"' in line.replace("'", '"')]
    assert wanted
    for line in wanted:
        version(re.split(r"[\s<>=!;\[]", line)[0])  # an error if it is not installed


def test_what_is_installed_fits_together() -> None:
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
