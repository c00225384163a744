"""Workers that are killed for real: others take their place, the result is the same, and the event is recorded."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import slow, small_federation
from family import eventually, linux, workers_alive
from fedadc.config.build import prepare
from fedadc.engines.pool import MOST_DEATHS
from fedadc.engines.workers import Workers
from fedadc.errors import FedadcError
from fedadc.evaluation.metrics import Evaluation
from fedadc.federation import Federation
from fedadc.methods import METHODS, FedAvg, FedDyn, Method
from fedadc.models import MLP
from fedadc.runs.directory import RunDirectory
from fedadc.runs.record import load_config
from fedadc.runs.runner import execute
from fedadc.views.local_work import LocalWork
from snapshots import CONFIG

pytestmark = linux


def federation(method: Method, workers: int, **kw: Any) -> Federation:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "model": MLP((5,), 4, [6]).double(),
        "data": small_federation(clients=20),
        "local": LocalWork(epochs=2, batch_size=4, lr=0.1),
    }
    return Federation(method=method, workers=workers, **{**settings, **kw})


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    yield
    eventually(lambda: not workers_alive(), 5)


def outcome(stream: Any) -> tuple[Any, ...]:
    rounds = list(stream)
    last = rounds[-1].state
    clients = {k: {n: v.tolist() for n, v in state.items()} for k, state in last.clients.items()}
    records = [(r.train_loss, r.metrics, r.cohort, r.bytes_up) for r in rounds]
    return last.theta.tolist(), {n: v.tolist() for n, v in last.server.items()}, clients, records


@dataclass(frozen=True, kw_only=True)
class KillsItsWorkerOnce(FedAvg):
    """Some clients end the process that trains them, the first time."""

    marks: str

    def finish(self, theta: Any, local: Any) -> Any:
        mark = Path(self.marks) / f"{int(local.data.indices[0])}"
        if int(local.data.indices[0]) % 3 == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().finish(theta, local)


@dataclass(frozen=True, kw_only=True)
class KillsItsWorkerOnceWithAState(KillsItsWorkerOnce, FedDyn):
    pass


@pytest.mark.parametrize(("method", "same"), [(KillsItsWorkerOnce, FedAvg()), (KillsItsWorkerOnceWithAState, FedDyn())])
@pytest.mark.parametrize("workers", [slow(1), 3])
def test_clients_of_a_killed_worker_run_again(
    method: Any, same: Method, workers: int, tmp_path: Path, caplog: Any
) -> None:
    trained = federation(method(marks=str(tmp_path)), workers)
    rounds = list(trained.rounds(3))
    trained.close()
    assert outcome(iter(rounds)) == outcome(federation(same, 0).rounds(3))
    marks = len(list(tmp_path.iterdir()))
    assert marks > 2, "nobody was killed"
    events = [event for r in rounds for event in r.events]
    assert len(events) == marks == sum("was killed by SIGKILL in round 1, client" in e for e in events)
    assert caplog.messages == events


@pytest.mark.parametrize("name", ["fedadc", "scaffold"])
@pytest.mark.parametrize("overlap", [False, True])
def test_workers_killed_at_any_moment_change_nothing(name: str, overlap: bool) -> None:
    """Idle, training or counting, from outside, again and again."""
    method, evaluation = METHODS[name](), Evaluation(batch_size=3, overlap=overlap)
    trained = federation(method, 2, evaluate=evaluation)
    kills, ended, rounds = 0, threading.Event(), []
    moments = random.Random(0)

    def killer() -> None:
        nonlocal kills
        seen = -1
        while not ended.wait(moments.uniform(0, 0.05)):
            alive = sorted(workers_alive())
            if len(rounds) == seen or not alive:
                continue  # one kill a round at most: three over one client would end the run
            seen = len(rounds)
            os.kill(moments.choice(alive), signal.SIGKILL)
            kills += 1

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        for result in trained.rounds(400):
            rounds.append(result)
            if kills >= 8:
                break
    finally:
        ended.set()
        thread.join()
        trained.close()
    assert sum(len(r.events) for r in rounds) >= 4
    again = federation(method, 0, evaluate=evaluation).rounds(400)
    assert outcome(iter(rounds)) == outcome(next(again) for _ in rounds)


def test_all_workers_killed_while_idle_are_replaced() -> None:
    trained = federation(FedAvg(), 3)
    stream = trained.rounds(2)
    first = next(stream)
    for worker in workers_alive():
        os.kill(worker, signal.SIGKILL)
    second = next(stream)
    trained.close()
    assert outcome(iter([first, second])) == outcome(federation(FedAvg(), 0).rounds(2))
    assert len(second.events) == 3


class AlwaysDies(FedAvg):
    """Client 4 needs more memory than there is, as the system's killer of processes sees it."""

    def step(self, theta: Any, grad: Any, local: Any) -> Any:
        if len(local.data) == 7 + 3 * 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(theta, grad, local)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_client_that_kills_every_worker_ends_the_run_with_a_reason(workers: int) -> None:
    trained = federation(AlwaysDies(), workers, cohort=None)
    with pytest.raises(FedadcError, match=r"processes died .* by SIGKILL in round 1, client .*\b4\b.*fewer `workers`"):
        list(trained.rounds(2))
    assert isinstance(trained.engine, Workers) and len(trained.engine.take_events()) == MOST_DEATHS - 1


@dataclass(frozen=True, kw_only=True)
class DiesOnceTold(FedAvg):
    mark: str

    def step(self, theta: Any, grad: Any, local: Any) -> Any:
        if Path(self.mark).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(theta, grad, local)


def test_repeated_death_ends_a_run_with_a_checkpoint_from_which_it_goes_on(tmp_path: Path) -> None:
    config = load_config({**CONFIG, "checkpoint": {"every": 1000}})
    config = replace(config, method=DiesOnceTold(mark=str(tmp_path / "m")))
    plan, said = prepare(config, out=tmp_path / "a", workers=2), []

    def watch(record: dict[str, Any]) -> None:
        if record["round"] == 3:
            (tmp_path / "m").touch()

    with pytest.raises(FedadcError, match="worker processes died one after another"):
        execute(plan, RunDirectory.create(tmp_path / "a", plan, {}), watch, said.append)
    assert "is saved at round 3 of 6; resume it with `fedadc resume" in said[-1]
    (tmp_path / "m").unlink()
    assert len(execute(plan, RunDirectory.reopen(tmp_path / "a", plan, {}, said.append)).history) == 6


def test_the_server_of_the_workers_may_die_too() -> None:
    from multiprocessing import forkserver

    trained = federation(FedAvg(), 2)
    stream = trained.rounds(2)
    first = next(stream)
    family = workers_alive()
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
    for worker in family:
        os.kill(worker, signal.SIGKILL)
    assert outcome(iter([first, next(stream)])) == outcome(federation(FedAvg(), 0).rounds(2))
    trained.close()
