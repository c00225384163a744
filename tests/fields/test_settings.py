"""Settings refuse values of a wrong type in one sentence, in Python as in a config; users' classes keep working."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
import typing
import weakref
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedadc
from fedadc import LocalWork
from fedadc.communication.clock import DISTRIBUTIONS, Clock
from fedadc.config.settings import TABLES, Config
from fedadc.errors import FedadcError
from fedadc.fields.settings import Settings
from fedadc.methods import FedADC, FedAvg, Method
from fedadc.personal.calibrate import Calibration
from fedadc.personal.request import Request
from fedadc.runs.record import load_config
from fedadc.studies.experiment import Candidate, Experiment
from fedadc.studies.trial_file import SweepTrial
from public import public_objects

REQUIRED: dict[type, dict[str, Any]] = {  # values of the fields without a default
    DISTRIBUTIONS["constant"]: {"value": 1.0},
    DISTRIBUTIONS["uniform"]: {"low": 1.0, "high": 2.0},
    DISTRIBUTIONS["lognormal"]: {"median": 1.0},
    DISTRIBUTIONS["exponential"]: {"mean": 1.0},
    Calibration: {"work": LocalWork()},
    SweepTrial: {"trial": 0, "settings": {"local.lr": 0.1}},
    Experiment: {"title": "a", "base": {}, "runs": {"b": None}, "seeds": [0], "budget": 1},
}


def every_settings_class() -> list[type[Settings]]:
    """The classes of the package, found through their base class."""
    found, queue = [], [Settings]
    for cls in queue:
        below = [c for c in cls.__subclasses__() if c.__module__.startswith("fedadc.")]
        queue += below
        found += below
    return sorted(set(found), key=lambda cls: cls.__name__)


def required(cls: type[Settings]) -> dict[str, Any]:
    tree = {"rounds": 1, "data": {"name": "digits", "clients": 2}, "model": {"name": "mlp"}}
    values: dict[type, dict[str, Any]] = {
        Config: vars(load_config(tree)),
        **{c: vars(node) for c in every_settings_class() if (node := _node(load_config(tree), c)) is not None},
    }
    return REQUIRED.get(cls) or {k: v for k, v in values.get(cls, {}).items() if k in cls.__dataclass_fields__}


def _node(config: Config, cls: type) -> Any:
    if cls.__name__ == "Normalize":
        return cls(mean=[0.5], std=(1,))
    return next((node for node in (config.data, config.model) if type(node) is cls), None)


CLASSES = every_settings_class()
FIELDS = [(cls, f.name) for cls in CLASSES for f in dataclasses.fields(cls)]
UNCHECKED = {
    (Request, "clients"),  # a text or any sequence of numbers and names, read later
    (Config, "code"),  # set by `parse_config`, not by users
}


TEXTS = (str, str | None, float | str | None, Path, Path | None)  # a text may stand for a path


class Odd:
    """A value that fits no field."""

    def __repr__(self) -> str:
        return "an odd\nvalue"


def test_every_class_of_settings_is_found() -> None:
    tables = {cls for table in TABLES.values() for cls in table.values()}
    public = {value for value in public_objects().values() if isinstance(value, type)}
    settings = {
        cls for cls in public if isinstance(cls, type) and dataclasses.is_dataclass(cls) and issubclass(cls, Settings)
    }
    assert tables | settings <= set(CLASSES) and {Config, Candidate, Clock, LocalWork} <= set(CLASSES)
    not_settings = {"Batch", "Dataset", "Local", "PersonalizationResult", "Round", "RoundInfo", "RunState"}
    not_settings |= {"Agreement", "Client", "Clients", "DataSpec", "InProcess", "Remote"}
    not_settings |= {"Roster", "RunResult", "Samples"}
    dataclass_names = {c.__name__ for c in public if isinstance(c, type) and dataclasses.is_dataclass(c)}
    assert dataclass_names - {c.__name__ for c in settings} == {*not_settings, "Setup"}, "each is one or the other"


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda v: getattr(v, "__name__", v))
def test_a_value_of_a_wrong_type_is_refused_in_one_sentence(cls: type[Settings], name: str) -> None:
    given = required(cls)
    cls(**given)
    if (cls, name) in UNCHECKED:
        return
    hint = typing.get_type_hints(cls)[name]
    for wrong in (Odd(), [Odd()], 1j, *(() if hint in TEXTS else ("x y",))):
        with pytest.raises(FedadcError) as caught:
            cls(**{**given, name: wrong})
        message = str(caught.value)
        assert message.startswith(f"{name} must be ") and message.endswith(".") and "\n" not in message


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_numbers_of_numpy_become_those_of_python(cls: type[Settings]) -> None:
    whole = cls(**required(cls))
    for f in dataclasses.fields(cls):
        value = getattr(whole, f.name)
        if type(value) in (int, float):
            again = replace(whole, **{f.name: np.array(value)[()]})
            assert again == whole and type(getattr(again, f.name)) is type(value)


def test_a_list_becomes_a_tuple_and_a_whole_number_a_float() -> None:
    assert fedadc.evaluation.Evaluation(metrics=["top5"]).metrics == ("top5",)  # type: ignore[arg-type]
    assert fedadc.data.Normalization(255, [1], np.ones(1)) == fedadc.data.Normalization(255.0, (1.0,), (1.0,))  # type: ignore[arg-type]
    assert type(LocalWork(lr=1).lr) is float


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalWork(steps="5"), "steps must be a whole number, not '5'."),  # type: ignore[arg-type]
        (lambda: LocalWork(steps=0), "steps must be at least 1, not 0."),
        (lambda: LocalWork(steps=2, epochs=2), "set steps or epochs, not both; leave the other one empty."),
        (lambda: LocalWork(schedule="cosine"), "schedule must be a Schedule, not 'cosine'."),  # type: ignore[arg-type]
        (
            lambda: LocalWork(schedule=fedadc.schedules.Cosine),
            "schedule must be a Schedule, not the class Cosine; add ().",
        ),  # type: ignore[arg-type]
        (lambda: FedADC(beta="x"), "beta must be a number, not 'x'."),  # type: ignore[arg-type]
        (lambda: FedADC(beta=1), "beta must be in [0, 1), not 1.0."),
        (lambda: FedADC(nesterov=1), "nesterov must be true or false, not 1."),  # type: ignore[arg-type]
        (lambda: fedadc.methods.FedDyn(judged_by="all"), "judged_by must be 'mean' or 'server', not 'all'."),  # type: ignore[arg-type]
        (lambda: fedadc.schedules.Step(every=0), "every must be at least 1, not 0."),
        (lambda: fedadc.training.Faults(drop=2), "drop must be a share of the cohort in [0, 1], not 2.0."),
        (lambda: fedadc.training.Ensembles(swa=True), "swa must be a SWA, not True."),  # type: ignore[arg-type]
        (lambda: fedadc.training.EMA(decay=1), "decay must be in [0, 1), not 1.0."),
        (lambda: fedadc.communication.Between(low=2, high=1), "low must be at most high, not 2.0 and 1.0."),
        (lambda: fedadc.communication.TopK(share=0), "share must be in (0, 1], not 0.0."),
        (
            lambda: fedadc.evaluation.Evaluation(metrics=("top",)),
            "metrics: metric 'top' is unknown; did you mean 'top5'?",
        ),
    ],
)
def test_messages_name_arguments_as_python_has_them(make: Any, message: str) -> None:
    with pytest.raises(FedadcError) as caught:
        make()
    assert str(caught.value) == message


LEAST = {"rounds": 2, "data": {"name": "digits", "clients": 5}, "model": {"name": "logistic"}}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("local", {"steps": 0}, "local.steps must be at least 1, not 0."),
        ("local", {"steps": 2, "epochs": 2}, "local: set steps or epochs, not both; leave the other one empty."),
        ("local", {"schedule": {"name": "step", "every": 0}}, "local.schedule.every must be at least 1, not 0."),
        ("method", {"name": "fedadc", "beta": 1}, "method.beta must be in [0, 1), not 1.0."),
        ("method", {"name": "feddyn", "judged_by": "x"}, "method.judged_by must be 'mean' or 'server', not 'x'."),
        ("ensembles", {"ema": {"decay": 1}}, "ensembles.ema.decay must be in [0, 1), not 1.0."),
        ("clock", {"down": -1}, "clock.down.value must be between 0 and 1e+12, not -1.0."),
        ("clock", {"trace": "a.csv", "up": 3}, "clock.trace already gives the values of all clients; leave out up."),
        ("faults", {"drop": 0.9, "slow": 0.9}, "faults.drop and slow are shares of one cohort, so their sum is at most "
         "1, not 1.8."),
        ("evaluate", {"metrics": ["top"]}, "evaluate.metrics: metric 'top' is unknown; did you mean 'top5'?"),
        ("cohort", {"selection": {"name": "covering", "looks": 9e9}}, "cohort.selection.looks must be a whole number, "
         "not 9000000000.0."),
        ("cohort", {"selection": {"name": "covering", "looks": 17}},
         "cohort.selection.looks must be in 0..16, not 17."),
        ("rounds", 0, "rounds must be at least 1, not 0."),
        ("rounds", np.float64(2), "rounds must be a whole number, not np.float64(2.0)."),
    ],
)  # fmt: skip
def test_a_config_puts_the_path_before_the_same_messages(key: str, value: Any, message: str) -> None:
    with pytest.raises(FedadcError) as caught:
        load_config({**LEAST, key: value})
    assert str(caught.value) == message


def test_a_mapping_may_have_numbers_of_numpy_and_its_yaml_is_plain() -> None:
    config = load_config({**LEAST, "rounds": np.int64(3), "local": {"lr": np.float32(0.5)}})
    assert load_config({**LEAST, "rounds": 3, "local": {"lr": 0.5}}).yaml() == config.yaml()
    assert replace(config, rounds=np.int64(3)).yaml() == config.yaml()


# --- user-defined classes --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WithoutSuper(Method):
    gain: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "gain", 2 * self.gain)


@dataclass(frozen=True, kw_only=True)
class WithAnyTypes(Method):
    tensor: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(2))
    array: np.ndarray | None = None
    call: typing.Callable[[int], int] = abs
    own: Odd = dataclasses.field(default_factory=Odd)
    several: list[Odd] | dict[Odd, int] | None = None
    gain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class WithUnknownName(Method):
    thing: OnlyForTypeCheckers = 3  # type: ignore[name-defined]  # noqa: F821
    gain: float = 1.0


@dataclass(frozen=True, kw_only=True)
class WithInitVar(Method):
    seed: InitVar[int] = 3
    later: int = dataclasses.field(init=False)


class WithOwnConstructor(Method):
    def __init__(self, gain: str) -> None:
        object.__setattr__(self, "gain", gain)


def test_user_defined_classes_keep_working() -> None:
    assert WithoutSuper(gain=3).gain == 6 and WithOwnConstructor("x").gain == "x"  # type: ignore[attr-defined]
    odd: Any = WithAnyTypes(tensor=3, array="x", call=None, own=7, several=8)  # type: ignore[arg-type]
    assert (odd.tensor, odd.array, odd.call, odd.own, odd.several) == (3, "x", None, 7, 8), "unknown types: no check"
    with pytest.raises(FedadcError, match=r"^gain must be a number, not 'x'\.$"):
        WithAnyTypes(gain="x")  # type: ignore[arg-type]
    assert WithUnknownName(gain="x").thing == 3  # type: ignore[arg-type]
    assert not hasattr(WithInitVar(seed=2), "later")


def test_a_class_that_is_gone_is_not_kept_alive() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(FedAvg):
        gain: int = 3

    Mine(gain=np.int64(4))
    gone = weakref.ref(Mine)
    del Mine
    gc.collect()
    assert gone() is None


def test_copies_and_pickles_are_equal() -> None:
    work = LocalWork(steps=np.int64(3), schedule=fedadc.schedules.Cosine())
    assert copy.deepcopy(work) == pickle.loads(pickle.dumps(work)) == replace(work) == work
    assert hash(copy.copy(work)) == hash(work)


# --- cost ------------------------------------------------------------------------------------------------------------


def calls(make: Any) -> int:
    """How many functions are called, in Python and in C."""
    make()  # what is done once is done now
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        make()
    finally:
        sys.setprofile(before)
    return count


def test_checking_takes_microseconds() -> None:
    """Counted in calls, which cost about 0.1 µs each: seconds would depend on what else the machine does."""
    work = LocalWork(steps=3)
    makes = (lambda: replace(work, lr=0.2), lambda: FedADC(beta=0.5), lambda: LocalWork(steps=np.int64(3)), Clock)
    assert [count for count in map(calls, makes) if count > 200] == []  # 33 to 146


def test_settings_are_made_without_pydantic() -> None:
    made = [
        "LocalWork(steps=3)",
        "methods.FedADC()",
        "evaluation.Evaluation()",
        "training.Faults()",
        "communication.Clock()",
    ]
    made += ["selections.Covering()", "objectives.SelfConfidence()", "data.HeldOut(test=0.5)"]
    code = f"import sys, fedadc; {', '.join(f'fedadc.{one}' for one in made)}; assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
