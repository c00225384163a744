"""Confusion matrices in the terminal say what the counts are, and fit its window."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedadc.analysis.confusion import plot_confusion
from fedadc.cli.evaluation_output import confusion_matrix, evaluation_tables, out
from fedadc.errors import FedadcError
from fedadc.evaluation.fairness import owner_of_rows
from fedadc.evaluation.report import Owners
from fedadc.runs.evaluate import evaluate
from fedadc.runs.runner import run


def matrix(classes: int, largest: int = 900) -> np.ndarray:
    rng = np.random.default_rng(classes)
    return np.diag(rng.integers(1, largest, size=classes)) + rng.poisson(0.4, size=(classes, classes))


def shown(confusion: np.ndarray, capsys: pytest.CaptureFixture[str]) -> list[str]:
    names = [f"a long name of class {number}" for number in range(len(confusion))]
    confusion_matrix(confusion, names)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= out.width
    return lines


@pytest.mark.parametrize("classes", [2, 3, 10, 12])
def test_counts_where_they_fit(classes: int, capsys: pytest.CaptureFixture[str]) -> None:
    confusion = matrix(classes)
    head, numbers, *rows = shown(confusion, capsys)
    assert head.endswith("; rows") and numbers.split() == [str(c) for c in range(classes)]
    for number, line in enumerate(rows):
        assert line.split()[0] == str(number)
        cells = [0 if cell == "·" else int(cell) for cell in line.split()[-classes:]]
        assert cells == confusion[number].tolist()


@pytest.mark.parametrize("classes", [16, 20])
def test_percent_of_the_labels_rows_where_counts_are_too_wide(classes: int, capsys: pytest.CaptureFixture[str]) -> None:
    confusion = matrix(classes)
    confusion[3] = 0  # a class without rows
    confusion[4] = np.eye(classes, dtype=int)[4] * 5  # and one that is always right
    head, _, *rows, _ = shown(confusion, capsys)
    assert head.endswith("; % of the label's rows")
    for number, line in enumerate(rows):
        cells = [line[-3 * (classes - c) : len(line) - 3 * (classes - c - 1)].strip() for c in range(classes)]
        for cell, count in zip(cells, confusion[number].tolist(), strict=True):
            share = 100 * count / max(1, confusion[number].sum())
            assert cell == "·" if count == 0 else cell == "<" if share < 0.5 else abs(int(cell) - share) <= 1
    all_right = [c for c in range(classes) if confusion[c, c] == confusion[c].sum() > 0]
    assert 4 in all_right and [c for c, line in enumerate(rows) if "100" in line] == all_right


def test_pairs_where_no_matrix_fits(capsys: pytest.CaptureFixture[str]) -> None:
    confusion = np.diag(np.full(40, 90))
    confusion[7, 3], confusion[1, 30] = 10, 5
    text = "\n".join(shown(confusion, capsys))
    assert text.index("class 7") < text.index("class 30") and "10.0 %" in text and "5.3 %" in text
    assert "40 classes are too many" in text


@pytest.mark.parametrize("classes", [2, 24, 25, 61])
def test_the_picture_has_any_number_of_classes(classes: int, tmp_path: Path) -> None:
    file = tmp_path / "c.png"
    plot_confusion(matrix(classes), [f"$name_{number}$ and more words" for number in range(classes)], file, "a $title")
    with Image.open(file) as image:
        assert image.format == "PNG" and min(image.size) > 300
    with pytest.raises(FedadcError, match="3 classes do not match"):
        plot_confusion(matrix(2), ["a", "b", "c"], file)


def test_of_many_clients_the_worst_and_the_best_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = {
        "rounds": 1, "data": {"name": "digits", "clients": 60}, "model": {"name": "mlp", "hidden": [8]},
        "local": {"steps": 8, "batch_size": 16},
    }  # fmt: skip
    run(tree, out=tmp_path / "run")
    result = evaluate(tmp_path / "run", by="client")
    evaluation_tables(result, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in lines if line[:2].strip().isdigit() or line[:3].strip().isdigit()]
    accuracies = sorted(figures["accuracy"] for figures in result.per_client.values())
    assert [words[2] for words in shown] == [f"{a:.3f}" for a in (*accuracies[:10], *accuracies[-10:])]
    assert "best of 60" in " ".join(lines) and len(result.per_client) == 60


def test_clients_in_the_order_of_the_federation_then_by_name() -> None:
    owners = Owners.of(["b", "z", "a", "b", "c"], order=("c", "b", "x"))
    assert owners.names == ("c", "b", "a", "z") and [own.tolist() for own in owners.rows] == [[4], [0, 3], [2], [1]]
    assert owner_of_rows(owners.shares, 6).tolist() == [1, 3, 2, 1, 0, -1]
