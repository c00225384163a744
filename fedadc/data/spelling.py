"""How fields are read: what is missing, what is a number, and when two names are one.

- Missing is missing everywhere: in features, labels and clients. An empty field always is.
- A number has one spelling: `1`, `1.0`, `+1` and ` 1 ` are `1`, as a label, a client or a category. Leading zeros and
  exponents are kept, because `007` and `2E3` may be names.
- Names that differ only in case, blanks or leading zeros are almost always one name. They are refused, or merged if the
  settings say so; the name is then the first of them in the order of the alphabet.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from fedadc.errors import DataError
from fedadc.fields.settings import Settings

MISSING = ("", "na", "n/a", "#n/a", "nan", "<na>", "null", "none", "?")  # in any case
MAX_MAGNITUDE = 1e30  # larger values would overflow in float32 arithmetic
DECIMAL = re.compile(r"([+-]?)(0|[1-9][0-9]*)(?:\.([0-9]*))?")
PLAIN = re.compile(r"[^\W\d]([\w .%()/+-]*[\w%)])?")  # names that YAML reads as they are
NO_TEXTS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")  # in YAML, without quotes
EXACT_BELOW = 2**53  # integers below are exact in float64


def number(text: str) -> float:
    """The number that a field contains; NaN if it contains none, or one that is too large."""
    try:
        value = float(text)
    except ValueError:
        return np.nan
    return value if abs(value) <= MAX_MAGNITUDE and "_" not in text else np.nan


def no_number(text: str) -> str:
    """What is wrong with a field that should be a number, as the end of a sentence."""
    try:
        large = MAX_MAGNITUDE < abs(float(text)) < inf
    except ValueError:
        large = False
    return f"too large (at most {MAX_MAGNITUDE:g}); list it in missing if it marks a gap" if large else "not a number"


def number_name(value: float) -> str:
    """The one spelling of a number that was read from a field."""
    return str(int(value)) if value == int(value) and abs(value) < EXACT_BELOW else repr(value)


def clean(text: str) -> str:
    """A text without blanks around it, whose accents are parts of their letters: some systems write them apart."""
    return unicodedata.normalize("NFC", text.strip())


def spelled(text: str) -> str:
    """A name without blanks around it, and in the one spelling if it is a number."""
    text = clean(text)
    match = DECIMAL.fullmatch(text)
    if match is None:
        return text
    fraction = (match[3] or "").rstrip("0")
    digits = f"{match[2]}.{fraction}" if fraction else match[2]
    return digits if match[1] != "-" or digits == "0" else f"-{digits}"


def likeness(name: str) -> str:
    """What names have in common that differ only in case, blanks or leading zeros."""
    key = "".join(name.casefold().split())
    return key.lstrip("0") or "0" if key.isascii() and key.isdigit() else key


def as_yaml(name: str) -> str:
    """A name as it can be pasted into a config: with quotes unless it is plain."""
    plain = PLAIN.fullmatch(name) and name.lower() not in NO_TEXTS
    return name if plain else json.dumps(name, ensure_ascii=False)


@dataclass(frozen=True)
class Spelling(Settings):
    """What counts as missing, and whether names that look alike are one."""

    missing: tuple[str | float, ...] = MISSING
    merge_names: bool = False

    @cached_property
    def _missing(self) -> frozenset[str]:
        listed = (text if isinstance(text, str) else number_name(float(text)) for text in self.missing)
        return frozenset({spelled(text).lower() for text in listed} | {""})

    @property
    def in_lower_case(self) -> list[str]:
        """The spellings of missing values, sorted."""
        return sorted(self._missing)

    @cached_property
    def missing_numbers(self) -> tuple[float, ...]:
        """The numbers that stand for a missing value."""
        found = {number(text) for text in self._missing}
        return tuple(sorted(value for value in found if value == value))

    def is_missing(self, text: str) -> bool:
        """Whether a field has no value."""
        return spelled(text).lower() in self._missing

    def one_name(self, names: Iterable[str], where: str) -> dict[str, str]:
        """The name that stands for each of these; an error if two look alike and are not to be merged."""
        first: dict[str, str] = {}
        found: dict[str, str] = {}
        for name in sorted(names):
            found[name] = first.setdefault(likeness(name), name)
            if found[name] != name and not self.merge_names:
                raise DataError(
                    f"{where} has {found[name]!r:.60} and {name!r:.60}, which differ only in case, blanks or leading "
                    "zeros; write them alike, or set merge_names: true."
                )
        return found


DEFAULT_SPELLING = Spelling()
