"""Small problems that the tests share."""

from __future__ import annotations

import signal

import numpy as np
import pytest
import torch
from hypothesis import settings

from fedadc.data import Dataset, from_clients

settings.register_profile("suite", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("suite")


def small_federation(seed: int = 0, clients: int = 6, features: int = 5, classes: int = 4) -> Dataset:
    """Clients of unequal size and skewed labels in float64, every class present somewhere."""
    rng = np.random.default_rng(seed)
    shares = []
    for k in range(clients):
        n = 7 + 3 * k
        x = rng.normal(size=(n, features)) + rng.normal(size=features)
        y = rng.choice(classes, size=n, p=rng.dirichlet(np.full(classes, 0.6)))
        y[: min(n, classes)] = np.arange(classes)[: min(n, classes)] if k == 0 else y[: min(n, classes)]
        shares.append((torch.from_numpy(x), torch.from_numpy(y)))
    test = (torch.from_numpy(rng.normal(size=(20, features))), torch.arange(20) % classes)
    return from_clients(shares, test)


@pytest.fixture
def small_data() -> Dataset:
    return small_federation()


@pytest.fixture(autouse=True, scope="session")
def _interrupts_are_heard() -> None:
    """Processes inherit it when a shell in the background ignores Ctrl-C, or nohup SIGHUP; some tests send them."""
    for name, usual in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
