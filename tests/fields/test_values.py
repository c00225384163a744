"""One value against its annotation: what is accepted, what it becomes, and in which words the rest is refused."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

from fedadc.errors import FedadcError
from fedadc.fields.values import leaf

ACCEPTED: list[tuple[Any, Any, Any]] = [  # annotation, value, what it becomes
    (int, 5, 5),
    (int, 10**30, 10**30),
    (int, np.int64(5), 5),
    (int, np.uint8(5), 5),
    (float, 1, 1.0),
    (float, np.float32(0.5), 0.5),
    (float, np.int32(2), 2.0),
    (float | None, None, None),
    (bool, np.bool_(True), True),
    (str, Path("a/b"), "a/b"),
    (str, date(2020, 1, 2), "2020-01-02"),
    (Path, "a/b", Path("a/b")),
    (tuple[int, ...], [1, 2], (1, 2)),
    (tuple[float, ...], np.ones(2), (1.0, 1.0)),
    (list[int], (1, 2), [1, 2]),
    (Literal["a", "b"], "a", "a"),
    (Annotated[int, Field(gt=3)], 4, 4),  # an annotation that cannot be the key of a cache
    (float | str, "x", "x"),
    (Any, [1, None], [1, None]),
]


@pytest.mark.parametrize(("hint", "value", "expected"), ACCEPTED, ids=str)
def test_accepted_values(hint: Any, value: Any, expected: Any) -> None:
    found = leaf(hint, value, "x")
    assert found == expected and type(found) is type(expected)


REFUSED: list[tuple[Any, Any, str]] = [  # annotation, value, the whole message
    (int, "5", "x must be a whole number, not '5'."),
    (int, 5.0, "x must be a whole number, not 5.0."),
    (int, True, "x must be a whole number, not True."),
    (int, np.float64(5), "x must be a whole number, not np.float64(5.0)."),
    (int | None, "5", "x must be a whole number, not '5'."),
    (float, True, "x must be a number, not True."),
    (float, np.bool_(True), "x must be a number, not np.True_."),
    (bool, 1, "x must be true or false, not 1."),
    (str, 3, "x must be a text, not 3."),
    (str, None, "x must be a text, not None."),
    (float | str, [1], "x must be a number or a text, not [1]."),
    (tuple[int, ...], "12", "x must be a list, not '12'."),
    (tuple[int, ...], [1, "2"], "x[1] must be a whole number, not '2'."),
    (dict[str, Any], 3, "x must be a mapping of keys, not 3."),
    (Literal["a", "b", "c"], "d", "x must be 'a', 'b' or 'c', not 'd'."),
    (int, {1}, "x must be a plain value, not {1}."),
    (Annotated[int, Field(gt=3)], 3, "x: input should be greater than 3, not 3."),
]


@pytest.mark.parametrize(("hint", "value", "message"), REFUSED, ids=str)
def test_refused_values(hint: Any, value: Any, message: str) -> None:
    with pytest.raises(FedadcError) as caught:
        leaf(hint, value, "x")
    assert str(caught.value) == message


def test_a_message_is_one_short_line_for_any_value() -> None:
    for value in (object(), "x" * 10**6, list(range(10**5)), {"a": {"b": [object()]}}, 10**5000, [[[[]]]] * 99):
        with pytest.raises(FedadcError) as caught:
            leaf(bool, value, "x")
        assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


class Unknown:
    pass


def test_a_type_that_pydantic_does_not_know_is_left_to_its_owner() -> None:
    assert leaf(Unknown, [1], "x") == [1]
