"""Who takes part in a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from conftest import small_federation
from fedadc.data.dataset import Array
from fedadc.errors import FedadcError
from fedadc.federation.federation import Federation
from fedadc.federation.selection import Chooser, Selection, Uniform, cohort_of
from fedadc.models import MLP
from fedadc.rng import generator


def nothing_known() -> Array:
    raise AssertionError("uniform selection asked for labels")


def test_uniform_cohorts_are_uniform() -> None:
    """All 10 cohorts of 2 among 5, about equally often (chi-square, 9 degrees of freedom, p about 1e-4)."""
    choose = Uniform().chooser(5, 2, nothing_known, generator(0, "selection"))
    draws = Counter(tuple(cohort_of(choose(generator(0, "cohort", t)), 5, 2, "")) for t in range(4000))
    assert len(draws) == 10
    assert sum((n - 400) ** 2 / 400 for n in draws.values()) < 34


def test_cohort_of_a_million_is_cheap_and_fixed_in_size() -> None:
    choose = Uniform().chooser(1_000_000, 10, nothing_known, generator(0, "selection"))
    assert len(set(choose(generator(0, "cohort", 1)).tolist())) == 10


@dataclass(frozen=True, kw_only=True)
class Wrong(Selection):
    """Somebody's own, with a mistake."""

    cohort: tuple[float, ...] = ()

    def chooser(self, clients: int, size: int, label_counts: Callable[[], Array], rng: np.random.Generator) -> Chooser:
        return lambda _: np.array(self.cohort)


@pytest.mark.parametrize("cohort", [(0, 1), (0, 1, 1), (0, 1, 99), (-1, 0, 1), (0.0, 1.0, 2.0), ()])
def test_what_is_no_cohort_is_refused(cohort: tuple[float, ...]) -> None:
    federation = Federation(model=MLP((5,), 4, [6]), data=small_federation(), cohort=3, selection=Wrong(cohort=cohort))
    with pytest.raises(FedadcError, match="Wrong must choose 3 different clients"):
        next(federation.rounds(1))


def test_a_cohort_can_be_known_ahead() -> None:
    torch.manual_seed(0)
    federation = Federation(model=MLP((5,), 4, [6]), data=small_federation(), cohort=3)
    ahead = [set(federation.select(t).tolist()) for t in (1, 2, 3)]
    assert [set(result.cohort) for result in federation.rounds(3)] == ahead
