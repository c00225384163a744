"""Figures by name as values: as a DataFrame, if pandas is there, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedadc.errors import FedadcError, kind_of_failure, one_line, require, unknown
from fedadc.system.files import require_new_file, write_text


def frame(rows: list[dict[str, Any]], index: str) -> Any:
    """A DataFrame of these rows, whose index is one of their columns."""
    try:
        import pandas
    except ImportError as error:
        raise FedadcError("a DataFrame needs pandas; install it with `pip install 'fedadc[pandas]'`.") from error
    return pandas.DataFrame.from_records(rows, index=index) if rows else pandas.DataFrame()


class FigureTable(dict[str, dict[str, Any]]):
    """Figures of clients or classes: name -> figure -> value; None where a figure is not defined."""

    def __init__(self, kind: str, rows: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(rows)
        self.kind = kind

    def __missing__(self, name: str) -> dict[str, Any]:
        raise unknown(self.kind, name, self)

    def rows(self) -> list[dict[str, Any]]:
        """A row for every name; the first column is what is named."""
        return [{self.kind: name, **figures} for name, figures in self.items()]

    def to_frame(self) -> Any:
        """The figures as a DataFrame, indexed by name."""
        return frame(self.rows(), self.kind)

    def write_csv(self, path: Path, overwrite: bool = False) -> None:
        """Save the rows as CSV; a figure that is not defined is an empty field. An existing file is kept."""
        require_new_file(path, "out", overwrite)
        require(path.suffix.lower() in ("", ".csv"), f"out: {path.name} should end in .csv.")
        text = io.StringIO()
        names = dict.fromkeys(name for row in self.rows() for name in row)
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows())
        try:
            write_text(path, text.getvalue())
        except OSError as error:
            raise kind_of_failure(error)(f"{path} cannot be written ({one_line(error)}).") from error


class History(list[dict[str, Any]]):
    """The records of a run's rounds, as in metrics.jsonl."""

    def to_pandas(self) -> Any:
        """The records as a DataFrame, indexed by round."""
        return frame(list(self), "round")
