"""What a sweep searches: the notation of lists and ranges, grids, corners and edges."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedadc.errors import FedadcError
from fedadc.studies.space import (
    ValueList,
    ValueRange,
    corners,
    described,
    edges,
    grid,
    one_after_another,
    parse_searches,
    read_space,
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("local.lr=0.01,0.1", (0.01, 0.1)),
        ("local.lr=1e-3, 5", (1e-3, 5)),
        ("model.hidden=[8],[16,16]", ([8], [16, 16])),
        ("data.partition=iid,{name: dirichlet, alpha: 0.3}", ("iid", {"name": "dirichlet", "alpha": 0.3})),
        ("method=mine:Class,fedadc+", ("mine:Class", "fedadc+")),
        ("local.clip=null,1.0", (None, 1.0)),
        ("method.nesterov=true,false", (True, False)),
        ("local.steps=1,true", (1, True)),  # equal in Python, and not the same
        ("data.path=../a.csv,../b.csv", ("../a.csv", "../b.csv")),
        ("data.clients=10", (10,)),
        ("label='a,b',c", ("a,b", "c")),
    ],
)
def test_values_are_separated_by_commas_and_a_bracketed_list_is_one(text: str, values: tuple[Any, ...]) -> None:
    (found,) = read_space(parse_searches([text]))
    assert isinstance(found, ValueList) and found.key == text.partition("=")[0]
    assert repr(found.values) == repr(values)  # types too
    assert read_space({found.key: found.written}) == [found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.001..1,log", ValueRange("k", 0.001, 1.0, log=True)),
        ("0.1..0.99", ValueRange("k", 0.1, 0.99)),
        ("1..16,int", ValueRange("k", 1, 16, whole=True)),
        ("1..1024,int,log", ValueRange("k", 1, 1024, log=True, whole=True)),
        ("1..1024,log,int", ValueRange("k", 1, 1024, log=True, whole=True)),
        ("1e-4..1e0, log", ValueRange("k", 1e-4, 1.0, log=True)),
        ("-2..-1", ValueRange("k", -2.0, -1.0)),
    ],
)
def test_ranges_need_no_quotes(text: str, expected: ValueRange) -> None:
    (found,) = read_space({"k": text})
    assert found == expected and read_space({"k": found.written}) == [found]
    assert isinstance(found, ValueRange) and type(found.low) is (int if expected.whole else float)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a="], r"a has no values; write e\.g\. a=0\.01,0\.1"),
        (["a=1,1"], "a has the value 1 twice"),
        (["a=1,1.0"], "a has the value 1.0 twice"),
        (["a=[8],[8]"], r"a has the value \[8\] twice"),
        (["a=1..1"], r"the range 1\.0\.\.1\.0 needs a low end below"),
        (["a=2..1,int"], r"the range 2\.\.1,int needs a low end below"),
        (["a=0..1,log"], "needs a low end above 0 for log"),
        (["a=-1..1,log"], "needs a low end above 0 for log"),
        (["a=0.5..2,int"], "needs whole numbers at both ends for int"),
        (["a=0..1e999"], "needs a low end below"),
        (["a=1..x"], "is not a range; write LOW"),
        (["a=.1...5"], "is not a range; write LOW"),  # or is it from .1 to 5?
        (["a=1..2,linear"], "is not a range; write LOW"),
        (["a=[1"], "the list of values of a.* is not valid YAML"),
        (["a=1,,2"], "the list of values of a.* is not valid YAML"),
        (["a"], "'a' is not a key with its values"),
        (["=1,2"], "is not a key with its values"),
        (["a..b=1"], "not a key such as"),
        (["a=1", "a=2"], "a is given twice"),
        (["seed=0,1"], "seed is not swept"),
        ([], "there is nothing to sweep"),
    ],
)
def test_bad_lists_and_ranges_are_refused_in_one_sentence(texts: list[str], words: str) -> None:
    with pytest.raises(FedadcError, match=words) as caught:
        read_space(parse_searches(texts))
    assert str(caught.value).endswith(".")


def test_values_of_python_are_plain_values() -> None:
    import numpy as np

    (found,) = read_space({"model.hidden": [(8,), np.int64(3)]})
    assert isinstance(found, ValueList) and found.values == ([8], 3) and type(found.values[1]) is int
    with pytest.raises(FedadcError, match=r"model\.hidden must be a plain value"):
        read_space({"model.hidden": [object()]})


def test_a_grid_has_all_combinations_and_needs_lists() -> None:
    space = read_space({"a": [1, 2], "b": ["x", [3]], "c": 5})
    assert grid(space) == [{"a": a, "b": b, "c": 5} for a in (1, 2) for b in ("x", [3])]
    with pytest.raises(FedadcError, match="b is a range, and a grid needs values"):
        grid(read_space({"a": [1], "b": "0..1"}))
    with pytest.raises(FedadcError, match="the grid has 1000000 settings"):
        grid(read_space({key: list(range(100)) for key in "abc"}))


def test_corners_are_the_ends_of_ranges() -> None:
    space = read_space({"a": "1..4,int", "b": ["x", "y", "z"]})
    assert list(corners(space)) == [{"a": a, "b": b} for a in (1, 4) for b in "xyz"]
    first = {"a": 1, "b": "x"}
    some = [first, {**first, "a": 4}, {**first, "b": "y"}, {**first, "b": "z"}]
    assert list(corners(space, most=5)) == list(one_after_another(space)) == some


@pytest.mark.parametrize(
    ("given", "value", "side"),
    [
        ([0.1, 0.3, 0.2], 0.3, "larger"),
        ([0.1, 0.3, 0.2], 0.1, "smaller"),
        ([0.1, 0.3, 0.2], 0.2, None),
        ([1, 2], 2, "larger"),
        ([0.1], 0.1, None),  # nothing was swept
        (["a", "b"], "a", None),  # no order
        ([True, False], True, None),
        ([[8], [16]], [16], None),
        ("0.001..1,log", 0.0011, "smaller"),
        ("0.001..1,log", 0.002, None),  # close by its value, not by its logarithm
        ("0.001..1,log", 0.9, "larger"),
        ("0..1", 0.96, "larger"),
        ("0..1", 0.94, None),
        ("1..100,int", 2, None),
        ("1..100,int", 100, "larger"),
    ],
)
def test_a_value_at_the_edge_is_named(given: Any, value: Any, side: str | None) -> None:
    found = edges(read_space({"local.lr": given}), {"local.lr": value})
    assert len(found) == (side is not None)
    if side is not None:
        kind = "grid" if isinstance(given, list) else "range"
        assert f"the best local.lr, {value}, stands at the edge of its {kind}, " in found[0]
        assert found[0].endswith(f"try {side} values")


def test_positions_in_a_range() -> None:
    log = ValueRange("k", 0.01, 1.0, log=True)
    assert log.position(0.1) == pytest.approx(0.5) and log.at(0.5) == pytest.approx(0.1)
    assert ValueRange("k", 2.0, 4.0).at(0.25) == 2.5
    assert math.isclose(log.at(log.position(0.37)), 0.37)


def test_points_are_described_shortly() -> None:
    point = {"local.lr": 0.0123456, "method.beta": 0.9, "model.name": "mlp", "model.hidden": [8, 8], "local.clip": None}
    assert described(point) == "lr=0.01235 beta=0.9 model=mlp hidden=[8, 8] clip=null"
