"""Small problems that the tests share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import settings

from commands import SMALL, Answer, Call
from direct_sites import split_arrays
from family import eventually
from fedadc.cli import app as cli
from fedadc.data import Dataset, from_clients
from fedadc.data.dataset import Array
from fedadc.engines.simulated import SimulatedClients
from fedadc.federation import Federation
from fedadc.models.vectors import State
from fedadc.sites.local import environments
from fedadc.training.aggregate import received
from fedadc.training.local import local_update
from fedadc.training.messages import ClientResult, ClientTask, ServerBroadcast

settings.register_profile("suite", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("suite")


def slow(*values: Any) -> Any:
    """A case of a parametrized test that `make test-slow` runs; the others suffice for the suite."""
    return pytest.param(*values, marks=pytest.mark.slow)


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


def numbers_federation(seed: int = 0, clients: int = 6, features: int = 5) -> Dataset:
    """Clients of unequal size with two numbers to predict, in units that differ, in float64."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(features, 2))

    def drawn(n: int, shift: Any) -> tuple[Array, Array]:
        x = rng.normal(size=(n, features)) + shift
        return x, (np.tanh(x @ weights) + 0.1 * rng.normal(size=(n, 2))) * [1000.0, 2.0] + [5000.0, -3.0]

    shares = [drawn(7 + 3 * k, rng.normal(size=features)) for k in range(clients)]
    return from_clients(shares, drawn(20, 0.0), task="regression", targets=["price", "area"])


def steps_of(federation: Federation, clients: Array) -> Array:
    """H of these clients."""
    return federation.agreement.work.count_steps(federation.clients.sizes[clients])


def updated(
    trained: Federation | SimulatedClients,
    round: int,
    lr: float,
    theta: torch.Tensor,
    client: int,
    steps: int,
    server: State | None = None,
    state: State | None = None,
) -> ClientResult:
    """What a client returns, with its upload as the server reads it."""
    simulated = trained.simulated if isinstance(trained, Federation) else trained
    clients, agreement, task = simulated.clients, simulated.agreement, ClientTask(client, steps)
    sent = ServerBroadcast(round, lr, theta, server or {}, len(clients.indices) / len(clients))
    result = local_update(agreement, simulated.data(client), state, sent, task)
    finite = received(agreement, result, 1.0).reports[0].finite
    return replace(result, upload=agreement.decoded(result.upload), finite=finite)


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


@pytest.fixture(autouse=True, scope="session")
def _key_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs with user code are sealed with a key in this folder, not in that of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """`fedadc ...` in this process, in a folder with the config small.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))

    def run(*words: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["fedadc", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.run_command()
        code = caught.value.code
        return Answer(code if isinstance(code, int) else 0 if code is None else 1, *capsys.readouterr())

    return run


@pytest.fixture
def site_arrays(tmp_path: Path) -> Path:
    """A folder with the samples of some sites, in one file and in a file for each."""
    split_arrays(tmp_path)
    return tmp_path


@pytest.fixture
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """All processes that a test has started end, also those that Flower has started."""
    mark = f"FEDADC_TEST={tmp_path}"
    monkeypatch.setenv(*mark.split("=", 1))
    yield
    eventually(lambda: not [pid for pid, environment in environments() if mark in environment and pid != os.getpid()])
