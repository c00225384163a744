"""Estimates: FLOPs and bytes are those of the real run, time and memory are of its order, no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import slow
from fedadc.config.build import complete, load_data, prepare
from fedadc.config.settings import Config
from fedadc.data import DATASETS
from fedadc.data.loaders.download import SOURCES
from fedadc.data.loaders.facts import FACTS, stand_in
from fedadc.errors import DataError, FedadcError, WorkersLost
from fedadc.runs.record import load_config, read_run
from fedadc.runs.runner import run
from fedadc.studies import calibration, workload
from fedadc.studies.calibration import calibrate, flops_of
from fedadc.studies.estimate import cost_key, estimate, estimates
from fedadc.training.state import Round

DIGITS: dict[str, Any] = {
    "rounds": 5,
    "data": {"name": "digits", "clients": 12, "partition": {"name": "dirichlet", "alpha": 0.5}},
    "model": {"name": "mlp", "hidden": [20, 12]},
    "local": {"epochs": 2, "batch_size": 16, "lr": 0.05},
    "cohort": {"size": 4},
    "evaluate": {"every": 2},
}
CNN = ["model=cnn", "model.channels=[4,6]", "model.hidden=[10]"]
MLP_LAYERS = (64 * 20, 20 * 12, 12 * 10)  # multiplications per sample
CNN_LAYERS = (8 * 8 * 4 * 9, 4 * 4 * 6 * 4 * 9, 2 * 2 * 6 * 10, 10 * 10)


def config_of(*overrides: str, **more: Any) -> Config:
    return load_config({**DIGITS, **more}, list(overrides))


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data set to download is on this machine, and the table of loaders is restored."""
    monkeypatch.delenv("FEDADC_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in FACTS:
        monkeypatch.setitem(DATASETS, name, DATASETS[name])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is repeated for the sake of its time."""
    monkeypatch.setattr(calibration, "ENOUGH", 0.0)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(("change", "layers"), [([], MLP_LAYERS), (CNN, CNN_LAYERS)], ids=["mlp", "cnn"])
def test_flops_are_those_counted_by_hand(change: list[str], layers: tuple[int, ...]) -> None:
    """Forward one product per layer; backward two, but for the gradient of the inputs; a teacher is one forward."""
    forward = 2 * sum(layers)
    for objective, teachers in (("cross_entropy", 0), ("self_confidence", 1)):
        config = complete(config_of(*change, f"objective={objective}"))
        _, costs = calibrate(*load_data(config))
        assert costs.later == costs.first
        assert (costs.later.visit, costs.later.sample) == (0, 3 * forward - 2 * layers[0])
        assert (costs.later.touched, costs.counted_flops) == (teachers * forward, forward)


RUNS: dict[str, list[str]] = {
    "fedadc+": ["method=fedadc+"],
    "fixed steps": ["method=fedadc", "local.epochs=null", "local.steps=3", "objective=not_true_distillation"],
    "moon": ["objective=model_contrast", "model.projection=8", "rounds=7"],
    "scaffold, faults": ["method=scaffold", "faults.drop=0.3", "faults.slow=0.3"],
    "augmented": [*CNN, "method=fedadc+", "data.augment.flip=true"],
    "overlap": ["method=fedadc", "communication.downlink=overlap", "faults.drop=0.3"],
    "broadcast": ["communication.downlink={name: broadcast, absent: 0.2}", "communication.uplink=top_k"],
    "two gradients": ["method=ditto", "local.momentum=0"],
    "own heads": ["method=fedrep", "communication.uplink=eight_bit"],
    "no server": ["method=local_only", "data.validation=0.1"],
    "averages": ["ensembles={ema: {}, swa: {}}", "cohort.selection=covering"],
}


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("change", RUNS.values(), ids=RUNS)
def test_flops_and_bytes_are_those_of_the_real_run(change: list[str]) -> None:
    config = config_of(*change)
    federation = prepare(config).federation
    rounds: list[Round] = []
    flops = flops_of(lambda: rounds.extend(federation.rounds(config.rounds)))
    (found,) = estimates([config], None)
    assert found.bytes_up == sum(r.bytes_up for r in rounds)
    assert found.bytes_down == sum(r.bytes_down for r in rounds)
    assert found.flops == flops


@pytest.mark.parametrize("change", [[], CNN], ids=["mlp", "cnn"])
def test_an_estimate_is_near_what_a_run_records(change: list[str], tmp_path: Path) -> None:
    """A loaded machine lengthens the recorded seconds, and not those of the process: between them, times 3."""
    config = config_of(*change, "rounds=20", "evaluate.every=20", "method=fedadc")
    (found,) = estimate([config])
    began = time.process_time()
    result = run(config, out=tmp_path / "run")
    own, records = time.process_time() - began, read_run(tmp_path / "run").records
    assert found.bytes_up == sum(record["bytes_up"] for record in records)
    assert found.bytes_down == sum(record["bytes_down"] for record in records)
    recorded = sum(record["seconds"] for record in records)
    assert min(own, recorded) / 3 < found.seconds < 3 * max(own, recorded)
    layers = CNN_LAYERS if change else MLP_LAYERS
    tested = len(result.plan.federation.counter.splits["test"])
    samples = sum(record["samples"] for record in records)
    assert found.flops == samples * (6 * sum(layers) - 2 * layers[0]) + tested * 2 * sum(layers)
    vectors = 4 * result.state.theta.numel()
    assert 50e6 + 3 * vectors < found.memory < 5e9  # a process with torch in it


def test_clients_that_keep_states_take_memory() -> None:
    big = ["model.hidden=[4000]", "local.epochs=1", "rounds=40", "evaluate.every=40"]
    plain, keeping, less = (config_of(*big, *c) for c in ([], ["method=scaffold"], ["method=scaffold"]))
    less = replace(less, storage=replace(less.storage, memory_gb=0.001))
    found = estimate([plain, keeping, less])
    state = 4 * (64 * 4000 + 4000 + 4000 * 10 + 10)
    assert found[1].memory - found[2].memory == pytest.approx(12 * state - 1e6)  # 12 clients, all of them met
    assert found[1].memory > found[0].memory + 12 * state
    assert found[1].bytes_up == 2 * found[0].bytes_up


def test_runs_whose_steps_cost_the_same_share_a_calibration() -> None:
    base = config_of("method=fedadc+")
    same = [
        "seed=3", "rounds=9", "label=x", "local.lr=0.5", "method.beta=0.6", "objective.lam=0.2", "cohort.size=2",
        "data.partition=iid", "data.clients=5", "local.epochs=7", "evaluate.every=1", "communication.downlink=overlap",
        "local.schedule=cosine", "stop.accuracy=0.5", "faults.drop=0.1",
    ]  # fmt: skip
    for change in same:
        assert cost_key(load_config(base, change)) == cost_key(base), change
    other = [
        "objective.lam=0", "objective.tau=2", "method.nesterov=true", "local.batch_size=8", "model.hidden=[8]",
        "local.momentum=0.9", "communication.uplink=eight_bit", "data.validation=0.1", "method=fedavg",
    ]  # fmt: skip
    for change in other:
        assert cost_key(load_config(base, change)) != cost_key(base), change


def test_a_shared_calibration_counts_each_run_by_itself() -> None:
    changes = ["rounds=3", "rounds=30", "cohort.size=8", "local.epochs=4", "evaluate.every=30", "seed=5"]
    seen: list[tuple[int, int]] = []
    configs = [config_of("data.partition=iid", change) for change in changes]
    short, long, wide, much, _, seed = estimate(configs, watch=lambda *progress: seen.append(progress))
    assert seen == [(0, 1), (1, 1)]
    assert long.bytes_up == 10 * short.bytes_up and long.seconds > short.seconds
    assert wide.bytes_up == 2 * seed.bytes_up and much.bytes_up == seed.bytes_up
    assert much.flops > 1.9 * seed.flops > 1.9 * short.flops


@pytest.mark.usefixtures("hasty")
def test_rounds_beyond_those_played_are_counted_like_these(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("data.partition=iid", "local.epochs=null", "local.steps=2", "rounds=30", "evaluate.every=30")
    (exact,) = estimates([config], None)
    monkeypatch.setattr(workload, "MOST_PLAYED", 7)
    (scaled,) = estimates([config], None)
    assert replace(scaled, memory=0, seconds=0) == replace(exact, memory=0, seconds=0)


@pytest.mark.usefixtures("no_data")
def test_data_that_is_not_on_this_machine_is_replaced() -> None:
    data = {"name": "cifar10", "clients": 100, "partition": {"name": "sort", "labels_per_client": 2}}
    model = {"name": "cnn", "channels": [2, 2], "hidden": [4]}
    config = config_of(data=data, model=model)
    (found,) = estimate([config])
    parameters = (2 * 27 + 2) + (2 * 18 + 2) + (2 * 64 * 4 + 4) + (4 * 10 + 10)
    assert found.bytes_up == 4 * parameters * config.rounds * config.cohort.size  # type: ignore[operator]
    layers = (32 * 32 * 2 * 27, 16 * 16 * 2 * 18, 128 * 4, 40)
    samples = config.rounds * 4 * 500 * 2  # rounds × cohort × samples of a client × epochs
    evaluated = 3 * 10_000
    assert found.flops == samples * (6 * sum(layers) - 2 * layers[0]) + evaluated * 2 * sum(layers)
    assert found.memory > 60_000 * 3072
    with pytest.raises(DataError, match="cifar10 is not on this machine"):  # the table of this process is as it was
        prepare(config)


def test_known_facts_are_complete() -> None:
    assert FACTS.keys() == SOURCES.keys()
    data = stand_in("mnist")
    assert (len(data.train), data.spec.input_shape, len(data.classes)) == (60_000, (1, 28, 28), 10)


@pytest.mark.realdata
@pytest.mark.parametrize("name", FACTS)
def test_known_facts_are_those_of_the_real_data(name: str) -> None:
    try:
        real = DATASETS[name](data_dir=None)
    except DataError as error:
        pytest.skip(str(error))
    other = stand_in(name)
    assert replace(real.spec, classes=()) == replace(other.spec, classes=())
    assert [len(s) for s in real.splits().values()] == [len(s) for s in other.splits().values()]
    assert len(real.classes) == len(other.classes)


def test_errors_are_those_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(FedadcError, match=r"cohort.size is 40, but there are only 12 clients"):
        estimate([config_of("cohort.size=40")])
    with pytest.raises(DataError, match="there is no file"):
        estimate([config_of(data={"name": "csv", "path": "absent.csv", "label": "y"})])


OWN_CODE = """
import os
from fedadc.models.mlp import MLP

class Doomed(MLP):
    def forward(self, x):
        if "FEDADC_TEST_MARK" in os.environ: os.kill(os.getpid(), 9)
        return super().forward(x)

class Faulty(MLP):
    def forward(self, x):
        return super().forward(x) if x.shape[0] == 2 else 1 / 0
"""


def test_failures_of_a_calibration_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(OWN_CODE)
    faulty = load_config({**DIGITS, "model": {"name": "own:Faulty"}}, folder=tmp_path)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        estimate([faulty])
    code = f"""
if __name__ == "__main__":
    from pathlib import Path
    from fedadc.runs.record import load_config
    from fedadc.studies.estimate import estimate
    config = load_config({ {**DIGITS, "model": {"name": "own:Doomed"}}!r}, folder=Path({str(tmp_path)!r}))
    try:
        estimate([config])
    except Exception as error:
        print(type(error).__name__, error)
"""
    (tmp_path / "main.py").write_text(code)
    environment = {**os.environ, "FEDADC_TEST_MARK": "1"}
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("WorkersLost the process of a calibration ended with exit code -9"), done.stderr
    assert issubclass(WorkersLost, FedadcError)


FOREVER = """
import time
from fedadc.models.mlp import MLP

class Slow(MLP):
    def forward(self, x):
        open({started!r}, "w").close()
        time.sleep(3600)
"""
MAIN = """
if __name__ == "__main__":
    from pathlib import Path
    from fedadc.runs.record import load_config
    from fedadc.studies.estimate import estimate
    estimate([load_config({tree!r}, folder=Path({folder!r}))])
"""


def marked(mark: str) -> list[int]:
    """The processes that have a mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:  # ended, or not ours
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [slow(signal.SIGINT), slow(signal.SIGTERM), signal.SIGKILL], ids=lambda s: s.name)
def test_a_signal_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    started, mark = tmp_path / "started", f"FEDADC_TEST_{uuid.uuid4().hex}"
    (tmp_path / "own.py").write_text(FOREVER.format(started=str(started)))
    tree = {**DIGITS, "model": {"name": "own:Slow"}}
    (tmp_path / "main.py").write_text(MAIN.format(tree=tree, folder=str(tmp_path)))
    process = subprocess.Popen([sys.executable, tmp_path / "main.py"], env={**os.environ, mark: "1"}, stderr=-3)
    try:
        wait_for(started.exists, 120)
        assert len(marked(mark)) >= 3  # the program, the server of processes, the calibration
        process.send_signal(number)
        process.wait(20)
        wait_for(lambda: not marked(mark), 20)
    finally:
        process.kill()
        for left in marked(mark):
            os.kill(left, signal.SIGKILL)


def wait_for(condition: Any, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)
