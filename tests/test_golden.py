"""Short runs give the figures they gave when golden.json was written; with a tolerance, since CPUs differ."""

from __future__ import annotations

import json

import pytest

from fedadc.methods import METHODS, PAIRS
from make_golden import GOLDEN, figures


@pytest.mark.parametrize("method", [*METHODS, *PAIRS])
def test_golden(method: str) -> None:
    expected, found = json.loads(GOLDEN.read_text())[method], figures(method)
    assert found["cohort"] == expected["cohort"]
    for name in ("norm", "train_loss", "test_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-3), name
