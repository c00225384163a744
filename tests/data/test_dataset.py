"""Data sets: their short descriptions, and what is known of them without any sample."""

from __future__ import annotations

import numpy as np
import torch

from fedadc.data import Clients, Normalization, from_arrays
from fedadc.data.dataset import DataSpec

X = np.zeros((6, 1, 2, 3), dtype=np.uint8)


def test_a_data_set_is_printed_in_one_line() -> None:
    pooled = from_arrays(X, [0, 1, 2, 0, 1, 2], (X[:2], [0, 1]), name="tiny")
    assert repr(pooled) == "Dataset(tiny, 6 train, 2 test, shape 1×2×3, 3 classes)"
    natural = from_arrays(X, [0, 1] * 3, owners=list("aabbcc"), name="tiny")
    assert repr(natural) == "Dataset(tiny, 6 train, natural clients, shape 1×2×3, 2 classes)"


def test_samples_and_clients_are_printed_in_one_line() -> None:
    assert repr(from_arrays(X, [0, 1] * 3).train) == "Samples(6 of shape 1×2×3)"
    assert repr(Clients.from_owner(np.arange(2000) % 4, 4)) == "Clients(4 with 2,000 samples)"


def test_the_spec_is_the_same_for_any_samples_of_a_data_set() -> None:
    data = from_arrays(X, list("abcabc"))
    expected = DataSpec((1, 2, 3), torch.uint8, ("a", "b", "c"), Normalization(255.0))
    assert data.spec == expected == from_arrays(X[:3] + 1, list("cba")).spec
