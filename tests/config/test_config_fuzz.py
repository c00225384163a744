"""Any config works or is rejected with a FedadcError of one sentence; no other exception is raised."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedadc.config.build import prepare
from fedadc.config.starter import STARTER
from fedadc.config.yaml import parse_yaml
from fedadc.errors import FedadcError
from fedadc.runs.record import load_config

VALID: dict[str, Any] = yaml.safe_load(STARTER)
VALID["data"]["augment"] = {"crop": 1, "flip": True}
VALID["local"]["schedule"] = {"name": "cosine", "final": 0.1}
VALID["evaluate"]["metrics"] = ["top5", "macro_f1"]
WORDS = [
    *("name", "seed", "rounds", "path", "test", "validation", "clients", "lr", "beta", "lam", "objective", "method"),
    *("fedavg", "slowmo", "fedadc", "fedadc_double", "fedadc+", "self_confidence", "cross_entropy", "received"),
    *("digits", "npz", "folder", "csv", "mlp", "logistic", "cnn", "resnet18", "sort", "iid", "dirichlet", "natural"),
    *("pooled", "step", "constant", "exponential", "os:path", "os:getcwd", "nowhere:x", ":", "a:", "..:b", "\0:c"),
    *("", ".", "/", "~", "missing.npz", "\0", "None", "nan", "1e5", "kaiming", "samples", "é\u2028", "options"),
]
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-3, 12)
    | st.sampled_from([10**18, 2**63, -(2**63), 10**30, 10**400])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.sampled_from([0.0, 0.5, 1.0, 1e-300, 1e300])
    | st.sampled_from(WORDS)
    | st.text(max_size=8)
    | st.dates()
    | st.datetimes()
    | st.binary(max_size=4)
    | st.sampled_from([(1, 2), {"a"}, 1j, b"", object])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def nodes(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every node below the root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from nodes(value, (*at, key))


def values_of_the_same_type(value: Any) -> st.SearchStrategy[Any]:
    """Values of the same type as a node, so that the config passes the type checks and more code is reached."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers(0, 12) | st.sampled_from([10**18, 10**30])
    if isinstance(value, float):
        return st.floats(0, 1) | st.floats()
    return st.sampled_from(WORDS) if isinstance(value, str) else values


@st.composite
def mutated(draw: st.DrawFn, keep_types: bool = False) -> dict[str, Any]:
    """A valid config with up to three nodes replaced, deleted or added."""
    tree = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        paths = list(nodes(tree))
        if not paths:
            break
        *above, last = draw(st.sampled_from(paths))
        node: Any = tree
        for key in above:
            node = node[key]
        what = draw(st.sampled_from(["replace", "replace", "delete", "add"]))
        if what == "replace":
            node[last] = draw(values_of_the_same_type(node[last]) if keep_types else values)
        elif what == "delete":
            del node[last]
        elif isinstance(node, dict):
            node[draw(st.sampled_from(WORDS) | st.text(max_size=6) | st.integers() | st.none())] = draw(values)
    return tree


def check_message(error: FedadcError) -> None:
    assert str(error).strip() and "Traceback" not in str(error)


@given(mutated())
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@example({**VALID, "method": "fedadc+", "objective": None})
@example({**VALID, "rounds": 10**400})
def test_any_tree_loads_or_is_refused(tree: dict[str, Any]) -> None:
    before = repr(tree)
    try:
        config = load_config(tree)
    except FedadcError as error:
        check_message(error)
    else:
        assert load_config(config.tree(), folder=config.folder) == config or "nan" in before
    assert repr(tree) == before, "a caller's mapping is not changed"


def modest(config: Any) -> bool:
    """True if the config needs little memory; huge widths are tested in test_config.py."""
    numbers = [v for o in config.model.options.values() for v in (o if isinstance(o, list) else [o])]
    small = all(not isinstance(n, int | float) or abs(n) <= 64 or abs(n) >= 1e15 or n != n for n in numbers)
    return small and config.data.augment.crop <= 12


@given(mutated(keep_types=True))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@example({**VALID, "model": {"name": "mlp", "hidden": [10**30]}})
@example({**VALID, "model": {"name": "mlp", "hidden": {"a": [None]}}})
@example({**VALID, "data": {"name": "digits", "clients": 10**400}})
@example({**VALID, "data": {"name": "npz", "path": "\0"}})
def test_any_config_that_loads_can_be_prepared_or_is_refused(tree: dict[str, Any]) -> None:
    try:
        config = load_config(tree)
        if modest(config):
            again = prepare(config).config
            assert load_config(again.tree()) == again or "nan" in repr(tree)
    except FedadcError as error:
        check_message(error)


TEXT = st.text(max_size=60) | st.text(alphabet=" \n\t-:{}[],&*!|>'\"#%@`?~0.1e_+abtrn<=", max_size=60)


@given(TEXT | TEXT.map(lambda t: STARTER + t) | st.tuples(TEXT, st.integers(0, len(STARTER))).map(
    lambda pair: STARTER[: pair[1]] + pair[0] + STARTER[pair[1] :]))  # fmt: skip
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_any_text_loads_or_is_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8", errors="replace")
        try:
            load_config(path)
        except FedadcError as error:
            check_message(error)


PIECES = st.sampled_from(
    [
        *(
            "rounds: ",
            "data: ",
            "  name: ",
            "- ",
            "{",
            "}",
            "[",
            "]",
            ", ",
            ": ",
            "\n",
            "? ",
            "a",
            "k: 1",
            "~",
            "=",
            "'",
        ),
        *(
            "<<: ",
            "&a ",
            "*a",
            "&b ",
            "*b",
            '"',
            "|\n",
            "\t",
            "\ufeff",
            "\x85",
            "\u2028",
            "! ",
            "!e!x ",
            "%TAG ! x",
            "---\n",
        ),
        *("!!python/object/apply:os.system ", "!!python/name:os.system ", "!!binary ", "!!timestamp ", "!!set "),
        *(
            "!!int ",
            "!!float ",
            "!!bool ",
            "!!null ",
            "!!merge ",
            "!!str ",
            "!!pairs ",
            "!!omap ",
            "0b2",
            "0o8",
            ".inf",
        ),
        *("2001-01-01", "2001-99-99", "2001-12-14t21:59:43.10-05:00", "1:30:30", "0x" + "f" * 5000, "1_000"),
        *("1" * 5000, "1e400", "-1e-400", ".inf", "=", "'", "%TAG ! x", "---\n"),
    ]
)


@given(st.lists(PIECES, max_size=14).map("".join))
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@example("a: &a {k: 1}\nb: &a {<<: [*a, *a], <<: *a}\nc: {<<: *a}\n")
@example("? [a, b]\n: 1")
@example("? {a: 1}\n: 1")
@example("&a [*a]")
@example("<<: &a {<<: *a}")
@example("<<: 1")
@example("rounds: !!int ''")
@example("rounds: !!python/object/new:os.system [echo]")
def test_any_pieces_of_yaml_load_or_are_refused(text: str) -> None:
    for load in (lambda: parse_yaml(text, "text"), lambda: load_config(VALID, [f"local={text}"])):
        try:
            load()
        except FedadcError as error:
            check_message(error)
            assert str(error).isprintable() and len(str(error)) < 2100


def test_a_mapping_that_was_merged_before_it_was_built_has_no_key_twice() -> None:
    tree = parse_yaml("x: {y: &b {<<: {k: 1}, k: 2}}\nc: {<<: *b}\n", "text")
    assert tree == {"x": {"y": {"k": 2}}, "c": {"k": 2}}


@given(st.binary(max_size=80))
def test_any_bytes_load_or_are_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_bytes(content)
        with pytest.raises(FedadcError):
            load_config(path)


@given(
    st.lists(st.text(max_size=12) | TEXT.map(lambda t: f"local.lr={t}") | TEXT.map(lambda t: f"method={t}"), max_size=3)
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_any_override_works_or_is_refused(overrides: list[str]) -> None:
    try:
        load_config(VALID, overrides)
    except FedadcError as error:
        check_message(error)
