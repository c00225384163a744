"""The config: accepted values, defaults, and the messages with which invalid values are rejected."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fedadc.config.build import build_agreement, complete, load_data, prepare
from fedadc.config.settings import Config
from fedadc.config.yaml import LARGEST_FILE
from fedadc.errors import FedadcError
from fedadc.methods import METHODS, PAIRS
from fedadc.objectives import OBJECTIVES
from fedadc.partitions import PARTITIONS
from fedadc.runs.record import load_config
from fedadc.schedules import SCHEDULES
from fedadc.selections import SELECTIONS
from fedadc.system.files import to_safetensors

README = """\
seed: 0
rounds: 60
data: {name: digits, clients: 50, partition: {name: sort, labels_per_client: 2}}
model: {name: mlp, hidden: [64, 64]}
method: {name: fedadc, beta: 0.9, nesterov: true}
objective: {name: cross_entropy}
local: {steps: 8, batch_size: 16, lr: 0.1, weight_decay: 0.0, momentum: 0.0}
cohort: {size: 10}
evaluate: {every: 1}
"""
LEAST = {"rounds": 2, "data": {"name": "digits", "clients": 5}, "model": {"name": "logistic"}}


def changed(path: str, value: Any, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """The config of the README with one node replaced."""
    tree = copy.deepcopy(base) if base is not None else yaml.safe_load(README)
    node = tree
    *above, last = path.split(".")
    for key in above:
        node = node.setdefault(key, {})
    node[last] = value
    return tree


def refusal(source: Any, overrides: tuple[str, ...] = (), build: bool = True) -> str:
    """The one-sentence error message for an invalid config."""
    with pytest.raises(FedadcError) as caught:
        config = load_config(source, overrides)
        if build:
            prepare(config)
    message = str(caught.value)
    assert "\n" not in message.strip(), "a refusal is one sentence on one line"
    return message


def file_of(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# --- accepted values and defaults ------------------------------------------------------------------------------------


def test_the_config_of_the_readme_means_what_it_says(tmp_path: Path) -> None:
    config = load_config(file_of(tmp_path, README))
    federation = prepare(config).federation
    assert config.rounds == 60 and federation.seed == 0 and len(federation.clients) == 50
    assert federation.coordinator.cohort == 10
    assert (config.local.steps, config.local.batch_size, config.local.lr) == (8, 16, 0.1)
    assert federation.model.theta.numel() == 64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10
    counts = federation.clients.class_counts(federation.data.train.y, 10)
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert type(federation.method).__name__ == "FedADC" and federation.method.nesterov  # type: ignore[attr-defined]


ENTRIES = [
    *(("method", name) for name in (*METHODS, *PAIRS)),
    *(("objective", name) for name in OBJECTIVES),
    *(("data.partition", name) for name in PARTITIONS),
    *(("local.schedule", name) for name in SCHEDULES),
    *(("cohort.selection", name) for name in SELECTIONS),
]


@pytest.mark.parametrize(("node", "name"), ENTRIES)
def test_a_name_may_be_written_in_any_case(node: str, name: str) -> None:
    without_objective = {key: value for key, value in LEAST.items() if key != "objective"}
    for spelling in (name.upper(), name.title()):
        written, plain = (load_config(changed(node, n, without_objective)).tree() for n in (spelling, name))
        assert written == plain


def test_names_of_data_models_and_presets_may_be_written_in_any_case() -> None:
    tree = load_config({**LEAST, "data": {"name": "Digits", "clients": 5}, "model": "MLP"}, presets=["FedADC"]).tree()
    assert (tree["data"]["name"], tree["model"]["name"], tree["method"]["name"]) == ("digits", "mlp", "fedadc")


@pytest.mark.parametrize(("node", "name"), ENTRIES)
@pytest.mark.parametrize("short", [False, True], ids=["mapping", "name only"])
def test_the_resolved_config_survives_the_round_trip(tmp_path: Path, node: str, name: str, short: bool) -> None:
    tree = changed(node, name if short else {"name": name})
    if name in PAIRS:
        del tree["objective"]
    config = load_config(tree)
    again = load_config(file_of(tmp_path, config.yaml()))
    assert again == config and again.tree() == config.tree()
    assert load_config(config) == config


def test_a_prepared_config_is_complete_and_stays_the_same(tmp_path: Path) -> None:
    plan = prepare(load_config(LEAST))
    tree = plan.config.tree()
    assert tree["data"]["test"] == 0.2 and tree["data"]["partition"] == {"name": "iid"}
    assert tree["data"]["clients"] == 5 and tree["model"]["init"] == "default"
    assert prepare(load_config(file_of(tmp_path, plan.config.yaml()))).config == plan.config


def test_a_prepared_config_names_the_settings_of_the_model() -> None:
    """Otherwise the records of two runs with different widths could not be distinguished."""
    tree = prepare(load_config(changed("model", {"name": "mlp"}))).config.tree()
    assert list(tree["model"]["hidden"]) == [64, 64]


@pytest.mark.parametrize(
    ("given", "path", "expected"),
    [
        ({}, ("seed",), 0),
        ({"seed": 7}, ("data", "seed"), 7),
        ({"seed": 7}, ("model", "seed"), 7),
        ({"seed": 7, "data.seed": 3}, ("data", "seed"), 3),
        ({"seed": 7, "data.seed": 3}, ("model", "seed"), 7),
        ({"rounds": 9, "local.schedule": "cosine"}, ("local", "schedule", "horizon"), 9),
        ({"local.schedule": {"name": "cosine", "horizon": 4}}, ("local", "schedule", "horizon"), 4),
        ({"method": {"name": "fedadc", "beta": 0.8}}, ("method", "beta_local"), 0.8),
        ({"method": {"name": "fedadc", "beta": 0.8, "beta_local": 0.5}}, ("method", "beta_local"), 0.5),
        ({"method": "fedadc"}, ("method", "server_lr"), 1.0),
        ({}, ("method",), {"name": "fedavg"}),
        ({}, ("objective",), {"name": "cross_entropy"}),
        ({}, ("local", "epochs"), 1),
        ({"local.steps": 4}, ("local", "epochs"), None),
    ],
)
def test_defaults(given: dict[str, Any], path: tuple[str, ...], expected: Any) -> None:
    tree: dict[str, Any] = copy.deepcopy(LEAST)
    for key, value in given.items():
        tree = changed(key, value, tree)
    found: Any = prepare(load_config(tree)).config.tree()
    for key in path:
        found = found[key]
    assert found == expected


def test_a_loop_over_seeds_in_python_varies_data_and_weights_too() -> None:
    base = load_config({**LEAST, "local": {"schedule": "cosine"}})
    other = prepare(load_config(base, ["seed=5", "rounds=4"])).config
    assert (other.data.seed, other.model.seed, other.local.schedule.horizon) == (5, 5, 4)


def test_anchors_and_merge_keys_of_yaml_work(tmp_path: Path) -> None:
    text = "rounds: 2\ndata: {name: digits, clients: 5}\nmodel: {name: logistic}\nlocal: &a {lr: 0.5}\n"
    assert load_config(file_of(tmp_path, text.replace("&a {lr: 0.5}", "{<<: {lr: 0.5}, steps: 3}"))).local.lr == 0.5


# --- fedadc+ ---------------------------------------------------------------------------------------------------------


def test_fedadc_plus_is_short_for_the_pair() -> None:
    tree = load_config({**LEAST, "method": {"name": "fedadc+", "beta": 0.8}, "objective": {"lam": 0.2}}).tree()
    assert tree["method"]["name"] == "fedadc" and tree["method"]["beta"] == 0.8
    assert tree["objective"]["name"] == "self_confidence" and tree["objective"]["lam"] == 0.2


def test_fedadc_plus_contradicts_another_objective_in_one_file_and_wins_as_an_override() -> None:
    tree = {**LEAST, "objective": {"name": "cross_entropy"}}
    message = refusal({**tree, "method": "fedadc+"})
    assert "self_confidence" in message and "cross_entropy" in message
    for override in ("method=fedadc+", "method.name=fedadc+"):
        won = load_config(tree, [override]).tree()
        assert (won["method"]["name"], won["objective"]["name"]) == ("fedadc", "self_confidence")
    kept = load_config({**LEAST, "objective": {"name": "self_confidence", "lam": 0.1}}, ["method=fedadc+"])
    assert kept.tree()["objective"]["lam"] == 0.1
    last = load_config(tree, ["method=fedadc+", "objective.lam=0.5", "method.beta=0.7"]).tree()
    assert last["objective"]["lam"] == 0.5 and last["method"]["beta"] == 0.7


# --- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("local.lr=1e-3", "local.lr", 1e-3),
        ("local.lr=1E3", "local.lr", 1e3),
        ("local.lr=2", "local.lr", 2.0),
        ("local.clip=.5", "local.clip", 0.5),
        ("rounds=7", "rounds", 7),
        ("label=a=b c", "label", "a=b c"),
        ("label='3'", "label", "3"),
        ("label=", "label", None),
        ("data.partition=null", "data.partition", None),
        ("data.partition={name: dirichlet, alpha: 0.1}", "data.partition.alpha", 0.1),
        ("data.partition.labels_per_client=3", "data.partition.labels_per_client", 3),
        ("data.augment.flip=true", "data.augment.flip", True),
        ("local.schedule.name=cosine", "local.schedule.final", 0.01),
        ("model.hidden=[8]", "model.hidden", [8]),
        ("stop.accuracy=0.9", "stop.accuracy", 0.9),
        ("method=slowmo", "method.server_lr", 1.0),
    ],
)
def test_overrides(override: str, path: str, expected: Any) -> None:
    found: Any = load_config(yaml.safe_load(README), [override]).tree()
    for key in path.split("."):
        found = found[key]
    assert found == expected and type(found) is type(expected)


def test_later_overrides_win_and_the_source_stays_as_it_was() -> None:
    tree = yaml.safe_load(README)
    before = copy.deepcopy(tree)
    assert load_config(tree, ["local.lr=1", "local.lr=0.25"]).local.lr == 0.25
    assert tree == before
    steps = load_config(tree, ["local.steps=null", "local.epochs=2"]).local
    assert (steps.steps, steps.epochs) == (None, 2)
    assert load_config({**LEAST, "method": "fedadc"}, ["method.beta=0.8"]).tree()["method"]["beta"] == 0.8


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("local.lr", "key.sub=value"),
        ("=3", "key.sub=value"),
        ("", "key.sub=value"),
        ("local..lr=3", "key.sub=value"),
        (".lr=3", "key.sub=value"),
        ("rounds.x=3", "rounds.x"),
        ("local.lr.x=3", "plain value"),
        ("local.lr=[1", "local.lr"),
        ("local.lr={a: 1, a: 2}", "twice"),
        ("local.learning_rate=3", "local"),
        ("local.lrr=3", "did you mean 'lr'?"),
        ("rounds=1.5", "rounds"),
        ("model.hidden=64", "model.hidden"),
    ],
)
def test_bad_overrides(override: str, fragment: str) -> None:
    assert fragment in refusal(yaml.safe_load(README), (override,))


# --- refusals --------------------------------------------------------------------------------------------------------

NAN = math.nan
BAD: list[tuple[str, Any, str]] = [  # node, value, what the message must say
    # names, with the nearest one
    ("lable", "x", "did you mean 'label'?"),
    ("local.lrr", 0.1, "did you mean 'lr'?"),
    ("data.client", 3, "did you mean 'clients'?"),
    ("data.name", "digit", "did you mean 'digits'?"),
    ("data.partition.name", "srt", "did you mean 'sort'?"),
    ("data.partition.labels", 2, "did you mean 'labels_per_client'?"),
    ("model.name", "mpl", "did you mean 'mlp'?"),
    ("model.hiden", [3], "did you mean 'hidden'?"),
    ("method.name", "fedadcc", "did you mean 'fedadc'?"),
    ("method.betta", 0.9, "did you mean 'beta'?"),
    ("method", {"name": "fedavg", "beta": 0.9}, "key 'beta' is unknown; there are no settings here, remove it."),
    ("objective.name", "crossentropy", "did you mean 'cross_entropy'?"),
    ("local.schedule", "cosin", "did you mean 'cosine'?"),
    ("evaluate.metrics", ["top_5"], "did you mean 'top5'?"),
    ("cohort.weighting", "sample", "'samples'"),
    ("model.init", "xavier", "'kaiming'"),
    ("method", {"name": "fedadc_double", "nesterov": True}, "no Nesterov form"),
    # types
    ("rounds", True, "rounds must be a whole number, not True"),
    ("rounds", "60", "rounds must be a whole number, not '60'"),
    ("rounds", 3.0, "rounds must be a whole number, not 3.0"),
    ("rounds", None, "rounds must be a whole number"),
    ("local.lr", "0.1", "local.lr must be a number"),
    ("local.lr", True, "local.lr must be a number"),
    ("method.nesterov", 1, "method.nesterov must be true or false, not 1"),
    ("method.beta", [0.9], "method.beta"),
    ("local", [1], "local must be a mapping"),
    ("data", "digits", "data.clients is missing"),
    ("cohort", 10, "cohort must be a mapping"),
    ("method", ["fedavg"], "method must be a name"),
    ("method", {"beta": 0.9}, "method.name is missing"),
    ("method.name", 3, "method.name must be a string"),
    ("model.hidden", 64, "model.hidden must be a list, not 64"),
    ("data.test", [0.2], "data.test must be a number or a text, not [0.2]"),
    ("model.hidden", [64, "a"], "model.hidden[1] must be a whole number, not 'a'"),
    ("model.hidden", [True], "model.hidden[0] must be a whole number"),
    ("evaluate.metrics", "top5", "evaluate.metrics"),
    ("label", 3, "label must be a text, not 3"),
    # values
    ("rounds", 0, "rounds must be at least 1"),
    ("rounds", -1, "rounds must be at least 1"),
    ("seed", -1, "seed must be in 0..2^63-1"),
    ("seed", 2**63, "seed must be in 0..2^63-1"),
    ("data.clients", 0, "data.clients must be at least 1"),
    ("data.clients", 10**18, "only 1438 samples"),
    ("data.clients", 1, "2 blocks, fewer than the 10 classes"),
    ("data.clients", None, "data.clients"),
    ("data.partition.labels_per_client", 11, "only 10 classes"),
    ("data.partition.labels_per_client", 0, "labels_per_client must be at least 1"),
    ("data.partition", {"name": "dirichlet", "alpha": 0}, "alpha must be positive"),
    ("data.partition", "natural", "client ids"),
    ("data.partition", "pooled", "one client"),
    ("data.test", 1.0, "between 0 and 1"),
    ("data.test", NAN, "between 0 and 1"),
    ("data.test", "test.npz", "does not apply to digits"),
    ("data.validation", 1e-9, "empty"),
    ("data.path", "x", "does not apply to digits"),
    ("data.normalize", {"mean": [0.5, 0.5], "std": [1, 1]}, "1 channels"),
    ("data.normalize", {"mean": [0.5], "std": [0]}, "above 0"),
    ("data.normalize", {"mean": [0.5], "std": [1, 1]}, "as many"),
    ("data.normalize", {"mean": [NAN], "std": [1]}, "mean"),
    ("data.augment.crop", -1, "crop"),
    ("data", {"name": "npz", "path": "missing.npz"}, "missing.npz"),
    ("data", {"name": "csv", "clients": 3}, "data.path is missing"),
    ("model.hidden", [0], "model.hidden must be positive"),
    ("model.classes", 3, "comes from the data"),
    ("model", {"name": "cnn"}, "at least 16×16"),
    ("model.weights", "missing.safetensors", "missing.safetensors"),
    ("method.beta", 1.5, "beta must be in [0, 1)"),
    ("method.beta", NAN, "beta must be in [0, 1)"),
    ("method.beta_local", -0.1, "beta_local must be in [0, 1)"),
    ("method.server_lr", 0, "server_lr must be positive"),
    ("objective", {"name": "self_confidence", "lam": 1.1}, "lam must be in [0, 1]"),
    ("objective", {"name": "self_confidence", "tau": 0}, "tau must be between"),
    ("objective", {"name": "self_confidence", "teacher": "me"}, "teacher"),
    ("local.lr", NAN, "local.lr must be positive"),
    ("local.lr", math.inf, "local.lr must be positive"),
    ("local.lr", -0.1, "local.lr must be positive"),
    ("local.epochs", 2, "local: set steps or epochs, not both; leave the other one empty"),
    ("local.steps", 0, "local.steps must be at least 1"),
    ("local.batch_size", 0, "local.batch_size must be at least 1"),
    ("local.momentum", 1, "local.momentum must be in [0, 1)"),
    ("local.weight_decay", -1, "local.weight_decay"),
    ("local.clip", 0, "local.clip must be positive"),
    ("local.schedule", {"name": "cosine", "horizon": 0}, "horizon must be at least 1"),
    ("local.schedule", {"name": "step", "gamma": 2}, "gamma must be in (0, 1]"),
    ("cohort.size", 51, "only 50 clients"),
    ("cohort.size", 0, "cohort.size must be at least 1"),
    ("cohort", {"ratio": 1.5}, "cohort.ratio must be in (0, 1]"),
    ("cohort.ratio", 0.5, "cohort: set size or ratio, not both; leave the other one empty"),
    ("evaluate.every", 0, "evaluate.every must be at least 1"),
    ("stop", {"accuracy": 95}, "stop.accuracy must be in (0, 1]"),
]


@pytest.mark.parametrize(("path", "value", "fragment"), BAD, ids=[f"{p}={str(v)[:30]}" for p, v, _ in BAD])
def test_bad_values_are_refused_with_the_reason(path: str, value: Any, fragment: str) -> None:
    assert fragment in refusal(changed(path, value))


def test_a_local_momentum_beside_a_momentum_of_the_method_is_refused() -> None:
    tree = changed("local.momentum", 0.5, changed("method", "fedadc_double"))
    assert "local.momentum" in refusal(tree)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("local.steps", 10**30),
        ("local.epochs", 10**30),
        ("local.lr", 1e308),
        ("data.augment", {"crop": 10**12}),
        ("data.path", "~nobody-of-this-name/x.npz"),
        ("data.path", "x" * 300),
        ("model.weights", "~nobody-of-this-name/x.safetensors"),
        ("model.weights", "x" * 300),
        ("model", {"name": "mlp", "hidden": [10**12]}),
        ("model", {"name": "cnn", "channels": [4], "width": 1e12}),
        ("objective", {"name": "self_confidence", "tau": 1e300, "tau_squared": True}),
        ("data.name", "builtins:dict"),
    ],
)
def test_absurd_values_are_refused_too(path: str, value: Any) -> None:
    """Values that torch, NumPy or the operating system cannot handle are rejected before training."""
    tree = changed(path, value)
    if path == "local.epochs":
        del tree["local"]["steps"]
    if path == "data.path":
        tree["data"]["name"] = "npz"
    refusal(tree)


def test_a_horizon_larger_than_any_float_is_rejected_or_works() -> None:
    tree = {**changed("local.schedule", "cosine"), "rounds": 10**400}
    try:
        federation = prepare(load_config(tree)).federation
    except FedadcError:
        return
    assert federation.agreement.work.lr_of(1, 10**400) == pytest.approx(0.1)


BAD_FILES: list[tuple[str, str | bytes, str]] = [
    ("empty", "", "must be a mapping"),
    ("only a comment", "# nothing\n", "must be a mapping"),
    ("a list", "- a\n", "must be a mapping"),
    ("a key twice", README + "rounds: 3\n", "'rounds' appears twice"),
    ("a key twice below", README.replace("{size: 10}", "{size: 10, size: 3}"), "'size' appears twice"),
    ("a tab", "rounds: 3\n\tdata: x\n", "line 2 is not valid YAML"),
    ("an open bracket", "rounds: [3\n", "is not valid YAML"),
    ("two documents", "rounds: 3\n---\nrounds: 4\n", "line 2 is not valid YAML"),
    ("a foreign tag", "rounds: !!python/object/apply:os.system [ls]\n", "is not valid YAML"),
    ("a control character", "rounds: \0\n", "is not valid YAML"),
    ("binary", bytes(range(256)), "cannot be read as text"),
    ("deep lists", "[" * 5000, "nested too deeply"),
    ("deep mappings", "{a: " * 3000, "nested too deeply"),
    ("huge", "#" * (LARGEST_FILE + 1), "larger than a config"),
    ("an impossible date", "rounds: 2020-13-45\n", "is not valid YAML"),
    ("too many digits", "rounds: " + "9" * 5000, "config.yaml"),
    ("too many hexadecimal digits", README.replace("60", "0x" + "F" * 5000), "rounds"),
    ("an empty integer", README.replace("60", '!!int ""'), "is not valid YAML"),
    ("an empty float", README.replace("0.1", '!!float ""'), "is not valid YAML"),
    ("an invalid boolean", README.replace("true", "!!bool x"), "is not valid YAML"),
    ("an invalid date", README.replace("60", "!!timestamp x"), "is not valid YAML"),
    ("a date as key", README.replace("60", "{2020-01-01: 3}"), "rounds"),
    ("a list that contains itself", README.replace("60", "&a [*a]"), "expands to more than"),
    ("an unknown key that is a number", README + "3: 4\n", "key '3' is unknown"),
    ("half a surrogate", README + 'label: "\\ud800"\n', "label"),
]


@pytest.mark.parametrize(("text", "fragment"), [b[1:] for b in BAD_FILES], ids=[b[0] for b in BAD_FILES])
def test_bad_files_are_refused_with_the_reason(tmp_path: Path, text: str | bytes, fragment: str) -> None:
    assert fragment in refusal(file_of(tmp_path, text))


def test_aliases_do_not_multiply_without_end(tmp_path: Path) -> None:
    """A file of one kilobyte whose aliases stand for 10^20 numbers is rejected without expanding it."""
    resource = pytest.importorskip("resource")
    levels = "".join(f"  - &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]\n" for i in range(1, 20))
    text = f"rounds:\n  - &l0 [{', '.join('0' * 10)}]\n{levels}data: {{name: digits}}\nmodel: {{name: mlp}}\n"
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (256 << 20), limits[1]))
    try:
        assert "expands to more than" in refusal(file_of(tmp_path, text))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_folders_and_missing_files_are_refused(tmp_path: Path) -> None:
    assert "is a folder" in refusal(tmp_path)
    assert "fedadc init" in refusal(tmp_path / "missing.yaml")
    refusal(tmp_path / ("x" * 300))


@pytest.mark.parametrize("key", ["rounds", "data", "model"])
def test_missing_required_keys_are_named(key: str) -> None:
    tree = yaml.safe_load(README)
    del tree[key]
    assert f"{key} is missing; write e.g. {key}: " in refusal(tree)
    example = refusal(tree).partition("e.g. ")[2].removesuffix(".")
    load_config(tree | yaml.safe_load(example))


# --- user-defined classes --------------------------------------------------------------------------------------------

OWN = """
import math
from dataclasses import dataclass
import torch
from torch import nn
from fedadc.data import from_arrays
from fedadc.methods import FedAvg, Method
from fedadc.objectives import CrossEntropy, Objective
from fedadc.system.files import to_safetensors

@dataclass(frozen=True, kw_only=True)
class Stay(FedAvg):
    gain: float = GAIN
    def update(self, theta, server, mean, info):
        return theta + self.gain, server

@dataclass(frozen=True, kw_only=True)
class Nothing(Objective):
    def __call__(self, model, batch, local):
        return 0 * model(batch.x).sum()

class Net(nn.Module):
    def __init__(self, input_shape, classes, width: int = 3):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))
    def forward(self, x):
        return self.layers(x)

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        raise RuntimeError("no such\\nlayer")

def blobs(count: int = 40):
    x = torch.arange(count * 2.0).reshape(count, 2)
    return from_arrays(x, torch.arange(count) % 2)

def variadic(*args, **settings):
    return blobs(20)

def split(held_out, count: int = 40):
    return held_out(blobs(count))

def forgetful(held_out):
    return blobs()

class TinyNet(torch.nn.Module):
    def __init__(self, features, classes, width):
        super().__init__()
        self.fc, self.hidden = torch.nn.Linear(width, classes), torch.nn.Linear(features, width)

    def forward(self, x):
        return self.fc(self.hidden(x.flatten(1)).relu())

def tiny_net(input_shape, classes, width: int = 5):
    return TinyNet(math.prod(input_shape), classes, width)

def three():
    return 3

def failing():
    raise OSError("the disk is gone")

class NotAMethod:
    pass

class OtherConstructor(Method):
    def __init__(self, gain):
        pass

@dataclass(frozen=True, kw_only=True)
class Picky(Method):
    gain: float = 1.0
    def __post_init__(self):
        if self.gain < 0:
            raise ValueError("gain must not be negative")
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A config in the same folder as a file with user-defined classes."""
    (tmp_path / "mine.py").write_text(OWN.replace("GAIN", "0.0"))
    (tmp_path / "typo.py").write_text("import there_is_no_such_module\n")
    (tmp_path / "crash.py").write_text("1 / 0\n")
    (tmp_path / "syntax.py").write_text("def\n")
    return file_of(tmp_path, yaml.safe_dump(LEAST))


def first_round(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    federation = prepare(config).federation
    return federation.start().theta, next(federation.rounds(1)).state.theta


def test_an_own_method_is_used(own: Path) -> None:
    for gain in (0.0, 0.5):
        config = load_config(own, ["method.name=mine:Stay", f"method.gain={gain}"])
        before, after = first_round(config)
        assert torch.equal(after, before + gain)
        assert config.tree()["method"] == {"name": "mine:Stay", "gain": gain}


def test_an_own_objective_is_used(own: Path) -> None:
    before, after = first_round(load_config(own, ["objective=mine:Nothing"]))
    assert torch.equal(before, after)


def test_an_own_model_is_used_with_its_settings(own: Path) -> None:
    before, after = first_round(load_config(own, ["model.name=mine:Net", "model.width=5"]))
    assert before.numel() == 65 * 5 + 6 * 10 and not torch.equal(before, after)


def test_a_function_makes_the_model_and_the_config_names_its_head(own: Path) -> None:
    """The function's own torch module has no `embed`, and its head comes first among its parameters."""
    config = load_config(own, ["model={name: mine:tiny_net, head: fc}", "method=FedPer", "local.momentum=0"])
    plan = prepare(config)
    model = plan.federation.model
    assert model.part("head") == slice(64 * 5 + 5, None) and plan.config.tree()["model"]["width"] == 5
    x = torch.randn(3, 64)
    assert torch.equal(model.embed(x), model.module.hidden(x).relu())  # type: ignore[operator]
    assert torch.equal(model.head(model.embed(x)), model(x))
    assert torch.equal(model.features(model.theta, x), model.embed(x).detach())
    result = next(iter(plan.federation.rounds(1)))
    assert result.state.clients[0]["head"].numel() == 5 * 10 + 10
    assert load_config(file_of(own.parent, plan.config.yaml())) == plan.config


@pytest.mark.parametrize(("function", "samples"), [("blobs", 40), ("variadic", 20), ("split", 40)])
def test_own_data_is_used(own: Path, function: str, samples: int) -> None:
    data = prepare(load_config(own, [f"data={{name: mine:{function}, clients: 2}}"])).federation.data
    assert len(data.train) + len(data.test or ()) == samples and len(data.classes) == 2


def test_an_own_loader_may_hold_out_the_shares_itself(own: Path) -> None:
    """It gets what is held out for other loaders afterwards, and its parameter is no key of the config."""
    afterwards, itself = (
        load_data(load_config(own, [f"data={{name: mine:{name}, clients: 2, validation: 0.25, seed: 3}}"]))
        for name in ("blobs", "split")
    )
    for part, samples in afterwards[1].splits().items():
        assert torch.equal(samples.x, itself[1].splits()[part].x)
    assert itself[0].data.test == afterwards[0].data.test == 0.2 and itself[0].data.options == {"count": 40}
    with pytest.raises(FedadcError, match="data: key 'held_out' is unknown"):
        load_data(load_config(own, ["data={name: mine:split, clients: 2, held_out: 1}"]))
    with pytest.raises(
        FedadcError, match="loader mine:forgetful returned no test data; it must hold out the shares of held_out"
    ):
        load_data(load_config(own, ["data={name: mine:forgetful, clients: 2}"]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("test: 2.0", "data.test must be a share between 0 and 1, not 2.0"),
        ("validation: 0", "data.validation must be a share between 0 and 1, not 0"),
        ("validation: 0.0001", "data.validation: a share of 0.0001 of 33 samples is empty"),
        ("scale: {a: [1, 0]}", "data.scale.a must be [center, spread] with a spread above 0, not [1.0, 0.0]"),
    ],
)
def test_an_argument_of_a_loader_is_named_as_a_key(tmp_path: Path, settings: str, words: str) -> None:
    rows = "".join(f"{i},{'xy'[i % 2]}\n" for i in range(41))
    (tmp_path / "t.csv").write_text(f"a,b\n{rows}")
    tree = {**LEAST, "data": {"name": "csv", "path": "t.csv", "clients": 2, "label": "b", **yaml.safe_load(settings)}}
    config = load_config(file_of(tmp_path, yaml.safe_dump(tree)))
    with pytest.raises(FedadcError) as error:
        load_data(config)
    assert str(error.value).startswith(words)


def test_the_resolved_config_of_own_classes_survives_the_round_trip(own: Path) -> None:
    config = load_config(own, ["method.name=mine:Stay", "objective=mine:Nothing", "model.name=mine:Net"])
    own.write_text(config.yaml())
    assert load_config(own) == config


def test_the_folder_of_the_config_comes_first_and_two_folders_do_not_mix(tmp_path: Path) -> None:
    gains = {}
    for name, gain in (("a", 1.0), ("b", 2.0), ("a", 1.0)):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text(OWN.replace("GAIN", str(gain)))
        gains[name] = load_config(file_of(folder, yaml.safe_dump({**LEAST, "method": "mine:Stay"})))
    assert [gains[n].tree()["method"]["gain"] for n in "ab"] == [1.0, 2.0]


def test_modules_that_own_modules_import_do_not_mix_either(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "my_constants.py").write_text(f"NAME = {name!r}\n")
        (folder / "uses_it.py").write_text(
            "from dataclasses import dataclass\nimport my_constants\nfrom fedadc import FedAvg\n"
            "@dataclass(frozen=True, kw_only=True)\nclass Mine(FedAvg):\n    tag: str = my_constants.NAME\n"
        )
        config = load_config(file_of(folder, yaml.safe_dump({**LEAST, "method": "uses_it:Mine"})))
        found.append(config.tree()["method"]["tag"])
    assert found == ["a", "b"]


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("method=mine:NotAMethod", "not a class derived from Method"),
        ("method=mine:Nothing", "not a class derived from Method"),
        ("method=mine:three", "not a class derived from Method"),
        ("objective=mine:Stay", "not a class derived from Objective"),
        ("model.name=mine:NotAMethod", "not a class derived from Module"),
        ("model={name: mine:three}", "model: three must return a torch module, not a value of type int"),
        ("model={name: mine:tiny_net, wdith: 3}", "did you mean 'width'?"),
        ("model={name: mine:tiny_net, width: x}", "model.width must be a whole number, not 'x'"),
        ("model={name: mine:tiny_net, classes: 3}", "model.classes is not a setting"),
        ("model={name: mine:tiny_net, head: fcc}", "model.head: layer 'fcc' is unknown; did you mean 'fc'?"),
        ("model={name: mine:tiny_net, head: hidden}", "model.head: the output of hidden is not that of TinyNet"),
        ("data.name=mine:three", "returned int, not a fedadc Dataset"),
        ("data.name=mine:LIST", "in mine the name"),
        ("data={name: mine:blobs, clients: 2, cuont: 3}", "did you mean 'count'?"),
        ("data={name: mine:blobs, clients: 2, count: x}", "data.count"),
        ("data.name=mine:failing", "the disk is gone"),
        ("method=mine:Stya", "'Stay'"),
        ("method={name: mine:Stay, gian: 1}", "did you mean 'gain'?"),
        ("method={name: mine:Stay, gain: x}", "method.gain"),
        ("method={name: mine:Picky, gain: -1.0}", "gain must not be negative"),
        ("method=mine:OtherConstructor", "OtherConstructor"),
        ("model.name=mine:Broken", "no such"),
        ("method=absent:Stay", "there is no absent.py"),
        ("method=typo:Stay", "typo needs the module there_is_no_such_module"),
        ("method=crash:Stay", "ZeroDivisionError"),
        ("method=syntax:Stay", "SyntaxError"),
        ("method=:Stay", "method"),
        ("method={name: 'mine:'}", "mine"),
        ("method=..mine:Stay", "..mine"),
    ],
)
def test_what_is_not_a_method_objective_model_or_loader_is_refused(own: Path, override: str, fragment: str) -> None:
    assert fragment in refusal(own, (override,))


def test_both_halves_start_from_the_weights_of_the_config(tmp_path: Path) -> None:
    tree = {"rounds": 1, "data": {"name": "digits", "clients": 2}, "model": {"name": "mlp", "hidden": [4], "seed": 5}}
    other = prepare(load_config(tree)).federation
    (tmp_path / "w.safetensors").write_bytes(to_safetensors(other.state_dict(other.start())))
    weights = {"name": "mlp", "hidden": [4], "weights": str(tmp_path / "w.safetensors")}
    config = load_config({**tree, "model": weights})
    federation = prepare(config).federation
    agreement = build_agreement(complete(config), federation.data.spec)
    assert torch.equal(agreement.start, other.start().theta) and torch.equal(federation.start().theta, agreement.start)
    assert agreement.fingerprint() == federation.agreement.fingerprint()
