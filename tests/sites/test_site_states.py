"""The states on a site's disk: what is written is read back, damage is noticed, what may be needed is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedadc.errors import RunDamaged
from fedadc.sites.site_states import SiteStates


def state(value: float) -> dict[str, torch.Tensor]:
    return {"h": torch.full((3,), value), "n": torch.tensor([7, 8])}


def test_states_are_read_back_by_another_process_and_replaced_by_round(tmp_path: Path) -> None:
    states = SiteStates(tmp_path / "states")
    assert len(states) == 0 and 3 not in states and states.get(3) is None
    states[3], states[5] = state(3), state(5)
    states[5] = state(6)
    again = SiteStates(tmp_path / "states")
    assert (
        list(again) == [3, 5]
        and torch.equal(again[5]["h"], state(6)["h"])
        and torch.equal(again[3]["n"], state(3)["n"])
    )
    assert len(list((tmp_path / "states").iterdir())) == 2


def test_damage_is_noticed(tmp_path: Path) -> None:
    states = SiteStates(tmp_path)
    states[1] = state(1)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunDamaged, match=r"round-00000001-.* is damaged"):
        states[1]


@pytest.mark.parametrize(
    ("oldest", "kept"), [(0, [2, 4, 9]), (1, [2, 4, 9]), (2, [2, 4, 9]), (4, [4, 9]), (8, [4, 9]), (9, [9])]
)
def test_the_state_that_counted_in_the_oldest_checkpoint_is_kept(oldest: int, kept: list[int], tmp_path: Path) -> None:
    states = SiteStates(tmp_path)
    for round in (2, 4, 9):
        states[round] = state(round)
    states.forget(oldest)
    assert list(states) == kept
