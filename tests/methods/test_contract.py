"""The contract that every method fulfills with every objective."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import yaml
from torch.nn.utils import vector_to_parameters

from conftest import small_federation, updated
from family import OBJECTIVES_OF_CLASSES
from fedadc.communication.downlinks import Pull
from fedadc.config.build import prepare
from fedadc.data.batches import Augment
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import METHODS, FedAvg, Method
from fedadc.models import MLP
from fedadc.objectives import OBJECTIVES, CrossEntropy, GlobalDistillation, ModelContrast
from fedadc.runs.record import load_config
from fedadc.runs.runner import run
from fedadc.views.local_work import LocalWork
from fedadc.views.round_info import RoundInfo

WITHOUT_A_GLOBAL_MODEL = ("local_only", "fedper", "fedrep", "fedbn")
REFUSED = [(m, o) for m in WITHOUT_A_GLOBAL_MODEL for o, cls in OBJECTIVES.items() if cls().asks_the_global_model]
PAIRS = [pair for pair in product(METHODS, OBJECTIVES_OF_CLASSES) if pair not in REFUSED]
NO_LOCAL_MOMENTUM = ("fedadc_double", "scaffold", "ditto")
CONFIG: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "digits", "clients": 20, "partition": {"name": "sort", "labels_per_client": 2}},
    "model": {"name": "mlp", "hidden": [16], "projection": 8},  # MOON needs the projection head
    "local": {"steps": 3, "batch_size": 8, "lr": 0.1},
    "cohort": {"size": 5},
}


@pytest.mark.parametrize(("method", "objective"), PAIRS)
def test_runs_on_digits_finite_deterministic_and_counted(method: str, objective: str) -> None:
    config = load_config({**CONFIG, "method": method, "objective": objective})
    first, second = run(config), run(config)
    assert torch.isfinite(first.state.theta).all()
    assert torch.equal(first.state.theta, second.state.theta)
    for a, b in zip(first.history, second.history, strict=True):
        assert {**a, "seconds": 0} == {**b, "seconds": 0}
    traveling = first.plan.federation.agreement.sent_part  # FedPer does not send its head
    vectors = first.state.theta[traveling].numel() * 4 * 5 * METHODS[method].federated
    sent = 1 + len({*METHODS[method].downlink, *OBJECTIVES[objective]().downlink})
    numbers = len(METHODS[method].numbers) * 4 * 5
    assert {r["bytes_up"] for r in first.history} == {vectors * (1 + len(METHODS[method].tracked)) + numbers}
    assert {r["bytes_down"] for r in first.history} == {vectors * sent}
    plan = prepare(config)
    again = load_config(yaml.safe_load(plan.config.yaml()))
    assert again.method == config.method.complete() and prepare(again).config == plan.config


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(("method", "objective"), PAIRS)
def test_overwrites_nothing_that_it_does_not_own(method: str, objective: str, momentum: float) -> None:
    """A returned gradient is invalid after the next call (here: NaN); start, server and client are never written."""
    cls: type[Method] = METHODS[method]
    loss = GlobalDistillation(window=3) if objective == "global_distillation" else OBJECTIVES[objective]()
    momentum = 0.0 if method in NO_LOCAL_MOMENTUM else momentum

    class Poisoned(cls):  # type: ignore[misc, valid-type]
        def step(self, theta: Any, grad: Any, local: Any) -> Any:
            def poisoning(point: Any) -> Any:
                if "last" in local.scratch:
                    local.scratch["last"].fill_(float("nan"))
                local.scratch["last"] = grad(point)
                return local.scratch["last"]

            return super().step(theta, poisoning, local)

    torch.manual_seed(0)
    module = MLP((5,), 4, [6], projection=3).double()
    work = LocalWork(steps=4, batch_size=4, lr=0.1, momentum=momentum, weight_decay=0.01)
    uploads = []
    for kind in (cls, Poisoned):
        federation = Federation(model=module, data=small_federation(), method=kind(objective=loss), local=work)
        state = federation.start()
        random = torch.Generator().manual_seed(1)

        def drawn(vectors: Any, random: Any = random) -> Any:
            return {k: torch.rand(v.shape, generator=random, dtype=torch.float64) for k, v in vectors.items()}

        whole = drawn(state.server)
        sent = {name: whole[name] for name in federation.coordinator.downlink}
        own = drawn({**cls().client_state(state.theta), **loss.client_state(state.theta)})
        theta = state.theta.clone()
        seen = {"theta": theta, **{f"server {k}": v for k, v in whole.items()}, **own}
        before = {name: vector.clone() for name, vector in seen.items()}
        report = updated(federation, 1, 0.1, theta, 3, 4, sent, own)
        info = RoundInfo(round=1, lr=0.1, counted=1, clients=6)
        kind().update(theta, whole, report.upload, info)
        loss.follow(theta, whole, info)
        for name, vector in seen.items():
            assert torch.equal(vector, before[name]), name
        uploads.append({**report.upload, **{f"state {k}": v for k, v in report.state.items()}})
    assert uploads[0]
    for name, vector in uploads[0].items():
        assert torch.isfinite(vector).all()
        assert torch.equal(vector, uploads[1][name]), name


@pytest.mark.parametrize(("method", "objective"), REFUSED)
def test_objectives_that_need_a_global_model_are_refused_without_one(method: str, objective: str) -> None:
    with pytest.raises(FedadcError, match=r"has no global model|shares no (head|BatchNorm)"):
        run(load_config({**CONFIG, "method": method, "objective": objective}))


@pytest.mark.parametrize("method", NO_LOCAL_MOMENTUM)
def test_local_momentum_is_refused_where_it_breaks_the_rule(method: str) -> None:
    with pytest.raises(FedadcError, match=r"local\.momentum to 0"):
        run(load_config({**CONFIG, "method": method}, ["local.momentum=0.9"]))


def test_feddyn_refuses_weighting_by_samples() -> None:
    with pytest.raises(FedadcError, match=r"set weighting to uniform"):
        run(load_config({**CONFIG, "method": "feddyn"}, ["cohort.weighting=samples"]))


@pytest.mark.parametrize("model", [MLP((5,), 4, [6]), torch.nn.Sequential(torch.nn.Linear(5, 4))])
def test_model_contrast_needs_a_head_and_a_projection(model: torch.nn.Module) -> None:
    with pytest.raises(FedadcError, match=r"projection head|no split into `embed` and `head`"):
        Federation(
            model=model.double(), data=small_federation(), method=FedAvg(objective=OBJECTIVES["model_contrast"]())
        )


def test_model_contrast_refuses_a_model_whose_forward_is_not_head_of_embed() -> None:
    class Doubled(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    with pytest.raises(FedadcError, match=r"forward\(x\) of Doubled returns something else"):
        Federation(
            model=Doubled((5,), 4, [6], projection=3).double(),
            data=small_federation(),
            method=FedAvg(objective=ModelContrast()),
        )


@dataclass(frozen=True, kw_only=True)
class Sharpness(FedAvg):
    """A user's method that takes a gradient at another point before its step, and returns a new tensor."""

    rho: float = 0.3

    def step(self, theta: Any, grad: Any, local: Any) -> Any:
        uphill = grad(theta).clone()
        return theta - local.lr * grad(theta + self.rho * uphill / uphill.norm())


@dataclass(frozen=True, kw_only=True)
class Careless(FedAvg):
    """A user's method that returns the flat buffer itself, as upload and as state."""

    def client_state(self, theta: Any) -> Any:
        return {"previous": theta}

    def finish(self, theta: Any, local: Any) -> Any:
        return {"delta": local.start - theta, "theta": theta}, {"previous": theta}

    def update(self, theta: Any, server: Any, mean: Any, info: Any) -> Any:
        return mean["theta"], server


def test_a_gradient_at_another_point_does_not_change_theta() -> None:
    """One step of sharpness-aware minimization against its formula in plain autograd."""
    data = small_federation()
    torch.manual_seed(0)
    module = MLP((5,), 4, [6]).double()
    work = LocalWork(epochs=1, batch_size=100, lr=0.1)
    federation = Federation(model=module, data=data, method=Sharpness(), local=work)
    start = federation.start().theta
    x, y = federation.agreement.inputs.gather(federation.data.train, federation.clients[2])

    def gradient(theta: torch.Tensor) -> torch.Tensor:
        vector_to_parameters(theta, module.parameters())
        parts = torch.autograd.grad(torch.nn.functional.cross_entropy(module(x), y), list(module.parameters()))
        return torch.cat([p.reshape(-1) for p in parts])

    g = gradient(start)
    expected = 0.1 * gradient(start + 0.3 * g / g.norm())
    report = updated(federation, 1, 0.1, start, 2, 1)
    assert torch.allclose(report.upload["delta"], expected, atol=1e-14)


def test_buffers_handed_out_are_copied() -> None:
    settings: dict[str, Any] = {"local": LocalWork(steps=3, batch_size=4, lr=0.1), "data": small_federation()}
    torch.manual_seed(0)
    module = MLP((5,), 4, [6]).double()
    careless, plain = (list(Federation(model=module, method=m, **settings).rounds(3)) for m in (Careless(), FedAvg()))
    assert torch.allclose(careless[-1].state.theta, plain[-1].state.theta, atol=1e-12)
    previous = [s["previous"] for s in careless[-1].state.clients.values()]
    assert all(not torch.equal(previous[0], p) for p in previous[1:])


def test_a_copied_federation_trains_the_same() -> None:
    torch.manual_seed(0)
    federation = Federation(model=MLP((5,), 4, [6]), data=small_federation(), method=METHODS["fedadc"]())
    copies = [copy.deepcopy(federation), pickle.loads(pickle.dumps(federation))]
    expected = list(federation.rounds(3))[-1].state.theta
    assert not torch.equal(expected, federation.start().theta)
    for other in copies:
        assert torch.equal(list(other.rounds(3))[-1].state.theta, expected)


WRONG: dict[str, tuple[str, Any, str]] = {  # a user's mistake -> hook, wrong hook, expected message
    "step forgets to return": ("step", lambda self, theta, grad, local: None, "step must return a vector like theta"),
    "step returns a number": ("step", lambda self, theta, grad, local: grad(theta).norm(), "step must return a vector"),
    "begin": ("begin", lambda self, local: local.start[:3], "begin must return a vector"),
    "correct": ("correct", lambda self, g, theta, local: g.float(), "correct must return a vector"),
    "finish alone": ("finish", lambda self, theta, local: {"delta": theta}, "finish must return two values"),
    "finish a float": ("finish", lambda self, theta, local: ({"delta": 1.0}, {}), "dict of named tensors"),
    "finish short": ("finish", lambda self, theta, local: ({"delta": theta[:1]}, {}), "as delta must return a vector"),
    "finish nothing": (
        "finish",
        lambda self, theta, local: ({}, {}),
        "looks for 'delta', but the uploads have nothing",
    ),
    "finish unlike": (
        "finish",
        lambda self, theta, local: ({"delta": theta, "x": torch.ones(len(local.data))}, {}),
        "differ in names or shapes",
    ),
    "finish a number": ("finish", lambda self, theta, local: ({"delta": theta}, {"n": 0}), "'n' has type int"),
    "tracked a text": ("tracked", "c", r"Mine\.tracked must be a tuple of names, not 'c'"),
    "tracked nothing": ("tracked", ("c",), "c is tracked, but the uploads have only delta"),
    "update alone": ("update", lambda self, theta, server, mean, info: theta, "update must return two values"),
    "update a number": ("update", lambda self, theta, server, mean, info: (theta.sum(), server), "update must return"),
    "update in context": (
        "update",
        lambda self, theta, server, mean, info: (theta.sub_(mean["delta"]), server),
        "overwrote the state",
    ),
    "server_state": ("server_state", lambda self, theta: None, "server_state must return a dict"),
}


@pytest.mark.parametrize(("name", "function", "words"), WRONG.values(), ids=WRONG)
def test_wrong_returns_of_a_users_method_are_named(name: str, function: Any, words: str) -> None:
    method = type("Mine", (FedAvg,), {name: function})()
    with pytest.raises(FedadcError, match=words):
        list(Federation(model=MLP((5,), 4, [6]).double(), data=small_federation(), method=method).rounds(2))


@pytest.mark.parametrize("loss", [1.0, None, torch.ones(3, requires_grad=True), torch.tensor(1.0)])
def test_an_objective_must_return_one_number_with_a_gradient(loss: Any) -> None:
    from fedadc.objectives import Objective

    objective = type("Mine", (Objective,), {"__call__": lambda self, model, batch, local: loss})()
    with pytest.raises(FedadcError, match="scalar tensor with a gradient"):
        list(Federation(model=MLP((5,), 4, [6]), data=small_federation(), method=FedAvg(objective=objective)).rounds(1))


def test_clearing_the_parameters_gradients_changes_nothing() -> None:
    class Clearing(CrossEntropy):
        def __call__(self, model: Any, batch: Any, local: Any) -> Any:
            model.module.zero_grad()
            return super().__call__(model, batch, local)

    model = MLP((5,), 4, [6])
    plain, cleared = (
        list(Federation(model=model, data=small_federation(), method=FedAvg(objective=objective)).rounds(2))
        for objective in (ByAutograd(), Clearing())
    )
    assert torch.equal(plain[-1].state.theta, cleared[-1].state.theta)


class ByAutograd(CrossEntropy):
    """The same loss without its closed form."""

    def __call__(self, model: Any, batch: Any, local: Any) -> Any:
        return super().__call__(model, batch, local)


class Constants(CrossEntropy):
    """A user's objective that keeps something everywhere and never changes it."""

    downlink = ("level",)

    def client_state(self, theta: Any) -> Any:
        return {"weight": theta.new_ones(2)}

    def server_state(self, theta: Any) -> Any:
        return {"level": theta.new_ones(3)}

    def __call__(self, model: Any, batch: Any, local: Any) -> Any:
        return super().__call__(model, batch, local) * local.client["weight"].mean() * local.server["level"].mean()


@pytest.mark.parametrize("method", METHODS)
def test_an_objectives_constant_state_is_kept_under_every_method(method: str) -> None:
    settings: dict[str, Any] = {"data": small_federation(), "local": LocalWork(steps=2, batch_size=4, lr=0.1)}
    torch.manual_seed(0)
    module = MLP((5,), 4, [6]).double()
    plain, kept = (
        list(Federation(model=module, method=METHODS[method](objective=objective), **settings).rounds(3))[-1].state
        for objective in (ByAutograd(), Constants())
    )
    assert torch.equal(plain.theta, kept.theta)
    assert torch.equal(kept.server["level"], torch.ones(3).double())
    assert all(torch.equal(state["weight"], torch.ones(2).double()) for state in kept.clients.values())


class Assigns(METHODS["scaffold"]):  # type: ignore[misc]
    """A user's method that puts its new state into the dict that it was given."""

    def finish(self, theta: Any, local: Any) -> Any:
        upload, new = super().finish(theta, local)
        local.client["c"] = new["c"]
        local.server["c"] = new["c"]
        return upload, local.client


def test_assigning_into_what_a_client_sees_changes_nothing_else() -> None:
    settings: dict[str, Any] = {"data": small_federation(), "local": LocalWork(steps=2, batch_size=4, lr=0.1)}
    torch.manual_seed(0)
    module = MLP((5,), 4, [6]).double()
    plain, assigning = (Federation(model=module, method=m, **settings) for m in (METHODS["scaffold"](), Assigns()))
    rounds = list(assigning.rounds(4))
    assert torch.equal(rounds[-1].state.theta, list(plain.rounds(4))[-1].state.theta)
    again = list(assigning.rounds(4, start=rounds[1].state))[-1].state
    assert torch.equal(again.theta, rounds[-1].state.theta)


def test_a_state_keeps_no_graph() -> None:
    class Embeds(FedAvg):
        def finish(self, theta: Any, local: Any) -> Any:
            return super().finish(theta, local)[0], {"mean": local.model.embed(local.batch.x).mean(0)}

    state = list(Federation(model=MLP((5,), 4, [6]).double(), data=small_federation(), method=Embeds()).rounds(1))[
        -1
    ].state
    assert all(own["mean"].grad_fn is None for own in state.clients.values())
    assert copy.deepcopy(state).clients.keys() == state.clients.keys()


def test_an_objective_that_needs_an_unknown_server_vector_is_refused() -> None:
    from fedadc.objectives import CrossEntropy

    class Wants(CrossEntropy):
        downlink = ("teacher",)

    with pytest.raises(FedadcError, match="needs the server's 'teacher'"):
        Federation(model=MLP((5,), 4, [6]), data=small_federation(), method=FedAvg(objective=Wants()))


@pytest.mark.parametrize("method", METHODS)
def test_settings_out_of_range_are_refused(method: str) -> None:
    for name in set(METHODS[method].__dataclass_fields__) & {"beta", "beta_local", "phi"}:
        for bad in (-0.1, 1.0, float("nan")):
            with pytest.raises(FedadcError, match=name):
                METHODS[method](**{name: bad})
    if "server_lr" in METHODS[method].__dataclass_fields__:
        with pytest.raises(FedadcError, match="server_lr"):
            METHODS[method](server_lr=0.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("objective", [o for o in OBJECTIVES_OF_CLASSES if o != "cross_entropy"])
def test_augmentation_changes_the_teacher_path_but_not_determinism(objective: str) -> None:
    config = load_config({**CONFIG, "method": "fedadc", "objective": objective})
    augmented = replace(config, data=replace(config.data, augment=Augment(crop=1, flip=True)))
    first, second = run(augmented), run(augmented)
    assert torch.equal(first.state.theta, second.state.theta)
    assert not torch.equal(first.state.theta, run(config).state.theta)


def test_names_of_an_earlier_version_are_refused_with_the_new_ones() -> None:
    with pytest.raises(FedadcError, match=r"Old\.personalised: Method\.personalised is now called personalized"):
        type("Old", (FedAvg,), {"personalised": True})
    with pytest.raises(FedadcError, match="looks_around is now called needs_neighboring_cohorts"):
        type("Old", (Pull,), {"looks_around": True})


def test_check_with_attributes_of_the_federation_is_refused() -> None:
    class Old(FedAvg):
        def check(self, setup: Any) -> None:
            assert setup.data  # of 0.1, where it was the federation

    with pytest.raises(FedadcError, match=r"check uses setup\.data, but a Setup has only model, example, local"):
        Federation(model=torch.nn.Linear(5, 4).double(), data=small_federation(), method=Old())
