"""Error messages: one printable line of limited length."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedadc.errors import (
    CannotResume,
    DataError,
    DiskError,
    Diverged,
    FedadcError,
    RunDamaged,
    WorkersLost,
    article,
    explained,
    require_file,
    same_kind,
    unknown,
)
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


class Mine(DataError):
    """A user's own subclass, with arguments of its own."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_the_exit_code_follows_from_the_cause() -> None:
    codes = {kind: kind("x").exit_code for kind in (FedadcError, Diverged, DiskError, DataError, WorkersLost)}
    assert list(codes.values()) == [2, 3, 4, 5, 6]
    assert CannotResume("x").exit_code == 2 and RunDamaged("x").exit_code == 5
    for error, kind in {
        PermissionError(13, "Permission denied", "x"): DiskError,
        OSError(28, "No space left on device"): DiskError,
        FileNotFoundError(2, "No such file or directory", "x"): DataError,
        MemoryError(): FedadcError,
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"): FedadcError,
    }.items():
        assert type(explained(error)) is kind, error
    bugs = (ZeroDivisionError(), ConnectionRefusedError(111, "Connection refused"), OSError("no number"))
    assert [explained(error) for error in bugs] == [None] * 3


def test_an_error_of_a_users_own_class_keeps_its_exit_code() -> None:
    error = same_kind(Mine("a", "b"), "other words")
    assert type(error) is DataError and str(error) == "other words"


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
