"""Any number of worker processes gives the bits of one process; a worker's errors are reported; no process is left."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import small_federation
from family import eventually, linux, workers_alive
from fedadc.errors import FedadcError
from fedadc.evaluation.metrics import Evaluation
from fedadc.federation import Federation
from fedadc.methods import METHODS, FedAvg, Method
from fedadc.models import MLP, FlatModel
from fedadc.objectives import GlobalDistillation, ModelContrast
from fedadc.training.messages import ClientTask, ServerBroadcast
from fedadc.training.state import RunState
from fedadc.views.local_work import LocalWork


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


@pytest.fixture
def nobody_left() -> Iterator[None]:
    before = workers_alive()
    yield
    eventually(lambda: workers_alive() <= before, 5)


@linux
@pytest.mark.usefixtures("nobody_left")
@pytest.mark.parametrize(
    ("method", "kind", "words"),
    [
        (Failing(), RuntimeError, r"round 1, client 0 failed in a worker process:\n.*ZeroDivisionError"),
        (Refusing(), FedadcError, r"^one clear sentence\.\nin round 1, client \d+\nin a worker process:\n.*Traceback"),
        (
            Vanishing(),
            FedadcError,
            r"worker processes died .* ended with exit code 9 in round 1, client \d; if memory",
        ),
    ],
    ids=["bug", "refusal", "death"],
)
def test_what_goes_wrong_in_a_worker_is_told(method: Method, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"(?s){words}"):
        list(federation(method, 2).rounds(2))


def test_what_goes_wrong_in_this_process_is_told_too() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        list(federation(Failing(), 0).rounds(1))
    assert caught.value.__notes__ == ["in round 1, client 0"]


@linux
@pytest.mark.usefixtures("nobody_left")
def test_a_stream_that_is_let_go_ends_its_workers() -> None:
    trained = federation(FedAvg(), 2)
    stream = trained.rounds(1000)
    next(stream)
    assert len(workers_alive()) == 2
    trained.close()
    first = next(trained.rounds(1)).state.theta  # and they come back
    trained.close()
    assert torch.equal(first, next(federation(FedAvg(), 0).rounds(1)).state.theta)


def thetas(trained: Federation, *starts: RunState) -> list[list[float]]:
    """The first round from each start, then all of them side by side for another."""
    streams = [trained.rounds(2, start=start) for start in starts]
    found = [next(stream).state.theta.tolist() for stream in streams]
    return found + [next(stream).state.theta.tolist() for stream in streams]


def test_workers_train_from_what_is_published_now() -> None:
    """Not from what they had in a round of the same number."""

    def outcome(workers: int) -> list[list[float]]:
        trained = federation(METHODS["fedadc"](), workers)
        start = trained.start()
        other = replace(start, theta=3 * start.theta, server={"m": start.theta})
        found = thetas(trained, start, other)
        trained.close()
        return found

    assert outcome(2) == outcome(0)


def test_workers_have_the_weights_that_are_loaded_meanwhile() -> None:
    """Also those that are not trained."""

    def outcome(workers: int) -> list[float]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)).double()
        module[0].requires_grad_(False)
        trained = Federation(model=module, data=small_federation(), workers=workers)
        next(trained.rounds(1))
        trained.load_state_dict({k: 5 * v for k, v in module.state_dict().items()}, "a test")
        theta: list[float] = next(trained.rounds(1)).state.theta.tolist()
        trained.close()
        return theta

    assert outcome(2) == outcome(0)


class Keeps(FedAvg):
    """A user's method whose clients keep something although it never said so."""

    def begin(self, local: Any) -> Any:
        return local.client.get("mine", local.start)

    def finish(self, theta: Any, local: Any) -> Any:
        return super().finish(theta, local)[0], {"mine": theta.clone()}


class Grows(FedAvg):
    """A user's method whose clients keep more and more."""

    def client_state(self, theta: Any) -> Any:
        return {"log": theta[:1]}

    def finish(self, theta: Any, local: Any) -> Any:
        return super().finish(theta, local)[0], {"log": torch.cat([local.client["log"], theta.repeat(1000)])}


@pytest.mark.parametrize("method", [Keeps(), Grows()], ids=["unannounced", "growing"])
def test_any_states_travel(method: Method) -> None:
    def outcome(workers: int) -> tuple[list[float], dict[int, Any]]:
        torch.manual_seed(0)
        trained = Federation(
            model=MLP((5,), 4, [6]).double(), data=small_federation(clients=20), method=method, workers=workers
        )
        last = list(trained.rounds(3))[-1].state
        trained.close()
        return last.theta.tolist(), {k: {n: v.tolist() for n, v in s.items()} for k, s in last.clients.items()}

    alone = outcome(0)
    assert outcome(1) == alone and outcome(2) == alone


class Restless(MLP):
    """Random even when it is evaluated, as a forgotten `training=self.training` makes it."""

    def forward(self, x: Any) -> Any:
        return super().forward(torch.nn.functional.dropout(x, 0.5))


def test_a_model_that_is_random_in_evaluation_is_so_everywhere_alike() -> None:
    def outcome(workers: int) -> list[Any]:
        torch.manual_seed(0)
        evaluation = Evaluation(batch_size=6)
        trained = Federation(
            model=Restless((5,), 4, [6]).double(), data=small_federation(), evaluate=evaluation, workers=workers
        )
        metrics = [r.metrics for r in trained.rounds(2)]
        trained.close()
        return metrics

    assert outcome(3) == outcome(0)


def test_the_users_settings_of_torch_change_no_bit() -> None:
    alone = outcome(FedAvg(), 0)
    torch.set_float32_matmul_precision("medium")
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    try:
        assert outcome(FedAvg(), 0) == alone
        assert torch.get_float32_matmul_precision() == "medium" and not torch._C._get_mkldnn_enabled()
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.set_flags(True)  # type: ignore[no-untyped-call]


def test_two_rounds_at_once_are_refused() -> None:
    trained = federation(FedAvg(), 1)
    orders = [ClientTask(k, 1) for k in range(4)]
    broadcast = ServerBroadcast(1, 0.1, trained.start().theta, {}, 1.0)
    first = trained.engine.run(broadcast, orders, {})
    next(first)
    with pytest.raises(FedadcError, match="one round at a time"):
        next(trained.engine.run(broadcast, orders, {}))
    trained.close()


def test_a_daemonic_process_is_told_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(FedadcError, match="workers=0"):
        federation(FedAvg(), 1)


def test_a_model_travels_without_the_whole_vector_for_each_of_its_layers() -> None:
    flat = FlatModel(MLP((50,), 10, [50] * 10))
    assert len(pickle.dumps(flat)) < 1.5 * flat.theta.numel() * 4
