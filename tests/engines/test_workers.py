"""Any number of worker processes gives the bits of one process; what goes wrong in a worker is told; nobody is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import small_federation
from fedadc.errors import FedadcError
from fedadc.federation.federation import Federation
from fedadc.federation.local import LocalWork
from fedadc.methods import METHODS, FedAvg, Method
from fedadc.models import MLP
from fedadc.objectives import GlobalDistillation, ModelContrast


def federation(method: Method, workers: int, **kw: Any) -> Federation:
    torch.manual_seed(0)
    module = MLP((5,), 4, [6], projection=3).double()
    work = LocalWork(epochs=2, batch_size=4, lr=0.1)
    return Federation(model=module, data=small_federation(), method=method, local=work, cohort=4, workers=workers, **kw)


def outcome(method: Method, workers: int) -> tuple[Any, ...]:
    trained = federation(method, workers)
    rounds = list(trained.rounds(3))
    trained.close()
    last = rounds[-1].state
    clients = {k: {n: v.tolist() for n, v in state.items()} for k, state in last.clients.items()}
    server = {n: v.tolist() for n, v in last.server.items()}
    return last.theta.tolist(), server, clients, [r.metrics for r in rounds], [r.train_loss for r in rounds]


@pytest.mark.parametrize(
    "method",
    [*(METHODS[name]() for name in ("fedadc", "feddyn", "scaffold", "fedadam", "local_only")),
     FedAvg(objective=ModelContrast()), FedAvg(objective=GlobalDistillation(window=3))],
    ids=lambda m: type(m).__name__ + type(m.objective).__name__,
)  # fmt: skip
def test_workers_give_the_bits_of_one_process(method: Method) -> None:
    alone = outcome(method, 0)
    assert outcome(method, 1) == alone and outcome(method, 3) == alone


class Failing(FedAvg):
    def step(self, theta: Any, grad: Any, local: Any) -> Any:
        return theta if local.data.indices[0] else 1 / 0


class Refusing(FedAvg):
    def step(self, theta: Any, grad: Any, local: Any) -> Any:
        raise FedadcError("one clear sentence.")


class Vanishing(FedAvg):
    def step(self, theta: Any, grad: Any, local: Any) -> Any:
        os._exit(9)


def alive() -> list[int]:
    return [int(p) for p in Path("/proc/self/task").joinpath(str(os.getpid()), "children").read_text().split()]


@pytest.fixture
def nobody_left() -> Iterator[None]:
    before = set(alive())
    yield
    assert set(alive()) - before <= {p for p in alive() if "resource_tracker" in Path(f"/proc/{p}/cmdline").read_text()}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux tells who a process's children are")
@pytest.mark.usefixtures("nobody_left")
@pytest.mark.parametrize(
    ("method", "kind", "words"),
    [
        (Failing(), RuntimeError, r"round 1, client 0 failed in a worker process:\n.*ZeroDivisionError"),
        (Refusing(), FedadcError, r"^one clear sentence\.$"),
        (Vanishing(), FedadcError, r"ended by itself \(exit code 9\)"),
    ],
    ids=["bug", "refusal", "death"],
)
def test_what_goes_wrong_in_a_worker_is_told(method: Method, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"(?s){words}"):
        list(federation(method, 2).rounds(2))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux tells who a process's children are")
@pytest.mark.usefixtures("nobody_left")
def test_a_stream_that_is_let_go_ends_its_workers() -> None:
    trained = federation(FedAvg(), 2)
    stream = trained.rounds(1000)
    next(stream)
    assert len(alive()) >= 2
    trained.close()
    first = next(trained.rounds(1)).state.theta  # and they come back
    trained.close()
    assert torch.equal(first, next(federation(FedAvg(), 0).rounds(1)).state.theta)
