"""What a Python user sees: the public names, `fedadc.run`, and a federation built from his own parts."""

from __future__ import annotations

import ast
import copy
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedadc
from conftest import small_federation
from fedadc.errors import FedadcError

CONFIG = {
    "rounds": 3,
    "data": {"name": "digits", "clients": 10, "partition": {"name": "dirichlet", "alpha": 0.3}},
    "model": {"name": "mlp", "hidden": [16]},
    "method": {"name": "fedadc+", "nesterov": True},
    "local": {"steps": 4, "batch_size": 16, "lr": 0.1},
    "cohort": {"ratio": 0.4},
}


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fedadc.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(fedadc, name)
    assert value is not None and name in dir(fedadc)
    assert getattr(value, "__name__", name) in (name, f"fedadc.{name}")


def test_the_top_level_is_short() -> None:
    assert len(set(fedadc.__all__) - set(fedadc._NAMESPACES)) <= 31


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(fedadc.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    declared = {(n.module, a.name) for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    home = {(f"fedadc.{module}", name) for module, names in fedadc._HOME.items() for name in names}
    assert declared == home | {("fedadc", name) for name in fedadc._NAMESPACES}
    assert {name for _, name in declared} | {"__version__"} == set(fedadc.__all__)


@pytest.mark.parametrize("name", fedadc._NAMESPACE_OF)
def test_names_that_moved_to_a_namespace_warn(name: str) -> None:
    home = f"fedadc.{fedadc._NAMESPACE_OF[name]}"
    with pytest.warns(DeprecationWarning, match=rf"fedadc\.{name} is now {home}\.{name}"):
        assert getattr(fedadc, name) is getattr(sys.modules[home], name)


def test_what_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        fedadc.no_such_name  # noqa: B018


def test_public_names_stay_what_they_are_in_whatever_order_they_are_used() -> None:
    """A submodule of the same name must not take the place of a function."""
    code = "import fedadc\nfor name in reversed(fedadc.__all__): getattr(fedadc, name)\nassert callable(fedadc.run)\n"
    names = "import fedadc, fedadc.cli.app, fedadc.config.settings\nfedadc.run\nassert callable(fedadc.run)\n"
    for source in (code, names):
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


# --- run -------------------------------------------------------------------------------------------------------------


@contextmanager
def torch_is_left_alone() -> Iterator[None]:
    """The global state of torch and NumPy is after what it was before."""

    def state() -> list[Any]:
        numpy = np.random.get_state(legacy=False)  # noqa: NPY002
        return [
            torch.get_rng_state().tolist(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(), torch.get_default_dtype(), torch.is_grad_enabled(),
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark,
            numpy["state"]["key"].tolist(), numpy["state"]["pos"],
        ]  # fmt: skip

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1234)
    try:
        before = state()
        yield
        assert state() == before
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False


def test_run_takes_a_mapping_prints_nothing_and_leaves_torch_alone(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = copy.deepcopy(CONFIG)
    with torch_is_left_alone():
        result = fedadc.run(source, ["rounds=2"])
    assert capfd.readouterr() == ("", "") and list(tmp_path.iterdir()) == [] and source == CONFIG
    assert [r["round"] for r in result.history] == [1, 2] and result.out is None
    assert result.state.round == 2 and set(result.state_dict) >= {"head.weight", "head.bias"}
    assert result.config.tree()["objective"]["name"] == "self_confidence"


def test_run_speaks_through_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fedadc"):
        fedadc.run(CONFIG, ["rounds=1"])
    assert "fedadc" in caplog.text and "digits" in caplog.text


def test_run_gives_the_same_bits_from_any_source_and_state_of_torch(tmp_path: Path) -> None:
    first = fedadc.run(CONFIG)
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    second = fedadc.run(first.config, out=tmp_path / "a")
    third = fedadc.run(tmp_path / "a" / "config.yaml")
    for other in (second, third):
        assert torch.equal(first.state.theta, other.state.theta)
        assert all(torch.equal(first.state.server[k], other.state.server[k]) for k in first.state.server)
        left, right = ([{**r, "seconds": 0} for r in result.history] for result in (first, other))
        assert left == right


def test_a_watcher_sees_every_record_and_may_interrupt(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def watch(record: dict[str, Any]) -> None:
        seen.append(record)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedadc.run(CONFIG, out=tmp_path / "a", watch=watch)
    assert len((tmp_path / "a/metrics.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "a/model.safetensors").is_file()


def test_load_config_is_public_and_complete() -> None:
    config = fedadc.load_config(CONFIG)
    assert isinstance(config, fedadc.Config) and fedadc.load_config(config) == config


# --- a federation of one's own ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """Dropout, a frozen layer, tied weights and a constant buffer: all that could be lost on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8))
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.again = self.body[3]
        self.head = nn.Linear(8, 4)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.scale * self.again(self.frozen(self.body(x))))


def own_net() -> Net:
    torch.manual_seed(5)
    return Net().double()


METHODS = [
    fedadc.methods.FedAvg(),
    fedadc.methods.SlowMo(beta=0.5),
    fedadc.methods.FedADC(beta=0.8, nesterov=True, objective=fedadc.objectives.SelfConfidence(lam=0.5)),
    fedadc.methods.FedADCDouble(),
]


def federation(method: fedadc.methods.Method, module: nn.Module | None = None, **settings: Any) -> fedadc.Federation:
    return fedadc.Federation(
        model=module or own_net(),
        data=small_federation(),
        method=method,
        local=fedadc.LocalWork(steps=3, batch_size=4, lr=0.05, schedule=fedadc.schedules.Cosine(horizon=4)),
        cohort=3,
        seed=7,
        **settings,
    )


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_rounds_of_a_federation_and_going_on_from_the_middle(method: fedadc.methods.Method) -> None:
    whole = list(federation(method).rounds(6))
    assert [r.round for r in whole] == [1, 2, 3, 4, 5, 6] and all(len(r.cohort) == 3 for r in whole)
    assert not torch.equal(whole[0].state.theta, whole[-1].state.theta) and whole[-1].test_accuracy is not None
    middle = whole[2].state
    rest = list(federation(method).rounds(6, start=middle))  # a new federation knows nothing of the first
    assert [r.round for r in rest] == [4, 5, 6]
    for old, new in zip(whole[3:], rest, strict=True):
        assert torch.equal(old.state.theta, new.state.theta) and old.cohort == new.cohort
        assert (old.train_loss, old.lr, old.metrics) == (new.train_loss, new.lr, new.metrics)
        assert old.state.server.keys() == new.state.server.keys()
        assert all(torch.equal(old.state.server[k], new.state.server[k]) for k in old.state.server)


def test_states_are_values_that_later_rounds_do_not_change() -> None:
    kept, copies = [], []
    for result in federation(METHODS[2]).rounds(4):
        kept.append(result.state)
        copies.append((result.state.theta.clone(), {k: v.clone() for k, v in result.state.server.items()}))
    for state, (theta, server) in zip(kept, copies, strict=True):
        assert torch.equal(state.theta, theta) and all(torch.equal(state.server[k], server[k]) for k in server)


def test_the_users_module_is_not_touched() -> None:
    module = own_net()
    module.train()
    module.body[2].eval()  # a mode of its own
    before = copy.deepcopy(module.state_dict())
    modes = {name: part.training for name, part in module.named_modules()}
    with torch_is_left_alone():
        built = federation(METHODS[2], module)
        results = list(built.rounds(2))
    after = module.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert all(p.grad is None for p in module.parameters())
    assert module.again is module.body[3] and not module.frozen.weight.requires_grad
    assert {name: part.training for name, part in module.named_modules()} == modes
    module.load_state_dict(built.state_dict(results[-1].state))
    assert torch.equal(module.body[3].weight, module.again.weight)
    assert not torch.equal(module.head.weight, before["head.weight"])
    assert torch.equal(module.frozen.weight, before["frozen.weight"]) and module.scale == 2.0


def test_the_trained_model_in_the_users_module_predicts_what_was_measured() -> None:
    built = federation(METHODS[0])
    *_, last = built.rounds(5)
    module, test = own_net(), small_federation().test
    assert test is not None
    module.load_state_dict(built.state_dict(last.state))
    with torch.no_grad():
        right = (module.eval()(test.x).argmax(dim=1) == test.y).double().mean().item()
    assert right == last.test_accuracy


def test_clients_may_be_arrays_tensors_or_dealt_out_by_a_partition() -> None:
    rng = np.random.default_rng(0)
    shares = [(rng.normal(size=(6, 5)), np.arange(6) % 4) for _ in range(3)]
    arrays = fedadc.from_clients(shares)
    tensors = fedadc.from_clients([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in shares])
    thetas = [
        next(fedadc.Federation(model=own_net(), data=data).rounds(1)).state.theta for data in (arrays, tensors)
    ]  # fmt: skip
    assert torch.equal(*thetas)
    x, y = np.concatenate([x for x, _ in shares]), np.concatenate([y for _, y in shares])
    dealt = fedadc.Federation(
        model=own_net(),
        data=fedadc.from_arrays(x, y),
        clients=4,
        partition=fedadc.partitions.SortAndPartition(labels_per_client=1),
        test=0,
    )
    assert len(dealt.clients) == 4 and sorted(dealt.clients.indices.tolist()) == list(range(18))
    assert next(dealt.rounds(1)).metrics == {}, "no test part, no metrics"
    with_test = fedadc.Federation(model=own_net(), data=fedadc.from_arrays(x, y), clients=4)
    assert len(with_test.data.train) == 14 and 0 <= next(with_test.rounds(1)).metrics["test_accuracy"] <= 1


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"cohort": 99}, "only 6 clients"),
        ({"cohort": 1.5}, "share"),
        ({"weighting": "sample"}, "uniform or samples"),
        ({"clients": 3}, "the data names 6 clients; remove clients, or set a partition"),
        ({"augment": fedadc.data.Augment(flip=True)}, "needs images"),
        ({"model": nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()}, "GroupNorm"),
        ({"model": nn.Linear(5, 3).double()}, "logits of shape"),
        ({"model": nn.Linear(6, 4).double()}, "fails on a batch"),
        ({"model": nn.Linear(5, 4).double().requires_grad_(False)}, "frozen"),
        ({"model": nn.Flatten()}, "logits"),
        ({"method": fedadc.methods.FedADCDouble(), "local": fedadc.LocalWork(momentum=0.5)}, "local.momentum"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_impossible_federations_are_refused(settings: dict[str, Any], fragment: str) -> None:
    arguments = {"model": own_net(), "data": small_federation(), **settings}
    with pytest.raises(FedadcError, match=fragment):
        fedadc.Federation(**arguments)
