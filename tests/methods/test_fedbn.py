"""FedBN: against a loop in plain torch, and what must hold of clients' own BatchNorm layers."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedadc
from conftest import small_federation
from fedadc.config.build import build_agreement, build_coordinator, build_module, complete, prepare
from fedadc.data import Roster
from fedadc.data.batches import shuffled
from fedadc.engines import Remote
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import FedAvg, FedBN, Method
from fedadc.models import MLP, FlatModel
from fedadc.objectives import GlobalDistillation
from fedadc.optimizers import Adam, AdamW
from fedadc.rng import generator
from fedadc.runs.record import load_config
from fedadc.training import Client, train
from fedadc.views.local_work import LocalWork

WORK = LocalWork(epochs=2, batch_size=4, lr=0.2, weight_decay=0.05, clip=0.5, momentum=0.6)
SEED = 5
OWN = """
from torch import nn

def net(input_shape, classes, width: int = 6):
    layers = [nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes)]
    return nn.Sequential(*layers)
"""
CONFIG: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "digits", "clients": 6, "partition": {"name": "sort", "labels_per_client": 3}},
    "model": {"name": "mine:net", "head": "4"},
    "method": "fedbn",
    "local": {"steps": 3, "batch_size": 8, "lr": 0.1, "momentum": 0.5},
    "cohort": {"size": 3},
}


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """BatchNorm in the middle and at the end, one without weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.BatchNorm1d(7, momentum=0.3), nn.ReLU(), nn.Linear(7, 6)]
    return nn.Sequential(*layers, nn.BatchNorm1d(6, affine=False), nn.ReLU(), nn.Linear(6, 4)).to(dtype)


def federation(method: Method, model: nn.Module, work: LocalWork = WORK, **kw: Any) -> Federation:
    settings: dict[str, Any] = {"cohort": 3, "seed": SEED, "data": small_federation(), **kw}
    return Federation(model=model, method=method, local=work, **settings)


def is_norm(name: str) -> bool:
    return name.startswith(("1.", "4."))


class PlainLoop:
    """FedBN on state dicts, with torch's own layers and optimizer."""

    def __init__(self, made: Federation, optimizer: Any = None) -> None:
        self.made, self.module = made, network()
        self.optimizer = optimizer or partial(torch.optim.SGD, lr=0.2, momentum=0.6, weight_decay=0.05)
        self.shared = {n: v.clone() for n, v in self.module.state_dict().items() if not is_norm(n)}
        norms = {n: v.clone() for n, v in self.module.state_dict().items() if is_norm(n)}
        self.own = {k: copy.deepcopy(norms) for k in range(len(made.clients))}

    def round(self, t: int, cohort: tuple[int, ...]) -> None:
        ends = [self.trained(t, k) for k in cohort]
        self.shared = {n: torch.stack([end[n] for end in ends]).mean(0) for n in self.shared}

    def trained(self, t: int, k: int) -> dict[str, Tensor]:
        samples = [self.made.data.train.x[self.made.clients[k]], self.made.data.train.y[self.made.clients[k]]]
        self.module.load_state_dict({**self.shared, **self.own[k]})
        self.module.train()
        optimizer = self.optimizer(self.module.parameters())
        for batch in shuffled(len(samples[1]), 4, None, 2, generator(SEED, "batches", t, k)):
            optimizer.zero_grad()
            F.cross_entropy(self.module(samples[0][batch]), samples[1][batch]).backward()
            norm = torch.sqrt(sum((p.grad**2).sum() for p in self.module.parameters()))
            for p in self.module.parameters():
                p.grad *= min(1.0, 0.5 / float(norm))
            optimizer.step()
        end = {n: v.clone() for n, v in self.module.state_dict().items()}
        self.own[k] = {n: end[n] for n in self.own[k]}
        return end

    def predict(self, k: int, x: Tensor) -> Tensor:
        self.module.load_state_dict({**self.shared, **self.own[k]})
        self.module.eval()
        return self.module(x).detach()


def no_batch_of_one() -> Any:
    """Clients with 8 samples, except two with 7 and 6."""
    rng = np.random.default_rng(2)
    sizes = [8, 7, 6, 8, 8]
    clients = [(rng.normal(size=(n, 5)) + k, rng.integers(4, size=n)) for k, n in enumerate(sizes)]
    return fedadc.from_clients(clients, test=(rng.normal(size=(30, 5)), np.arange(30) % 4))


@pytest.mark.parametrize("optimizer", [None, Adam, AdamW])
def test_fedbn_is_a_loop_in_plain_torch(optimizer: Any) -> None:
    """Several rounds, with weight decay, clipping and moments, none of which touches running statistics."""
    work, theirs = WORK, None
    if optimizer is not None:
        work = replace(WORK, momentum=0.0, lr=0.05, optimizer=optimizer(eps=0.1))
        theirs = partial(getattr(torch.optim, optimizer.__name__), lr=0.05, eps=0.1, weight_decay=0.05)
    made = federation(FedBN(), network(), work, data=no_batch_of_one())
    plain, x = PlainLoop(made, theirs), torch.randn(9, 5, dtype=torch.float64)
    initial = made.start().theta[made.model.part("batch_norm")].clone()
    for done in made.rounds(4):
        plain.round(done.round, done.cohort)
        found = made.model.state_dict(done.state.theta)
        for name, value in plain.shared.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)
        for k in range(len(made.clients)):  # also those that were never selected
            torch.testing.assert_close(made.predict(done.state, x, client=k), plain.predict(k, x), rtol=0, atol=1e-10)
        assert torch.equal(done.state.theta[made.model.part("batch_norm")], initial)
    means = [own["batch_norm"][:7] for own in done.state.clients.values()]
    assert all(float((mean - means[0]).abs().max()) > 0.1 for mean in means[1:])


def test_without_batch_norm_it_is_fedavg() -> None:
    """Bit for bit."""
    torch.manual_seed(0)
    module = MLP((5,), 4, hidden=[7]).double()
    for a, b in zip(*(federation(m, module).rounds(4) for m in (FedBN(), FedAvg())), strict=True):
        assert torch.equal(a.state.theta, b.state.theta) and a.train_loss == b.train_loss


def test_the_clients_own_models_are_evaluated_with_their_own_statistics() -> None:
    made = federation(FedBN(), network(), data=no_batch_of_one())
    state = list(made.rounds(3))[-1].state
    test, shares, right = made.data.test, made.local_tests, 0
    assert test is not None
    for k in range(len(made.clients)):
        own = made.predict(state, test.x[shares[k]], client=k)
        right += int((own.argmax(1) == test.y[shares[k]]).sum())
    metrics = made.evaluate(state)
    assert metrics["personal_accuracy"] == right / 30 and "test_accuracy" not in metrics


class Twice(nn.Module):
    """One BatchNorm under two names, a head that comes first, a frozen layer, and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.norm = nn.Linear(4, 3), nn.BatchNorm2d(4)
        self.again, self.convolution = self.norm, nn.Conv2d(1, 4, 3, bias=False)
        self.last = nn.Conv2d(4, 4, 3).requires_grad_(False)

    def embed(self, x: Tensor) -> Tensor:
        pixels: Tensor = self.again(self.last(self.norm(self.convolution(x))))
        return pixels.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Twice, lambda: network(torch.float32)])
def test_theta_has_the_layers_in_order_and_gives_the_state_dict_back(make: Any) -> None:
    module = make()
    with torch.no_grad():
        for number, (name, value) in enumerate(module.state_dict().items()):
            if "tracked" not in name:
                value.fill_(number)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    flat = FlatModel(module, norms_first=True)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    statistics = {n: v for n, v in before.items() if "running" in n and not n.startswith("again")}
    size = sum(v.numel() for v in statistics.values())
    assert flat.theta.numel() == trained + size
    assert torch.equal(flat.theta[flat.part("statistics")], torch.cat(list(statistics.values())))
    assert flat.part("batch_norm").stop == flat.part("without_batch_norm").start == size + (8 if make is Twice else 14)
    theta = torch.arange(flat.theta.numel(), dtype=torch.float32)
    state = flat.state_dict(theta)
    assert list(state) == list(before)
    flat.load_state_dict(state, "test")
    assert torch.equal(flat.theta, theta)
    for copied in (copy.deepcopy(flat), pickle.loads(pickle.dumps(flat))):
        assert torch.equal(copied.theta, theta) and copied.part("batch_norm") == flat.part("batch_norm")
    if make is Twice:
        assert torch.equal(state["again.running_var"], state["norm.running_var"])
        assert flat.part("head") == slice(flat.theta.numel() - 15, None) and "last.weight" in flat.fixed()


def configured(folder: Path, **changes: Any) -> Any:
    (folder / "mine.py").write_text(OWN)
    return load_config({**CONFIG, **changes}, folder=folder)


def test_same_bits_from_workers_sites_and_any_round(tmp_path: Path) -> None:
    """Processes of this machine, clients that get bytes only, and a run that goes on from its second round."""
    config = complete(configured(tmp_path))
    plan = prepare(config)
    rounds = list(plan.federation.rounds(3))
    expected = rounds[-1].state
    again = list(plan.federation.rounds(3, start=rounds[1].state))[-1].state
    spread = prepare(config, workers=2).federation
    worked = list(spread.rounds(3))[-1].state
    data, clients = plan.federation.data, plan.federation.clients
    agreement = build_agreement(config, data.spec)
    sites = [Client(agreement, k, data.train.take(clients[k])) for k in range(6)]
    coordinator = build_coordinator(config, build_agreement(config, data.spec), Roster(clients.sizes))
    engine = Remote(coordinator.agreement, lambda tasks: (sites[k].answer(task) for k, task in tasks))
    remote = list(train(coordinator, engine.run, 3, coordinator.start()))[-1].state
    assert all(torch.equal(state.theta, expected.theta) for state in (again, worked, remote))
    for k, own in expected.clients.items():
        for state in (again.clients[k], worked.clients[k], sites[k].states[max(sites[k].states)]):
            assert torch.equal(state["batch_norm"], own["batch_norm"])


def test_a_run_is_resumed_and_its_personal_models_are_whole(tmp_path: Path) -> None:
    """Paused, resumed and never paused are the same; a client's file and the initial layers are its own model."""
    config = configured(tmp_path)
    whole = fedadc.run(config, out=tmp_path / "whole")
    fedadc.run(config, out=tmp_path / "paused", until=2)
    resumed = fedadc.resume(tmp_path / "paused", trust=True)
    assert torch.equal(whole.state.theta, resumed.state.theta)
    fedadc.personalize(tmp_path / "whole", trust=True)
    made, client = whole.plan.federation, next(iter(whole.state.clients))
    module = build_module(whole.plan.config, made.data.spec)[1].eval()
    module.load_state_dict(fedadc.personal.personal_state_dict(tmp_path / "whole", client, "own"))
    x = made.data.train.x[:7]
    inputs = made.agreement.client_data(made.data.train.take(np.arange(7))).in_order(None, 7)
    logits = module(next(iter(inputs)).x).detach()
    torch.testing.assert_close(logits, made.predict(whole.state, x.numpy(), client=client), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": FedAvg()}, "use GroupNorm instead, or method fedbn"),
        ({"model": nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, momentum=None)).double()}, "momentum=None"),
        ({"method": FedBN(objective=GlobalDistillation())}, "shares no BatchNorm layers"),
        ({"work": LocalWork(epochs=1, batch_size=1)}, "no variance for BatchNorm, and client 0 would train on one"),
        ({"work": LocalWork(epochs=1, batch_size=7)}, "and client 0 would train on one"),
    ],
)
def test_what_cannot_work_is_refused(change: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {"method": FedBN(), "model": network(), "data": no_batch_of_one(), **change}
    with pytest.raises(FedadcError, match=words):
        federation(**settings)


def test_batches_of_one_image_are_accepted_where_a_layer_has_many_pixels() -> None:
    x = torch.randn(9, 1, 8, 8)
    data = fedadc.from_clients([(x, torch.arange(9) % 3)] * 2, test=(x, torch.arange(9) % 3))
    made = federation(FedBN(), Twice(), LocalWork(epochs=1, batch_size=4), data=data, cohort=None)
    assert torch.isfinite(list(made.rounds(2))[-1].state.theta).all()


def test_without_batch_norm_the_warning_says_by_what_the_run_is_judged(caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    work = LocalWork(steps=2, batch_size=4, lr=0.1)
    made = Federation(model=plain, data=small_federation(), method=FedBN(), local=work, cohort=2)
    assert "it trains as fedavg does, but it is still judged by personal figures only" in caplog.text
    metrics = next(iter(made.rounds(1))).metrics
    assert "personal_accuracy" in metrics and "test_accuracy" not in metrics
