"""What methods may see: steps and samples of local work, and a setup that says what it has."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from conftest import small_federation
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import FedAvg
from fedadc.models import MLP
from fedadc.views.local_work import LocalWork
from fedadc.views.setup import Setup

SIZES = np.array([3, 10, 25])


def test_steps_and_samples_by_hand() -> None:
    by_steps = LocalWork(steps=4, batch_size=10)
    assert by_steps.count_steps(SIZES).tolist() == [4, 4, 4]
    assert by_steps.count_samples(SIZES, np.array([4, 4, 4])) == 4 * 3 + 4 * 10 + 4 * 10  # a batch is at most the data
    by_epochs = LocalWork(epochs=2, batch_size=10)
    assert by_epochs.count_steps(SIZES).tolist() == [2, 2, 6]
    assert by_epochs.count_samples(SIZES, np.array([2, 2, 6])) == 2 * (3 + 10 + 25)
    assert by_epochs.count_samples(SIZES, np.array([1, 1, 4])) == 3 + 10 + (25 + 10)  # one epoch and a batch


def test_a_setup_has_what_it_says_and_nothing_else() -> None:
    seen: list[Setup] = []

    class Looking(FedAvg):
        def check(self, setup: Setup) -> None:
            seen.append(setup)

    data = small_federation()
    work = LocalWork(steps=2, batch_size=4)
    Federation(model=MLP((5,), 4, hidden=(3,)).double(), data=data, method=Looking(), local=work, weighting="samples")
    (setup,) = seen
    assert setup.local is work and setup.weighting == "samples" and setup.exact_uplink and not setup.resets_theta
    assert setup.client_sizes.tolist() == [7 + 3 * k for k in range(6)] and setup.example.shape == (2, 5)
    with pytest.raises(FedadcError, match=r"check uses setup\.clients, but a Setup has only model, .*resets_theta\."):
        _ = setup.clients
    assert copy.copy(setup) == setup and pickle.loads(pickle.dumps(setup.local)) == work
