"""Client selection: cohorts depend on the seed and the round alone, and invalid cohorts are refused."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import small_federation
from fedadc.config.build import prepare
from fedadc.data import dataset
from fedadc.data.dataset import Array
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import FedADC, Method, Scaffold
from fedadc.models import MLP
from fedadc.rng import generator
from fedadc.runs.record import load_config
from fedadc.runs.runner import run
from fedadc.selections import SELECTIONS, Chooser, Selection, Uniform, cohort_of


def no_labels() -> Array:
    raise AssertionError("uniform selection asked for labels")


def test_uniform_cohorts_are_uniform() -> None:
    """All 10 cohorts of 2 among 5, about equally often (chi-square, 9 degrees of freedom, p about 1e-4)."""
    choose = Uniform().chooser(5, 2, no_labels, generator(0, "selection"))
    draws = Counter(tuple(cohort_of(choose(generator(0, "cohort", t)), 5, 2, "")) for t in range(4000))
    assert len(draws) == 10
    assert sum((n - 400) ** 2 / 400 for n in draws.values()) < 34


def test_cohort_of_a_million_is_cheap_and_fixed_in_size() -> None:
    choose = Uniform().chooser(1_000_000, 10, no_labels, generator(0, "selection"))
    assert len(set(choose(generator(0, "cohort", 1)).tolist())) == 10


@dataclass(frozen=True, kw_only=True)
class Wrong(Selection):
    """A user-defined selection that returns an invalid cohort."""

    cohort: tuple[float, ...] = ()

    def chooser(self, clients: int, size: int, label_counts: Callable[[], Array], rng: np.random.Generator) -> Chooser:
        return lambda _: np.array(self.cohort)


@pytest.mark.parametrize("cohort", [(0, 1), (0, 1, 1), (0, 1, 99), (-1, 0, 1), (0.0, 1.0, 2.0), ()])
def test_an_invalid_cohort_is_refused(cohort: tuple[float, ...]) -> None:
    federation = Federation(model=MLP((5,), 4, [6]), data=small_federation(), cohort=3, selection=Wrong(cohort=cohort))
    with pytest.raises(FedadcError, match="Wrong must choose 3 different clients"):
        next(federation.rounds(1))


def test_cohorts_can_be_computed_in_advance() -> None:
    torch.manual_seed(0)
    federation = Federation(model=MLP((5,), 4, [6]), data=small_federation(), cohort=3)
    ahead = [set(federation.coordinator.select(t).tolist()) for t in (1, 2, 3)]
    assert [set(result.cohort) for result in federation.rounds(3)] == ahead


def easy() -> Array:
    """Label counts of 12 clients, each of which holds every class."""
    return np.random.default_rng(0).integers(1, 9, size=(12, 4))


@pytest.mark.parametrize("size", [1, 5, 11, 12])
@pytest.mark.parametrize("name", SELECTIONS)
def test_a_cohort_depends_on_the_rounds_generator_alone(name: str, size: int) -> None:
    def cohorts(choose: Chooser, rounds: Iterable[int]) -> list[list[int]]:
        return [cohort_of(choose(generator(3, "cohort", t)), 12, size, name).tolist() for t in rounds]

    one, other = (SELECTIONS[name]().chooser(12, size, easy, generator(3, "selection")) for _ in range(2))
    drawn = cohorts(one, range(40))
    assert len({tuple(cohort) for cohort in drawn}) == 1 if size == 12 else len({tuple(c) for c in drawn}) > 8
    assert cohorts(other, reversed(range(40))) == drawn[::-1]
    assert cohorts(pickle.loads(pickle.dumps(one)), range(40)) == drawn


def federation(selection: Selection, method: Method | None = None, workers: int = 0, cohort: int = 3) -> Federation:
    torch.manual_seed(0)
    return Federation(
        model=MLP((5,), 4, [6]),
        data=small_federation(),
        cohort=cohort,
        selection=selection,
        method=method,
        workers=workers,
        seed=5,
    )


@pytest.mark.parametrize("name", SELECTIONS)
def test_selection_knows_neither_method_nor_workers_nor_where_a_run_began(name: str) -> None:
    rule = SELECTIONS[name]()
    first = list(federation(rule).rounds(6))
    cohorts = [set(result.cohort) for result in first]
    for method in (FedADC(beta=0.5), Scaffold()):
        assert [set(result.cohort) for result in federation(rule, method).rounds(3)] == cohorts[:3]
    again = pickle.loads(pickle.dumps(federation(rule)))
    assert [set(again.coordinator.select(t).tolist()) for t in range(1, 7)] == cohorts
    assert [set(r.cohort) for r in federation(rule).rounds(6, start=first[2].state)] == cohorts[3:]
    busy = federation(rule, workers=2)
    try:
        assert [set(result.cohort) for result in busy.rounds(3)] == cohorts[:3]
    finally:
        busy.close()


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_resumed_run_has_the_same_cohorts(name: str, tmp_path: Path) -> None:
    config = {
        "rounds": 4,
        "data": {"name": "digits", "clients": 30, "partition": {"name": "sort", "labels_per_client": 2}},
        "model": {"name": "mlp", "hidden": [8]},
        "local": {"steps": 1, "batch_size": 8},
        "cohort": {"size": 8, "selection": name},
        "evaluate": {"every": 4},
    }
    whole = run(config, out=tmp_path / "whole")
    run(config, ["rounds=2"], out=tmp_path / "parts")
    parts = run(config, out=tmp_path / "parts", resume=True)
    assert [r["cohort"] for r in parts.history] == [r["cohort"] for r in whole.history]
    assert (tmp_path / "parts/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_a_covering_run_covers_and_another_selection_is_another_run(tmp_path: Path) -> None:
    data = {"name": "digits", "clients": 30, "partition": {"name": "sort", "labels_per_client": 2}}
    config = {"rounds": 3, "data": data, "model": {"name": "mlp", "hidden": [8]}, "local": {"steps": 1}}
    covering = {**config, "cohort": {"size": 6, "selection": {"name": "covering", "reports": "classes"}}}
    result = run(covering, out=tmp_path / "run")
    labels = federation_labels(covering)
    assert all(labels[record["cohort"]].any(axis=0).all() for record in result.history)
    with pytest.raises(FedadcError, match=r"started with other settings: cohort\.selection\.reports classes"):
        run(covering, ["rounds=5", "cohort.selection.reports=histograms"], out=tmp_path / "run", resume=True)


def federation_labels(config: dict[str, object]) -> Array:
    """Which classes the clients of a config hold."""
    prepared = prepare(load_config(config)).federation
    return prepared.clients.class_counts(prepared.data.train.y, len(prepared.data.classes)) > 0


def test_a_federation_that_cannot_cover_is_refused_before_training() -> None:
    data = {"name": "digits", "clients": 30, "partition": {"name": "sort", "labels_per_client": 2}}
    config = {"rounds": 3, "data": data, "model": {"name": "mlp"}, "cohort": {"size": 4, "selection": "covering"}}
    with pytest.raises(FedadcError, match=r"no cohort of 4 clients holds all classes: .* hold at most 8, not 10"):
        prepare(load_config(config))


def test_label_counts_of_many_clients_are_counted_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, y = federation(Uniform()).clients, small_federation().train.y
    whole = clients.class_counts(y, 4)
    assert (whole == [np.bincount(y.numpy()[clients[k]], minlength=4) for k in range(len(clients))]).all()
    for block in (1, 2, 4, 6, 7):
        monkeypatch.setattr(dataset, "CLIENTS_PER_BLOCK", block)
        assert (clients.class_counts(y, 4) == whole).all()
