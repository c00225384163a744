"""`print` of every public object is short, whatever it holds, and names what matters."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedadc
from fedadc.communication.ledger import Ledger
from fedadc.data.batches import ClientData, Inputs
from fedadc.fields.settings import Settings
from fedadc.fields.summary import LONGEST, short, summary
from fedadc.models.flat import FlatModel
from fedadc.personal.results import ClientTotal, ResultRow
from fedadc.runs.record import RecordedRun, read_run
from fedadc.training.client_states import ClientStates, Store
from fedadc.training.ensembles import EMA, SWA, Lookahead
from public import public_objects

THREE_LINES = 3 * 120
MANY = 200_000


def seen_by_methods(model: nn.Module, data: fedadc.Dataset) -> tuple[fedadc.views.Local, fedadc.views.Setup]:
    """What a method sees at a client and before training."""
    seen: list[Any] = []

    class Looking(fedadc.methods.FedAvg):
        def check(self, setup: fedadc.views.Setup) -> None:
            seen.append(setup)

        def finish(self, theta: Any, local: fedadc.views.Local) -> Any:
            seen.append(local)
            return super().finish(theta, local)

    next(fedadc.Federation(model=model, data=replace(data, owners=None), test=0, clients=3, method=Looking()).rounds(1))
    return seen[1], seen[0]


def printed_objects(folder: Path) -> dict[str, tuple[Any, list[str]]]:
    """An object of every public class, with much in it, and what its text must name."""
    x, y = torch.rand(MANY, 1, 2, 2), torch.arange(MANY) % 100
    names = tuple(f"class {i}" for i in range(100))
    data = fedadc.Dataset("mine", fedadc.from_arrays(x, y).train, names, notes=("n" * 500,), owners=np.arange(MANY))
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 100))
    local, setup = seen_by_methods(model, data)
    theta = torch.zeros(10**6)
    store = Store(fedadc.training.Storage())
    clients = ClientStates(store).updated({k: store.keep({"h": torch.zeros(2)}, 1) for k in range(3000)})
    state = fedadc.training.RunState(3, theta, {f"v{i}": theta for i in range(50)}, clients, 9)
    cohort, metrics = tuple(range(MANY)), {"test_accuracy": 0.75, "test_per_class": [0.5] * 1000}
    round = fedadc.training.Round(
        3, 0.1, 1.5, cohort, Ledger({"delta": 5}, {"theta": 7}), 9, 0.5, state, metrics, cohort
    )
    tree = {"rounds": 2, "data": {"name": "digits", "clients": 5}, "model": {"name": "mlp", "hidden": [64] * 50}}
    result = fedadc.run({**tree, "label": "L" * 900, "method": "fedadc+"}, out=folder / "a")
    federation = result.plan.federation
    row = ResultRow("run", "prox", "", [ClientTotal(k, "a", 3, 2, 2, 1) for k in range(5000)])
    known: dict[str, tuple[Any, list[str]]] = {
        "Batch": (
            fedadc.data.Batch(x, y, np.arange(MANY)), [f"x=float32[{MANY}, 1, 2, 2]", f"position=int64[{MANY}]"],
        ),
        "Checkpoints": (fedadc.runs.Checkpoints(folder / "c", federation), [str(folder / "c"), "round=0"]),
        "Config": (
            result.config,
            ["rounds=2", "seed=0", "data='digits'", "clients=5", "model='mlp'", "method=FedADC(", "beta=0.9"],
        ),
        "Dataset": (data, ["mine", "200,000 train", "natural clients", "shape 1×2×2", "100 classes"]),
        "Federation": (federation, ["MLP", "5 clients", "FedADC with SelfConfidence", "lr 0.1"]),
        "Local": (local, ["FlatModel(Sequential, 500 parameters", "lr=0.1", "steps=", "start=float32[500]"]),
        "Normalization": (
            fedadc.data.Normalization(255, (0.5,) * 1000, (1,) * 1000), ["scale=255", "0.5", "1000 in all"],
        ),
        "PersonalizationResult": (
            fedadc.personal.PersonalizationResult([row] * 50, [folder] * 50),
            ["<run, prox: 5000 clients>", "50 in all"],
        ),
        "Round": (
            round,
            ["round=3", "lr=0.1", "train_loss=1.5", "test_accuracy=0.75", f"{MANY} in all", "bytes_up=5", "dropped"],
        ),
        "RoundInfo": (fedadc.views.RoundInfo(1, 0.1, 2, 3), ["round=1", "lr=0.1", "counted=2", "clients=3"]),
        "RunResult": (result, ["data='digits'", "method='FedADC'", "round=2", "test_accuracy=0.", str(folder / "a")]),
        "RunState": (state, ["round=3", "theta=float32[1000000]", "50 in all", "3000 clients", "horizon=9"]),
        "Setup": (setup, ["FlatModel", "example=float32[2, 1, 2, 2]", "weighting='uniform'", "client_sizes=int64[3]"]),
    }  # fmt: skip
    settings = {
        "Fixed": {"value": 1}, "Between": {"low": 1, "high": 2}, "LogNormal": {"median": 1},
        "SelfConfidence": {"teacher": "lookahead"}, "FedADC": {"objective": fedadc.objectives.SelfConfidence()},
        "Ensembles": {"swa": SWA(), "ema": EMA(), "lookahead": Lookahead()},
    }  # fmt: skip
    for name, cls in public_objects().items():
        if isinstance(cls, type) and issubclass(cls, Settings) and name not in known:
            made = cls(**settings.get(name, {}))
            known[name] = (made, [name, *(f"{f.name}=" for f in dataclasses.fields(made))])
    return known | {
        "RecordedRun": (read_run(folder / "a"), [str(folder / "a"), "round=2", "test_accuracy=0."]),
        "FlatModel": (FlatModel(nn.Linear(3, 2)), ["Linear, 8 parameters, float32 on cpu"]),
        "ClientStates": (clients, ["3000 clients"]),
        "ClientData": (
            ClientData(data.train, np.arange(9), data.task, Inputs(data.normalization), fedadc.data.Augment()),
            ["indices=int64[9]"],
        ),
    }  # fmt: skip


def test_every_public_object_prints_in_three_lines_and_names_what_matters(tmp_path: Path) -> None:
    objects = printed_objects(tmp_path)
    classes = {name for name in fedadc.__all__ if isinstance(getattr(fedadc, name), type)}
    assert classes - {"FedadcError", "Diverged"} <= objects.keys()
    for name, (made, facts) in objects.items():
        started = time.perf_counter()
        text = repr(made)
        assert time.perf_counter() - started < 0.1, f"{name} computes something"
        assert text == str(made) and len(text) <= THREE_LINES and "\n" not in text, f"{name}: {text}"
        assert type(made).__name__ in text or name in ("ClientStates",), text
        assert all(fact in text for fact in facts), f"{text} lacks {[f for f in facts if f not in text]}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(3, 2), "float32[3, 2]"),
        (np.zeros(3, bool), "bool[3]"),
        (0.1 + 0.2, "0.3"),
        ((1, 2, 3), "[1, 2, 3]"),
        ([1, 2, 3, 4], "[1, 2, 3, … 4 in all]"),
        ({"a": 1.0, "b": torch.zeros(0)}, "{a: 1, b: float32[0]}"),
        (Path("a/b"), "'a/b'"),
        ("x" * 500, "'" + "x" * 97 + "…'"),
        (RecordedRun(Path("p" * 500), {}, []), "RecordedRun(…)"),
    ],
    ids=str,
)
def test_values_in_a_few_words(value: Any, text: str) -> None:
    assert short(value) == text


def test_a_summary_leaves_out_what_is_empty_and_ends_somewhere() -> None:
    assert summary("A", {"a": None, "b": (), "c": "", "d": {}, "e": 0, "f": False, "g": lambda: 1}) == "A(e=0, f=False)"
    assert len(summary("A", {f"fact{i}": "x" * 1000 for i in range(1000)})) == LONGEST
