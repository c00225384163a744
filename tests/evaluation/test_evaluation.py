"""Metrics against scikit-learn, and nothing but the model, the samples and the cuts in them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score, f1_score, log_loss, recall_score, top_k_accuracy_score
from torch import Tensor, nn

from commands import FILES, SMALL, Call, fine, records, refused
from conftest import small_federation
from fedadc.data.batches import Inputs
from fedadc.data.dataset import Normalization, Samples
from fedadc.errors import FedadcError
from fedadc.evaluation.evaluator import Evaluator
from fedadc.evaluation.metrics import Evaluation, MetricCounter
from fedadc.evaluation.stopping import Stopper, Stopping
from fedadc.federation import Federation
from fedadc.methods import FedAvg, FedDyn, LocalOnly, Method
from fedadc.models import MLP
from fedadc.models.flat import FlatModel
from fedadc.runs.record import record_of
from fedadc.runs.runner import run
from fedadc.tasks import Classification
from fedadc.training.client_states import ClientStates, Storage, Store
from fedadc.training.ensembles import Ensembles
from fedadc.training.state import Metrics, Round, RunState
from fedadc.training.state_files import FOLDER_PREFIX as STATES
from fedadc.views.local_work import LocalWork

ALL = Evaluation(metrics=Classification.extra_metrics, batch_size=37)


def problem(seed: int, classes: int, n: int = 211, absent: tuple[int, ...] = ()) -> tuple[FlatModel, Samples]:
    """A random linear model in float64 and samples without some classes."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    labels = rng.choice([c for c in range(classes) if c not in absent], size=n)
    x = torch.from_numpy(rng.normal(size=(n, 4)))
    return FlatModel(nn.Sequential(nn.Linear(4, classes)).double()), Samples(x, torch.from_numpy(labels))


def measured(model: FlatModel, samples: Samples, classes: int, evaluation: Evaluation = ALL) -> Metrics:
    return measure(model, model.theta, samples, Inputs(Normalization(), torch.float64), classes, evaluation)


def logits_of(model: FlatModel, samples: Samples) -> Tensor:
    return model.predict(model.theta, samples.x)


@pytest.mark.parametrize("classes", [2, 3, 7, 30])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_are_those_of_scikit_learn(seed: int, classes: int) -> None:
    model, samples = problem(seed, classes)
    found = measured(model, samples, classes)
    logits, true, every = logits_of(model, samples), samples.y.numpy(), list(range(classes))
    predicted, probabilities = logits.argmax(dim=1).numpy(), logits.softmax(dim=1).numpy()
    assert found["accuracy"] == accuracy_score(true, predicted)
    assert found["loss"] == pytest.approx(log_loss(true, probabilities, labels=every), rel=1e-12)
    assert found["macro_f1"] == pytest.approx(f1_score(true, predicted, average="macro"), rel=1e-12)
    recall = recall_score(true, predicted, labels=every, average=None, zero_division=np.nan)
    assert found["per_class"] == pytest.approx(list(recall), rel=1e-12)
    top5 = 1.0 if classes <= 5 else top_k_accuracy_score(true, logits.numpy(), k=5, labels=every)
    assert found["top5"] == pytest.approx(top5, rel=1e-12)


def test_classes_absent_from_the_test_data() -> None:
    model, samples = problem(1, classes=6, absent=(2, 5))
    found = measured(model, samples, 6)
    predicted, true = logits_of(model, samples).argmax(dim=1).numpy(), samples.y.numpy()
    assert isinstance(found["per_class"], list)
    assert [c for c, value in enumerate(found["per_class"]) if value is None] == [2, 5]
    assert found["macro_f1"] == pytest.approx(f1_score(true, predicted, average="macro"), rel=1e-12)


@pytest.mark.parametrize("batch_size", [1, 2, 100, 211, 10**9])
def test_the_cuts_change_no_count_and_the_loss_only_by_rounding(batch_size: int) -> None:
    model, samples = problem(2, classes=7)
    whole, cut = (measured(model, samples, 7, replace(ALL, batch_size=b)) for b in (64, batch_size))
    assert cut.pop("loss") == pytest.approx(whole.pop("loss"), rel=1e-13)
    assert cut == whole


def test_the_same_cuts_give_the_same_bits_whatever_torch_is_set_to() -> None:
    """In float32, in which two threads or another order of additions would show."""
    torch.manual_seed(0)
    model = FlatModel(nn.Sequential(nn.Linear(300, 257), nn.ReLU(), nn.Dropout(0.5), nn.Linear(257, 10)))
    samples = Samples(torch.randn(400, 300), torch.arange(400) % 10)
    inputs, threads, seen = Inputs(Normalization()), torch.get_num_threads(), []
    try:
        for number in (1, 2, 4):
            torch.set_num_threads(number)
            torch.manual_seed(number)
            state, theta = torch.get_rng_state(), model.theta.clone()
            seen.append(measure(model, theta, samples, inputs, 10, Evaluation(metrics=Classification.extra_metrics)))
            assert torch.get_num_threads() == number and torch.equal(torch.get_rng_state(), state)
            assert model.module.training and torch.equal(model.theta, theta) and not model.gradient.any()
    finally:
        torch.set_num_threads(threads)
    assert seen[0] == seen[1] == seen[2]


def test_theta_that_is_given_is_measured_not_the_one_in_the_model() -> None:
    model, samples = problem(3, classes=4)
    other = torch.zeros_like(model.theta)
    found = measure(model, other, samples, Inputs(Normalization(), torch.float64), 4, ALL)
    assert found["loss"] == pytest.approx(math.log(4), rel=1e-14) and model.theta.any()


def measure(
    model: FlatModel, theta: Tensor, samples: Samples, inputs: Inputs, classes: int, evaluation: Evaluation
) -> Metrics:
    return MetricCounter(model, {"test": samples}, inputs, Classification(classes), evaluation)(theta)["test"]


def evaluator_of(model: FlatModel, parts: dict[str, Samples], evaluation: Evaluation | None = None) -> Evaluator:
    inputs = Inputs(Normalization(), torch.float64)
    counter = MetricCounter(model, parts, inputs, Classification(3), evaluation or Evaluation())
    return Evaluator(
        FedAvg(), Ensembles(), 1, counter, lambda theta, batches: [counter.count(theta, batch) for batch in batches]
    )


def state_of(theta: torch.Tensor) -> RunState:
    return RunState(0, theta, {}, ClientStates(Store(Storage())))


def test_every_split_has_metrics_of_its_own() -> None:
    model, samples = problem(4, classes=3)
    parts = {"validation": samples.take(np.arange(50)), "test": samples.take(np.arange(50, 211))}
    found = evaluator_of(model, parts)(state_of(model.theta))
    assert list(found) == ["validation_accuracy", "validation_loss", "test_accuracy", "test_loss"]
    for name, part in parts.items():
        assert found[f"{name}_accuracy"] == measured(model, part, 3)["accuracy"]


@pytest.mark.parametrize(
    ("setting", "value"), [("every", 0), ("batch_size", 0), ("metrics", ("f1",)), ("metrics", ("auroc",))]
)
def test_impossible_evaluations_are_refused(setting: str, value: object) -> None:
    with pytest.raises(FedadcError, match=setting):
        Evaluation(**{setting: value})  # type: ignore[arg-type]


# --- a stream of rounds ----------------------------------------------------------------------------------------------


def rounds(*metrics: Metrics) -> list[Round]:
    state = state_of(torch.zeros(1))
    return [Round(t, 0.1, 1.0, (0,), 4, 4, 0.0, state, m) for t, m in enumerate(metrics, start=1)]


@pytest.mark.parametrize(("every", "last", "due"), [(1, 4, [1, 2, 3, 4]), (2, 5, [2, 4, 5]), (10, 4, [4]), (3, 3, [3])])
def test_rounds_are_evaluated_where_due_and_the_last_always(every: int, last: int, due: list[int]) -> None:
    assert evaluated_rounds(Evaluation(every=every), last) == due


def test_several_rounds_at_the_end_may_all_be_evaluated() -> None:
    assert evaluated_rounds(Evaluation(every=4, last=3), 10) == [4, 8, 9, 10]
    assert evaluated_rounds(Evaluation(every=5, last=100), 3) == [1, 2, 3]
    with pytest.raises(FedadcError, match="last must be at least 1, not 0"):
        Evaluation(last=0)


def evaluated_rounds(evaluation: Evaluation, last: int) -> list[int]:
    model, samples = problem(5, classes=3)
    evaluator, state = evaluator_of(model, {"test": samples}, evaluation), state_of(model.theta)
    stream = [Round(t, 0.1, 1.0, (0,), 4, 4, 0.0, state) for t in range(1, last + 1)]
    found = [r.round for r in evaluator.follow(stream, last) if r.metrics]
    assert found == evaluation.rounds_due(last)
    return found


@pytest.mark.parametrize(
    ("metrics", "accuracy", "ends"),
    [
        ([{"test_accuracy": 0.2}, {"test_accuracy": 0.8}, {"test_accuracy": 0.9}], 0.8, 2),
        ([{"test_accuracy": 0.2}, {}, {"test_accuracy": 0.9}], 0.5, 3),
        ([{"test_accuracy": 0.2}, {"test_accuracy": 0.3}], 0.9, 2),
        ([{"test_accuracy": 0.9}, {"test_accuracy": 0.9}], None, 2),
        ([{"test_accuracy": 1.0, "validation_accuracy": 0.1}, {"test_accuracy": 0, "validation_accuracy": 1.0}], 1, 2),
        ([{}, {}], 0.1, 2),
    ],
)  # fmt: skip
def test_a_stream_ends_after_the_round_that_reaches_the_accuracy(
    metrics: list[Metrics], accuracy: float | None, ends: int
) -> None:
    stopper = Stopper(Stopping(accuracy=accuracy), Evaluation(), len(metrics))
    assert [r.round for r in stopper.follow(rounds(*metrics))] == list(range(1, ends + 1))


def test_no_round_is_trained_beyond_the_one_that_ends_it() -> None:
    stream = iter(rounds({"test_accuracy": 0.9}, {"test_accuracy": 0.9}))
    assert len(list(Stopper(Stopping(accuracy=0.5), Evaluation(), 2).follow(stream))) == 1
    assert next(stream).round == 2, "the second round was not asked for"


# --- methods with two models, or with one per client -----------------------------------------------------------------


def trained(method: Method, rounds: int = 4, **kw: Any) -> tuple[Federation, list[Round]]:
    torch.manual_seed(0)
    work = LocalWork(epochs=1, batch_size=4, lr=0.2)
    settings: dict[str, Any] = {"data": small_federation(), "cohort": 2, "evaluation": ALL}
    federation = Federation(model=MLP((5,), 4, [6]).double(), method=method, local=work, **settings | kw)
    return federation, list(federation.rounds(rounds))


@pytest.mark.parametrize(("judged", "other"), [("mean", "server"), ("server", "mean")])
def test_both_models_of_feddyn_are_measured_first_the_one_that_is_judged(judged: Any, other: str) -> None:
    federation, rounds = trained(FedDyn(alpha=0.5, judged_by=judged))
    for result in rounds:
        theta, h = result.state.theta, result.state.server["h"]
        models = {"mean": theta + h / 0.5, "server": theta}
        expected = federation.evaluator.of_model(models[judged])
        expected |= {f"{other}_{key}": value for key, value in federation.evaluator.of_model(models[other]).items()}
        assert list(result.metrics.items()) == list(expected.items()) and len(expected) == 10
        assert result.test_accuracy == expected["test_accuracy"] == record_of(result)["test_accuracy"]
        assert result.metrics["test_loss"] != result.metrics[f"{other}_test_loss"]
        assert record_of(result)[f"{other}_test_accuracy"] == expected[f"{other}_test_accuracy"]
    saved = federation.models(rounds[-1].state)
    assert list(saved) == [judged, other]
    for name, vector in models.items():
        expected_dict = federation.model.state_dict(vector)
        assert all(torch.equal(tensor, expected_dict[key]) for key, tensor in saved[name].items())
    assert all(torch.equal(t, saved[judged][k]) for k, t in federation.state_dict(rounds[-1].state).items())


def test_who_is_judged_changes_names_and_nothing_else() -> None:
    (_, by_mean), (_, by_server) = (trained(FedDyn(judged_by=judged)) for judged in ("mean", "server"))
    for one, two in zip(by_mean, by_server, strict=True):
        assert torch.equal(one.state.theta, two.state.theta)
        for key in ("test_accuracy", "test_loss", "test_top5", "test_macro_f1", "test_per_class"):
            assert one.metrics[key] == two.metrics[f"mean_{key}"] and two.metrics[key] == one.metrics[f"server_{key}"]


def test_a_run_is_stopped_by_the_model_that_is_judged() -> None:
    ends = []
    for judged in ("mean", "server"):
        federation, whole = trained(FedDyn(judged_by=judged), rounds=8)
        ends.append(len(list(federation.rounds(8, stop_at_accuracy=0.4))))
        assert ends[-1] == next(r.round for r in whole if (r.test_accuracy or 0) >= 0.4)
    assert ends[0] != ends[1]


@pytest.mark.parametrize(("judged", "other"), [("mean", "server"), ("server", "mean")])
def test_both_models_are_saved_and_evaluated_again(call: Call, tmp_path: Path, judged: str, other: str) -> None:
    config = {**SMALL, "method": {"name": "feddyn", "judged_by": judged}}
    result = run(config, out=tmp_path / "a")
    assert {p.name for p in (tmp_path / "a").iterdir()} == FILES | {f"model-{other}.safetensors"}
    models = result.plan.federation.models(result.state)
    for name, file in ((judged, "model.safetensors"), (other, f"model-{other}.safetensors")):
        with safe_open(tmp_path / "a" / file, "pt") as opened:
            assert opened.metadata() == {"model": f"{name} after round 3"}
        loaded = load_file(tmp_path / "a" / file)
        assert loaded.keys() == models[name].keys() and all(torch.equal(loaded[k], models[name][k]) for k in loaded)
    last = records(tmp_path / "a")[-1]
    assert last == result.history[-1] and last["test_loss"] != last[f"{other}_test_loss"]
    assert json.loads(fine(call("evaluate", "a", "--json"))) == {
        split: {"accuracy": last[f"{key}accuracy"], "loss": last[f"{key}loss"]}
        for split, key in (("test", "test_"), (f"{other} test", f"{other}_test_"))
    }
    assert f"{other} test" in fine(call("evaluate", "a"))
    (tmp_path / f"a/model-{other}.safetensors").write_bytes(b"nonsense")
    refused(call("evaluate", "a"), f"model-{other}.safetensors is not a safetensors file", code=5)


@pytest.mark.parametrize("cohort", [2, None])
def test_clients_alone_are_judged_by_the_mean_over_all_of_them(cohort: int | None) -> None:
    """Those never selected have the initial model; a class that the test data lacks has no share for anybody."""
    data = small_federation()
    assert data.test is not None
    without = data.test.take(np.flatnonzero(data.test.y.numpy() != 2))
    federation, rounds = trained(LocalOnly(), 2, data=replace(data, test=without, validation=data.test), cohort=cohort)
    start = federation.start().theta
    for result in rounds:
        own = result.state.clients
        assert len(own) == 6 if cohort is None else 0 < len(own) < 6
        assert (result.bytes_up, result.bytes_down) == (0, 0) and torch.equal(result.state.theta, start)
        each = [federation.evaluator.of_model(own[k]["model"] if k in own else start) for k in range(6)]
        assert len({metrics["test_loss"] for metrics in each}) == min(len(own) + 1, 6)
        assert result.metrics.keys() == each[0].keys() and len(each[0]) == 10
        for key, value in result.metrics.items():
            mean = np.mean([np.array(metrics[key], dtype=float) for metrics in each], axis=0)  # None becomes NaN
            np.testing.assert_allclose(np.array(value, dtype=float), mean, rtol=1e-12)
        shares = result.metrics["test_per_class"]
        assert isinstance(shares, list) and [c for c in range(4) if shares[c] is None] == [2]


def test_clients_alone_leave_no_model(call: Call, tmp_path: Path) -> None:
    result = run({**SMALL, "method": "local_only"}, out=tmp_path / "a")
    assert {p.name for p in (tmp_path / "a").iterdir()} == FILES - {"model.safetensors"}
    assert all(r["bytes_up"] == r["bytes_down"] == 0 for r in records(tmp_path / "a"))
    assert "personal test" in json.loads(fine(call("evaluate", "a", "--json")))
    with pytest.raises(FedadcError, match="LocalOnly has no global model"):
        _ = result.state_dict
    assert [row["bytes_up"] for row in json.loads(fine(call("compare", "a", "--json")))] == [0]


@pytest.mark.parametrize(("method", "files"), [("fedavg", FILES), ("local_only", FILES - {"model.safetensors"})])
def test_all_that_a_run_left_is_overwritten_and_nothing_else(
    call: Call, tmp_path: Path, method: str, files: set[str]
) -> None:
    place = tmp_path / "a"
    fine(call("run", "small.yaml", "method=feddyn", "--out", "a"))
    (place / f"{STATES}killed").mkdir()
    (place / f"{STATES}killed/1.safetensors").write_bytes(b"a state")
    for half in ("model.safetensors.part", "model-server.safetensors.part"):
        (place / half).write_bytes(b"half")
    refused(call("run", "small.yaml", "--out", "a"), "--overwrite")
    for foreign in ("thesis.txt", "server-model.safetensors", "model-thesis.safetensors", f"{STATES}notes.txt"):
        (place / foreign).write_text("years of work")
        before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
        refused(call("run", "small.yaml", f"method={method}", "--out", "a", "--overwrite"), foreign)
        assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before
        (place / foreign).unlink()
    fine(call("run", "small.yaml", f"method={method}", "--out", "a", "--overwrite"))
    assert {p.name for p in place.iterdir()} == files
