"""What a server knows of its clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedadc.data.roster import Roster
from fedadc.errors import FedadcError


def test_a_roster_has_names_sizes_and_counts_only_if_they_are_reported() -> None:
    roster = Roster([3, 5], ["north", "south"])  # type: ignore[arg-type]
    assert (len(roster), roster.names, roster.mean_samples) == (2, ("north", "south"), 4.0)
    assert repr(roster) == "Roster(2 clients, 8 training samples, without label counts)"
    with pytest.raises(FedadcError, match="label counts, which the clients do not report"):
        roster.label_counts()
    reported = Roster(np.array([3, 5]), None, lambda: np.array([[3, 0], [2, 3]]))
    assert reported.names == ("0", "1") and reported.label_counts().tolist() == [[3, 0], [2, 3]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([],), "at least one client"),
        (([3, 0],), "sizes must be at least 1, not 0"),
        (([3, 4], ["a"]), "2 different names"),
        (([3, 4], ["a", "a"]), "2 different names"),
    ],
)
def test_an_impossible_roster_is_refused(arguments: Any, words: str) -> None:
    with pytest.raises(FedadcError, match=words):
        Roster(*arguments)
