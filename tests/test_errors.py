"""Error messages: one printable line of limited length."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedadc.errors import FedadcError, article, require_file, unknown
from fedadc.objectives import Objective


@given(st.text(alphabet=st.characters(), max_size=50))
def test_any_text_becomes_one_printable_line(text: str) -> None:
    shown = str(FedadcError(text))
    assert shown.isprintable() and len(shown.splitlines()) <= 1
    shown.encode("utf-8")
    assert shown == text or not text.isprintable()
    assert str(pickle.loads(pickle.dumps(FedadcError(text)))) == shown


def test_line_breaks_and_control_characters_are_escaped() -> None:
    assert str(FedadcError("a\n\x1b[2J\udcff.")) == r"a\n\x1b[2J\udcff."


def test_a_long_message_and_a_long_list_are_shortened() -> None:
    assert len(str(FedadcError("x" * 10**6))) < 2100
    message = str(unknown("column", "?", map(str, range(1000))))
    assert message.endswith("and 960 more.") and len(message) < 300


@pytest.mark.parametrize(
    ("name", "choices", "hint"),
    [
        ("schedulse", ["schedules", "selections"], "did you mean 'schedules'?"),
        ("rl", ["lr", "clip"], "did you mean 'lr'?"),  # other order
        ("labels", ["labels_per_client", "name"], "did you mean 'labels_per_client'?"),  # a beginning
        ("fed", ["fedprox", "fedopt"], "choose from: fedopt, fedprox."),
        ("fedfoo", ["fedprox", "fedopt"], "choose from: fedopt, fedprox."),
        ("ensembles", ["schedules", "selections"], "choose from: schedules, selections."),
        ("beta", [], "there are no others."),
    ],
)
def test_only_similar_names_are_suggested(name: str, choices: list[str], hint: str) -> None:
    assert str(unknown("key", name, choices)) == f"key '{name}' is unknown; {hint}"


def test_articles_fit_the_names_of_types() -> None:
    assert [article(kind) for kind in (int, str, Objective)] == ["an int", "a str", "an Objective"]


def test_require_file_accepts_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    require_file(tmp_path / "file", "data")
    require_file(tmp_path / "link", "data")
    for name, words in {
        "pipe": "is not a file",
        ".": "is not a file",
        "loop": "there is no file",
        "none": "there is no file",
        "x" * 300: "cannot be read .File name too long",
        "\0": "there is no file",
    }.items():
        with pytest.raises(FedadcError, match=f"data: .*{words}|data: {words}"):
            require_file(tmp_path / name, "data")
