"""Personalization: calibration equals the inner loop with a frozen body; statistics match values computed by hand."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fedadc
from commands import contents
from conftest import small_federation, steps_of, updated
from fedadc.config.build import prepare
from fedadc.data.batches import Augment
from fedadc.errors import Diverged, FedadcError
from fedadc.models import CNN, MLP
from fedadc.models.vectors import Vector
from fedadc.personal.calibrate import REGULARIZERS, Calibration, calibrated, tuned_part
from fedadc.personal.folder import personal_state_dict
from fedadc.personal.personalize import personalize
from fedadc.personal.request import client_numbers
from fedadc.personal.results import ClientTotal, ResultRow, table_rows
from fedadc.personal.shares import shares_of
from fedadc.system.determinism import deterministic
from fedadc.system.signals import Stopped
from fedadc.training.ensembles import Ensembles
from fedadc.training.server import Server
from fedadc.views.local import Local
from fedadc.views.local_work import LocalWork

EXPERIMENTS = Path(__file__).parents[2] / "experiments" / "personal"
WORK = LocalWork(epochs=2, batch_size=4, lr=0.1, weight_decay=0.01, momentum=0.5, clip=0.8)
DIGITS: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": "digits", "clients": 8, "partition": {"name": "sort", "labels_per_client": 2}},
    "model": {"name": "mlp", "hidden": [16]},
    "method": {"name": "fedadc", "beta": 0.9},
    "local": {"steps": 4, "batch_size": 16, "lr": 0.1},
    "cohort": {"size": 4},
}


def federation(model: nn.Module, work: LocalWork = WORK) -> fedadc.Federation:
    torch.manual_seed(0)
    return fedadc.Federation(model=model, data=small_federation(), local=work, seed=5)


def small_mlp() -> nn.Module:
    torch.manual_seed(1)
    return MLP((5,), 4, hidden=(6, 7)).double()


class Bent(nn.Module):
    """A model that is no plain chain of dense layers, with a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Linear(5, 6)
        self.head = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        self.double()

    def embed(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(x))
        return logits


@dataclass(frozen=True, kw_only=True)
class Masked(fedadc.methods.FedProx):
    """FedProx on the whole model with the gradient of the body set to zero."""

    mu: float = 0.0

    def correct(self, g: Vector, theta: Vector, local: Local) -> Vector:
        g = super().correct(g, theta, local)
        g[local.model.part("embed")] = 0
        return g


# --- calibration is local work with a frozen body -------------------------------------------------------------------


def require_masked_training(
    trained: fedadc.Federation, calibration: Calibration, regularizer: str, clients: tuple[int, ...]
) -> list[tuple[Tensor, float]]:
    """Calibrated heads are those of training the whole model with the body's gradient set to zero, in float64.

    Returns the head of each client, and its total over the client's own samples.
    """
    theta, agreement, model, work = trained.start().theta, trained.agreement, trained.model, calibration.work
    method, found = calibration.method(regularizer, agreement.task.name), []
    mu = calibration.mu if regularizer == "prox" else 0.0
    masked = Server(Masked(mu=mu, objective=method.objective), Ensembles())
    whole = replace(trained.simulated, agreement=replace(agreement, server=masked))
    part, head = tuned_part(agreement, theta, "head", trained.evaluation.batch_size), model.part("head")
    for client in clients:
        steps = int(steps_of(trained, np.array([client]))[0])
        with deterministic():
            updated(whole, 0, work.lr, theta, client, steps)
            expected = model.theta.clone()
            model.theta.copy_(theta)
            own = part.features(trained.data.train, trained.clients[client])
            tuned = calibrated(part, agreement, client, own, work, method)
            found.append((tuned, part.total(tuned, own)))
        assert torch.equal(expected[model.part("embed")], theta[model.part("embed")])
        assert torch.allclose(tuned, expected[head], rtol=0, atol=1e-10)
        assert not torch.allclose(tuned, theta[head], rtol=0, atol=1e-3)  # the head has changed
    assert torch.equal(model.theta, theta)
    return found


@pytest.mark.parametrize("make", [small_mlp, Bent])
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_calibrating_the_head_equals_training_with_the_bodys_gradient_masked(regularizer: str, make: Any) -> None:
    """Without clipping, whose norm would include the body."""
    plain = replace(WORK, clip=None)
    require_masked_training(federation(make(), plain), Calibration(work=plain, mu=0.7, lam=0.6), regularizer, (0, 3, 5))


@pytest.mark.parametrize("regularizer", ["none", "prox"])
def test_calibrating_the_head_of_a_regression_equals_training_with_the_bodys_gradient_masked(regularizer: str) -> None:
    """And the total is the sum of squared errors that NumPy finds in the labels' own units."""
    torch.manual_seed(1)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)), rng.normal([50, -3], [20, 0.1], size=(60, 2))
    data = fedadc.data.from_arrays(x, y, owners=np.arange(60) % 4, task="regression")
    plain = replace(WORK, clip=None)
    trained = fedadc.Federation(model=MLP((5,), 2, hidden=(6, 7)).double(), data=data, local=plain, seed=5)
    found = require_masked_training(trained, Calibration(work=plain, mu=0.7), regularizer, (0, 3))
    center, spread = (np.array([getattr(t, key) for t in trained.data.targets]) for key in ("center", "spread"))
    for client, (tuned, total) in zip((0, 3), found, strict=True):
        samples = trained.data.train.take(trained.clients[client])
        features = trained.model.features(trained.model.theta, samples.x).numpy()
        weight, bias = tuned[: 2 * 7].reshape(2, 7).numpy(), tuned[2 * 7 :].numpy()
        errors = center + spread * (features @ weight.T + bias) - samples.y.numpy()
        assert total == pytest.approx((errors**2).mean(axis=1).sum(), rel=1e-6)


def ends(trained: fedadc.Federation, regularizer: str, layers: Any = "head", **settings: float) -> list[Tensor]:
    calibration = Calibration(work=WORK, layers=layers, **settings)
    part = tuned_part(trained.agreement, trained.start().theta, layers, trained.evaluation.batch_size)
    with deterministic():
        seen = [part.features(trained.data.train, trained.clients[k]) for k in range(len(trained.clients))]
        return [
            calibrated(part, trained.agreement, k, own, WORK, calibration.method(regularizer))
            for k, own in enumerate(seen)
        ]


@pytest.mark.parametrize("layers", ["head", "all"])
def test_a_regularizer_with_weight_zero_equals_none_bit_for_bit(layers: str) -> None:
    trained = federation(small_mlp())
    plain = ends(trained, "none", layers)
    for name, weight in (("prox", "mu"), ("confidence", "lam")):
        assert all(map(torch.equal, plain, ends(trained, name, layers, **{weight: 0.0})))
        assert not any(map(torch.equal, plain, ends(trained, name, layers, **{weight: 0.5})))


def test_a_larger_mu_keeps_the_head_nearer_to_the_global_one() -> None:
    trained = federation(small_mlp())
    start = trained.start().theta[trained.model.part("head")]
    far = [torch.stack([(e - start).norm() for e in ends(trained, "prox", mu=mu)]) for mu in (0.0, 1.0, 4.0)]
    assert (far[0] > far[1]).all() and (far[1] > far[2]).all()


def test_tuning_the_whole_model_equals_local_work() -> None:
    """Including the augmentation of the run."""
    x, y = torch.randint(256, (30, 1, 8, 8), dtype=torch.uint8), torch.arange(30) % 3
    torch.manual_seed(0)
    net = CNN((1, 8, 8), 3, channels=(3,), hidden=(4,))
    data = fedadc.from_arrays(x, y, (x, y))
    trained = fedadc.Federation(model=net, data=data, clients=3, local=WORK, augment=Augment(crop=1, flip=True))
    theta = trained.start().theta
    part = tuned_part(trained.agreement, theta, "all", trained.evaluation.batch_size)
    with deterministic():
        own = part.features(data.train, trained.clients[1])
        tuned = calibrated(part, trained.agreement, 1, own, WORK, fedadc.methods.FedAvg())
        updated(trained, 0, WORK.lr, theta, 1, int(steps_of(trained, np.array([1]))[0]))
    assert torch.equal(tuned, trained.model.theta)


def test_features_are_computed_once_with_the_frozen_body() -> None:
    calls = []

    class Counting(Bent):
        def embed(self, x: Tensor) -> Tensor:
            calls.append((len(x), self.training))
            return super().embed(x)

    trained = federation(Counting())
    part = tuned_part(trained.agreement, trained.start().theta, "head", trained.evaluation.batch_size)
    calls.clear()
    own = part.features(trained.data.train, trained.clients[5])
    with deterministic():
        for regularizer in REGULARIZERS:
            calibrated(part, trained.agreement, 5, own, WORK, Calibration(work=WORK).method(regularizer))
    assert calls == [(len(trained.clients[5]), False)]
    x = trained.data.train.x[torch.from_numpy(trained.clients[5])]
    assert torch.equal(own.x, trained.model.module.embed(x).detach())  # type: ignore[operator]


# --- models that cannot be split ------------------------------------------------------------------------------------


class Tied(Bent):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5).double()
        self.head = nn.Sequential(self.body, nn.Linear(5, 4).double())


class Otherwise(Bent):
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = 2 * self.head(self.embed(x))
        return logits


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(5, 4)).double(), "no split into `embed` and `head`"),
        (Tied, "head shares weights with its body"),
        (Otherwise, r"forward\(x\) is not head\(embed\(x\)\)"),
    ],
)
def test_a_model_without_a_separate_classifier_can_only_be_tuned_whole(make: Any, words: str) -> None:
    trained = federation(make())
    with pytest.raises(FedadcError, match=words):
        tuned_part(trained.agreement, trained.start().theta, "head", trained.evaluation.batch_size)
    assert len(ends(trained, "none", "all")) == 6


def test_a_diverged_calibration_names_the_client() -> None:
    trained = federation(Bent())
    part = tuned_part(trained.agreement, trained.start().theta, "head", trained.evaluation.batch_size)
    own = part.features(trained.data.train, trained.clients[2])
    wild = replace(WORK, clip=None, lr=1e30)
    with deterministic(), pytest.raises(Diverged, match="client 2: calibration diverged"):
        calibrated(part, trained.agreement, 2, own, wild, fedadc.methods.FedProx(mu=1e200))


# --- statistics -----------------------------------------------------------------------------------------------------


def test_the_statistics_of_a_row_match_values_computed_by_hand() -> None:
    counts = [
        ClientTotal(0, "0", 9, 10, 9, 5),  # 0.5 -> 0.9
        ClientTotal(1, "1", 9, 2, 1, 2),  # 1.0 -> 0.5
        ClientTotal(2, "2", 9, 4, 3, 3),  # unchanged
        ClientTotal(3, "3", 9, 0, 0, 0),  # not counted: no test samples
    ]
    f = ResultRow("r", "none", totals=counts).figures()
    assert (f.clients, f.tested) == (4, 3)
    assert f.global_mean == pytest.approx(0.75) and f.personal_mean == pytest.approx((0.9 + 0.5 + 0.75) / 3)
    assert f.global_std == pytest.approx(0.25)
    assert (f.global_cumulative, f.personal_cumulative) == (10 / 16, 13 / 16)
    assert (f.gained, f.lost) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    alone = ResultRow("r", "own", totals=[replace(c, shared=None) for c in counts])
    assert (alone.figures().global_mean, alone.figures().gained, alone.figures().tested) == (None, None, 3)
    assert table_rows([alone])[1] == [["r, own", "3", "–", "71.7 ± 20.2", "– → 81.2", "–", "–"]]
    empty = ResultRow("r", "none", totals=counts[3:]).figures()
    assert (empty.tested, empty.personal_mean, empty.personal_cumulative, empty.lost) == (0, None, None, None)


NAMES = ("0", "1", "2", "3")


def test_clients_can_be_selected_by_name() -> None:
    names = ("east", "north", "w7")
    assert client_numbers("north,0", names) == [0, 1] and client_numbers("w7", names) == [2]
    with pytest.raises(FedadcError, match="'south' is not a client"):
        client_numbers("south", names)


def test_numbers_are_names_where_a_name_is_a_number() -> None:
    names = ("1", "10", "2", "3", "north")
    assert client_numbers("1-3", names) == [0, 2, 3] and client_numbers([10], names) == [1]
    for wrong in ("0", "3-4", "0-99999999999"):
        with pytest.raises(FedadcError, match=r"client '[04]' is unknown; "):
            client_numbers(wrong, names)


@pytest.mark.parametrize(
    ("selected", "found"),
    [(None, [0, 1, 2, 3]), ("2", [2]), ("3,0-1", [0, 1, 3]), (" 1-2 ,2", [1, 2])],
)
def test_clients_can_be_selected_by_numbers_and_ranges(selected: Any, found: list[int]) -> None:
    assert client_numbers(selected, NAMES) == found == client_numbers(selected and found, NAMES)


@pytest.mark.parametrize(
    ("selected", "words"),
    [("4", "no client 4; the run has the clients 0 to 3"), ("0-9", "no client 9"),
     ("a", "'a' is not a client's name, its number"), ("", "'' is not"), ("1,", "'' is not"),
     ("-1", "'-1' is not"), ("3-1", "begins after its end"), ([-1], "'-1'")],
)  # fmt: skip
def test_unknown_clients_are_refused(selected: Any, words: str) -> None:
    with pytest.raises(FedadcError, match=words):
        client_numbers(selected, NAMES)


# --- a run, end to end ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "digits"
    fedadc.run(DIGITS, out=place)
    return place


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of the trained run that a test may change."""
    return Path(shutil.copytree(trained_run, tmp_path / "digits"))


def test_files_statistics_and_a_whole_model(run: Path) -> None:
    before = contents(run)
    result = personalize(run, regularizers=["none", "confidence"])
    written = contents(run / "personal")
    assert set(written) == {
        *(f"{regularizer}/client-{k:05d}.safetensors" for regularizer in ("none", "confidence") for k in range(8)),
        "clients.csv", "summary.json", "personal.png",
    }  # fmt: skip
    assert written["personal.png"].startswith(b"\x89PNG") and len(result.rows) == 2
    tuned, whole = load_file(run / "personal/none/client-00003.safetensors"), load_file(run / "model.safetensors")
    assert set(tuned) == {"head.weight", "head.bias"}
    state = personal_state_dict(run, 3, "none")
    assert set(state) == set(whole)
    assert all(torch.equal(state[n], tuned.get(n, whole[n])) for n in whole)
    assert not torch.equal(state["head.weight"], whole["head.weight"])

    # recompute the accuracies with a separate module on the clients' test shares
    plan = prepare(fedadc.load_config(run / "config.yaml"))
    shares = shares_of(plan)
    module = MLP((64,), 10, hidden=(16,))
    for client in range(8):
        indices = torch.from_numpy(shares.tests[client]).long()
        x = plan.federation.agreement.inputs.gather(shares.test, shares.tests[client])[0].flatten(1)
        count = result.rows[0].totals[client]
        for weights, correct in (
            (whole, count.shared),
            (personal_state_dict(run, client, "none"), count.own),
        ):
            module.load_state_dict(weights)
            assert int((module(x).argmax(dim=1) == shares.test.y[indices]).sum()) == correct
    lines = list(csv.DictReader((run / "personal/clients.csv").read_text().splitlines()))
    assert len(lines) == 16 and float(lines[3]["personal_accuracy"]) == pytest.approx(
        result.rows[0].totals[3].own / result.rows[0].totals[3].test
    )
    summary = json.loads((run / "personal/summary.json").read_text())
    assert summary["rows"][1] == result.rows[1].as_dict() and summary["settings"]["epochs"] == 2
    assert {name: content for name, content in contents(run).items() if not name.startswith("personal")} == before


def test_calibration_uses_the_learning_rate_before_any_schedule(tmp_path: Path) -> None:
    local = {"steps": 4, "lr": 0.1, "schedule": {"name": "step", "every": 1, "gamma": 0.1}}
    fedadc.run({**DIGITS, "local": local}, out=tmp_path / "run")
    for name, lr in (("default", None), ("first", 0.1), ("last", 0.001)):
        personalize(tmp_path / "run", lr=lr, clients="0", out=tmp_path / name)
    default, first, last = (
        (tmp_path / n / "none/client-00000.safetensors").read_bytes() for n in ("default", "first", "last")
    )
    assert default == first != last


def test_a_client_does_not_depend_on_other_clients(run: Path, tmp_path: Path) -> None:
    """The result is the same with other clients, in another order, and with other regularizers."""
    everybody = personalize(run, regularizers=["prox", "none"], out=tmp_path / "all")
    some = personalize(run, clients=[5, 3], out=tmp_path / "some")
    for client in (3, 5):
        name = f"none/client-{client:05d}.safetensors"
        assert (tmp_path / "some" / name).read_bytes() == (tmp_path / "all" / name).read_bytes()
    assert [c.client for c in some.rows[0].totals] == [3, 5]
    assert some.rows[0].totals == [everybody.rows[1].totals[k] for k in (3, 5)]
    assert len(list((tmp_path / "some/none").iterdir())) == 2


def stopping(run: str, clients: int) -> None:
    raise Stopped(15)


def test_results_are_replaced_only_with_overwrite_and_only_our_own(run: Path) -> None:
    personalize(run, clients="0")
    with pytest.raises(FedadcError, match="already exists"):
        personalize(run)
    before = contents(run)
    for settings in ({"regularizers": ["none", "prox"], "mu": 1e30, "epochs": 9}, {"watch": stopping}):
        with pytest.raises((Diverged, Stopped)):
            personalize(run, overwrite=True, **settings)  # type: ignore[arg-type]
        assert contents(run) == before  # no partial results
    personalize(run, clients="1", overwrite=True)
    assert [p.name for p in (run / "personal/none").iterdir()] == ["client-00001.safetensors"]
    (run / "personal/notes.txt").write_text("mine")
    with pytest.raises(FedadcError, match=r"contains notes\.txt, which `personalize` did not write"):
        personalize(run, overwrite=True)
    assert not list(run.glob("*.part"))


def test_a_full_disk_is_one_sentence_and_leaves_no_files(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(run)

    def full(files: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedadc.personal.folder.write_files", full)
    with pytest.raises(FedadcError, match=r"cannot write to .*personal \(No space left on device\)"):
        personalize(run, regularizers="prox")
    assert contents(run) == before and not list(run.glob("personal*"))


def test_all_runs_are_checked_before_any_is_written(run: Path, tmp_path: Path) -> None:
    cut = Path(shutil.copytree(run, tmp_path / "cut"))
    (cut / "model.safetensors").unlink()
    with pytest.raises(FedadcError, match=r"cut has no model\.safetensors"):
        personalize([run, cut])
    assert not (run / "personal").exists()


def test_a_run_with_personal_models_can_be_resumed_and_replaced(run: Path) -> None:
    personalize(run)
    (run / "personal-old.part").mkdir()  # as a killed process would leave it
    kept = contents(run / "personal")
    fedadc.resume(run, ["rounds=4"])
    assert contents(run / "personal") == kept and not (run / "personal-old.part").exists()
    with pytest.raises(
        FedadcError, match=r"was tuned from the model of round 3, but .* is of round 4; personalize again"
    ):
        personal_state_dict(run, 0)
    personalize(run, overwrite=True)
    assert personal_state_dict(run, 0)
    fedadc.run({**DIGITS, "rounds": 1}, out=run, overwrite=True)
    assert not (run / "personal").exists() and not list(run.glob(".replaced-*"))
    (run / "personal").mkdir()
    (run / "personal/letters.txt").write_text("dear")
    with pytest.raises(FedadcError, match="contains personal, which is not part of a run"):
        fedadc.run({**DIGITS, "rounds": 1}, out=run, overwrite=True)


def test_models_that_a_method_stores_have_a_row(tmp_path: Path) -> None:
    """For local_only, which has no global model: every client's model is in the checkpoint, or is the initial one."""
    alone = {**DIGITS, "rounds": 1, "method": "local_only", "label": "alone"}
    result = fedadc.run(alone, out=tmp_path / "alone")
    fedadc.run({**DIGITS, "label": "together"}, out=tmp_path / "together")
    found = personalize([tmp_path / "alone", tmp_path / "together"], regularizers=["none", "prox"])
    assert [row.label for row in found.rows] == ["alone, own", "together, none", "together, prox"]
    assert all(c.shared is None for c in found.rows[0].totals)
    chosen = set(result.state.clients)
    assert 0 < len(chosen) < 8
    for client in range(8):
        vector = result.state.clients[client]["model"] if client in chosen else result.state.theta
        expected = result.plan.federation.model.state_dict(vector)
        state = personal_state_dict(tmp_path / "alone", client)
        assert state.keys() == expected.keys() and all(torch.equal(state[n], expected[n]) for n in expected)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "ditto"])
def test_the_accuracy_of_stored_models_equals_that_of_training(method: str, tmp_path: Path) -> None:
    """Training computes the same accuracy in another way: all clients' models, each on its own test share."""
    result = fedadc.run({**DIGITS, "method": method}, out=tmp_path / "run")
    (row,) = personalize(tmp_path / "run").rows
    assert row.as_dict()["personal_cumulative"] == result.history[-1]["personal_accuracy"]
    headless = method != "ditto"
    assert (row.as_dict()["global_cumulative"] is None) == headless  # theta's head was never trained
    federation, state = result.plan.federation, result.state
    names = set(federation.model.state_dict(state.theta))
    for client in range(8):
        kept = state.clients[client] if client in state.clients else federation.method.client_state(state.theta)
        expected = federation.model.state_dict(federation.method.personal(state.theta, kept))
        found = personal_state_dict(tmp_path / "run", client)
        assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)
        held = set(load_file(tmp_path / f"run/personal/own/client-{client:05}.safetensors"))
        assert held <= ({n for n in names if n.startswith("head")} if headless else names)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("method", ["fedper", "ditto"])
def test_clients_of_a_natural_federation_are_tested_on_their_own_samples(
    method: str, named: bool, tmp_path: Path
) -> None:
    """Every second client has inverted labels, so its model would fail on the samples of another client."""
    rng = np.random.default_rng(0)
    who, x = np.repeat(np.arange(6), 40), rng.normal(size=(240, 4)).astype(np.float32)
    y = ((x[:, 0] > 0) ^ (who % 2 == 1)).astype(int)
    held: dict[str, Any] = {"x_test": x[::3], "y_test": y[::3], "client_test": who[::3]} if named else {}
    np.savez(tmp_path / "sites.npz", x=x, y=y, client=who, **held)
    data = {"name": "npz", "path": str(tmp_path / "sites.npz"), "validation": 0.2}
    result = fedadc.run({**DIGITS, "rounds": 15, "method": method, "data": data}, out=tmp_path / "run")
    last = result.history[-1]
    assert last["personal_accuracy"] > 0.85 and last["validation_personal_accuracy"] > 0.8
    (row,) = personalize(tmp_path / "run").rows
    assert row.as_dict()["personal_cumulative"] == last["personal_accuracy"]


def test_the_model_option_is_refused_for_stored_models(tmp_path: Path) -> None:
    trace = tmp_path / "sites.csv"
    trace.write_text("client,step_seconds,down,up,latency\n" + "".join(f"{k},0.1,10,10,0\n" for k in range(8)))
    fedadc.run({**DIGITS, "method": "fedper", "clock": {"trace": str(trace)}}, out=tmp_path / "run")
    trace.unlink()
    with pytest.raises(FedadcError, match="stores a model for each client"):
        personalize(tmp_path / "run", model="swa")
    assert personalize(tmp_path / "run").rows  # the trace is not read


def test_settings_that_only_matter_for_training_are_ignored(tmp_path: Path) -> None:
    """The trace of the clock may be deleted; communication, selection and ensembles of the run are ignored."""
    trace = tmp_path / "sites.csv"
    trace.write_text("client,step_seconds,down,up,latency\n" + "".join(f"{k},0.1,10,10,0\n" for k in range(8)))
    extras = {"clock": {"trace": str(trace)}, "communication": {"downlink": "overlap", "uplink": "top_k"},
              "ensembles": {"ema": {}}, "cohort": {"size": 5, "selection": "clusters"}}  # fmt: skip
    fedadc.run({**DIGITS, **extras}, out=tmp_path / "run")
    trace.unlink()
    plain = personalize(tmp_path / "run").rows[0].as_dict()
    averaged = personalize(tmp_path / "run", model="ema", overwrite=True).rows[0].as_dict()
    assert plain["global_cumulative"] != averaged["global_cumulative"]


# --- test shares that are given, and data that has changed ----------------------------------------------------------


def archive(path: Path, seed: int, clients: int = 4, **more: Any) -> Path:
    """An .npz file in which most labels of client k are k % 3, and inputs are centered at their label."""
    rng = np.random.default_rng(seed)
    who = np.repeat(np.arange(clients), 30)
    y = np.where(rng.random(len(who)) < 0.7, who % 3, rng.integers(0, 3, len(who)))
    y[:3] = [0, 1, 2]
    x = rng.normal(size=(len(who), 5)).astype(np.float32) + y[:, None]
    arrays = {"x": x, "y": y, "client": who} | more
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def natural(tmp_path: Path, **more: Any) -> Path:
    archive(tmp_path / "now.npz", 0, **more)
    config = {**DIGITS, "data": {"name": "npz", "path": str(tmp_path / "now.npz")}, "cohort": {"size": 2}}
    fedadc.run(config, out=tmp_path / "run")
    return tmp_path / "run"


def test_test_samples_with_a_client_belong_to_that_client(tmp_path: Path) -> None:
    held = np.zeros((5, 5), dtype=np.float32)
    run = natural(tmp_path, x_test=held, y_test=np.array([0, 1, 2, 0, 1]), client_test=np.array([2, 0, 2, 2, 99]))
    counts = personalize(run).rows[0].totals
    assert [c.test for c in counts] == [1, 0, 3, 0]  # the run has no client 99
    assert [c.train for c in counts] == [30] * 4


def test_held_out_samples_of_a_natural_federation_stay_with_their_clients(tmp_path: Path) -> None:
    run = natural(tmp_path)
    plan = prepare(fedadc.load_config(run / "config.yaml"))
    shares, x = shares_of(plan), np.load(tmp_path / "now.npz")["x"]
    for client in range(4):
        mine = {row.tobytes() for row in x[30 * client : 30 * client + 30]}
        samples = [*shares.train.x[shares.clients[client]].numpy(), *shares.test.x[shares.tests[client]].numpy()]
        assert len(samples) == 30 and all(row.tobytes() in mine for row in samples)


def test_calibration_on_new_data_needs_no_training(tmp_path: Path) -> None:
    run = natural(tmp_path)
    new = archive(tmp_path / "next.npz", 1)
    result = personalize(run, data=new)
    assert [row.phase for row in result.rows] == ["before", "after", "recalibrated"]
    before, after, again = (row.totals for row in result.rows)
    assert before == personalize(run).rows[0].totals
    assert [c.test for c in after] == [c.test for c in again] and [c.shared for c in after] == [c.shared for c in again]
    # the same models as after personalizing a run on the new data that has these weights
    other = {**DIGITS, "rounds": 1, "data": {"name": "npz", "path": str(new)}, "cohort": {"size": 2}}
    fedadc.run(other, out=tmp_path / "other")
    (tmp_path / "other/model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    fresh = personalize(tmp_path / "other")
    assert fresh.rows[0].totals == again
    for k in range(4):
        file = f"none/client-{k:05d}.safetensors"
        assert (run / "personal-next" / file).read_bytes() == (tmp_path / "other/personal" / file).read_bytes()


def test_new_partition_from_a_yaml_file(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "anew.yaml").write_text("data: {partition: {name: dirichlet, alpha: 0.3}}\n")
    result = personalize(run, data=tmp_path / "anew.yaml", clients="0-3")
    assert (run / "personal-anew/none/client-00002.safetensors").is_file() and not caplog.records
    before, after, _ = (row.totals for row in result.rows)
    assert [c.train for c in before] != [c.train for c in after]
    (tmp_path / "leak.yaml").write_text("data: {seed: 9}\n")  # holds out other samples
    personalize(run, data=tmp_path / "leak.yaml", clients="0")
    assert "were in the run's training data" in caplog.text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p, "there is no file"),
        (lambda p: archive(p, 1, clients=9), "names the clients 4, 5, 6, which the run does not have"),
        (lambda p: archive(p, 1, y=np.arange(120) % 5), "label .* does not occur in training"),
        (lambda p: archive(p, 1, x=np.zeros((120, 6))), r"has samples \[6\] torch.float64 of 3 classes, but .* \[5\]"),
        (lambda p: archive(p, 1, client=None), "does not say which client each sample belongs to"),
        (lambda p: archive(p, 1, client=np.arange(7)), "7 client ids do not match 120 labels"),
        (lambda p: p.with_suffix(".txt").write_text("a") and p.with_suffix(".txt"), "must be .npz or .yaml"),
        (lambda p: p.with_suffix(".yaml").write_text("rounds: 3") and p.with_suffix(".yaml"), "has no `data`"),
        (
            lambda p: p.with_suffix(".yaml").write_text("data: {name: digits, clients: 4}") and p.with_suffix(".yaml"),
            "of 10 classes, but the model was trained",
        ),
    ],
)
def test_new_data_that_does_not_fit_is_refused(tmp_path: Path, make: Any, words: str) -> None:
    run = natural(tmp_path)
    before = contents(run)
    with pytest.raises(FedadcError, match=words):
        personalize(run, data=make(tmp_path / "new.npz"))
    assert contents(run) == before


def test_new_data_from_a_csv_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def table(name: str, flip: bool) -> Path:
        lines = ["a,kind,site,y"]
        for _ in range(120):
            a, site, kind = rng.normal(), "ns"[rng.integers(2)], "pq"[rng.integers(2)]
            lines.append(f"{a:.6f},{kind},{site},{'yes' if (a > 0) != (flip and site == 'n') else 'no'}")
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    data = {"name": "csv", "path": str(table("old.csv", False)), "label": "y", "client": "site"}
    fedadc.run({**DIGITS, "rounds": 20, "data": data, "cohort": {}}, out=tmp_path / "run")
    new = personalize(tmp_path / "run", data=table("new.csv", True), epochs=40)
    before, after, again = (row.totals for row in new.rows)
    assert [c.name for c in before] == ["n", "s"]
    assert after[0].own < 0.3 * after[0].test and again[0].own > 0.8 * again[0].test  # n's labels are reversed
    assert after[1].own > 0.8 * after[1].test


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": float("nan")}, r"^lr must be positive "),
        ({"epochs": 0}, r"^epochs must be at least 1 "),
        ({"lam": 2.0}, r"lam must be in \[0, 1\]"),
        ({"mu": -1.0}, "mu must be at least 0"),
        ({"regularizers": ["l2"]}, "regularizer 'l2' is unknown; choose from: confidence, none, prox"),
        ({"layers": "tail"}, "layers must be 'head' or 'all', not 'tail'"),
        ({"model": "server"}, "has no model-server.safetensors: this run has no other models"),
    ],
)
def test_invalid_settings_are_refused(trained_run: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(FedadcError, match=words):
        personalize(trained_run, **{"regularizers": ["none", "prox", "confidence"], **settings})
    assert not list(trained_run.glob("personal*"))


def test_another_model_of_the_run_is_selected_by_name(tmp_path: Path) -> None:
    fedadc.run({**DIGITS, "method": "feddyn"}, out=tmp_path / "run")
    personalize(tmp_path / "run", model="server", clients="2")
    state, server = personal_state_dict(tmp_path / "run", 2), load_file(tmp_path / "run/model-server.safetensors")
    assert torch.equal(state["layers.0.weight"], server["layers.0.weight"])
    assert not torch.equal(state["layers.0.weight"], load_file(tmp_path / "run/model.safetensors")["layers.0.weight"])


def test_the_example_of_the_docs_can_be_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fedadc.run(EXPERIMENTS / "digits.yaml", ["rounds=1"], out=tmp_path / "run")
    result = personalize(tmp_path / "run", data=EXPERIMENTS / "changed.yaml", clients="0-4")
    assert [row.phase for row in result.rows] == ["before", "after", "recalibrated"]
    assert not caplog.records  # no test sample was trained on


def assert_warned(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    assert all(any(word in r.getMessage() for r in caplog.records) for word in words), caplog.text


def test_changed_data_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Warnings of another scale, and of clients without samples."""
    run = natural(tmp_path)
    with np.load(tmp_path / "now.npz") as known:
        arrays = dict(known)
    kept = arrays["client"] != 2
    np.savez(tmp_path / "later.npz", x=100 * arrays["x"][kept], y=arrays["y"][kept], client=arrays["client"][kept])
    personalize(run, data=tmp_path / "later.npz")
    assert_warned(
        caplog, "new samples must be in the same units", "has no samples of the clients 2, which are left out"
    )


def test_an_unfinished_run_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fedadc.run(DIGITS, out=tmp_path / "run")
    (tmp_path / "run/config.yaml").write_text(
        (tmp_path / "run/config.yaml").read_text().replace("rounds: 3", "rounds: 9")
    )
    personalize(tmp_path / "run")
    assert_warned(caplog, "is not finished: round 3 of 9")


def test_weights_of_regularizers_that_are_not_given_are_refused(tmp_path: Path) -> None:
    fedadc.run({**DIGITS, "rounds": 1}, out=tmp_path / "run")
    for name, regularizer in (("mu", "prox"), ("lam", "confidence")):
        with pytest.raises(FedadcError, match=f"`{name}` is for the regularizer {regularizer}"):
            personalize(tmp_path / "run", **{name: 0.5})
