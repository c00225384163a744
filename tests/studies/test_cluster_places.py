"""Many runs on a cluster: whole runs on nodes, or the clients of one run on all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedadc
from clusters import ray_workers, small_cluster
from commands import contents
from family import eventually, linux
from fedadc.cluster.settings import RayCluster
from fedadc.runs.runner import run
from fedadc.studies.cluster_places import look
from fedadc.studies.progress import Progress
from fedadc.studies.queue import Job, train_jobs

CONFIG: dict[str, Any] = {
    "rounds": 40,
    "data": {"name": "digits", "clients": 20},
    "model": {"name": "mlp", "hidden": [16]},
    "method": "scaffold",
    "local": {"steps": 5, "batch_size": 8, "lr": 0.1},
    "cohort": {"size": 8},
    "checkpoint": {"every": 5},
}


def jobs(folder: Path, count: int, cost: float, **changes: Any) -> list[Job]:
    configs = [fedadc.load_config({**CONFIG, **changes, "seed": seed}) for seed in range(count)]
    return [Job(f"seed {c.seed}", c, folder / f"{c.seed}", cost=cost) for c in configs]


def model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_node_sees_the_runs_if_it_reads_what_is_written_here(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    assert not look(probe, "text", None).sees_runs
    probe.write_text("text")
    assert look(probe, "text", None).sees_runs and not look(probe, "other", None).sees_runs
    assert look(probe, "text", tmp_path).sees_data and not look(probe, "text", tmp_path / "absent").sees_data


@linux
@pytest.mark.cluster
def test_whole_runs_go_to_nodes_and_are_resumed_elsewhere(tmp_path: Path, caplog: Any) -> None:
    run({**CONFIG, "seed": 0}, out=tmp_path / "here")
    with small_cluster(2) as cluster:
        doomed, busiest = cluster.add_node(), 0

        def watch(progress: Progress) -> None:
            nonlocal busiest
            busiest = max(busiest, len(ray_workers("ProcessActor")))
            if busiest == 3 and doomed in cluster.nodes and any(run.round > 3 for run in progress.running):
                cluster.kill_node(doomed)

        outcomes = train_jobs(jobs(tmp_path / "runs", 5, 1.0), engine=RayCluster(address=cluster.address), watch=watch)
        assert doomed not in cluster.nodes and busiest == 3
    assert [outcome.status for outcome in outcomes] == ["finished"] * 5
    assert model(tmp_path / "runs/0") == model(tmp_path / "here")
    assert any("was lost on node" in message and "started again" in message for message in caplog.messages)


@linux
@pytest.mark.cluster
def test_a_node_that_joins_trains_whole_runs(tmp_path: Path) -> None:
    with small_cluster(1) as cluster:
        busiest = 0

        def watch(progress: Progress) -> None:
            nonlocal busiest
            busiest = max(busiest, len(ray_workers("ProcessActor")))
            if len(cluster.nodes) == 1 and any(run.round > 3 for run in progress.running):
                assert busiest == 1
                cluster.add_node()

        engine = RayCluster(address=cluster.address)
        outcomes = train_jobs(jobs(tmp_path / "runs", 4, 1.0, rounds=300), engine=engine, watch=watch)
    assert [outcome.status for outcome in outcomes] == ["finished"] * 4 and busiest == 2
    facts = [json.loads((tmp_path / "runs" / str(seed) / "environment.json").read_text()) for seed in range(4)]
    assert [fact["engine"] for fact in facts] == ["local"] * 4, "a node was taken for occupied after its run had ended"


@linux
@pytest.mark.cluster
def test_the_logs_of_a_cluster_of_this_machine_are_kept(tmp_path: Path) -> None:
    train_jobs(jobs(tmp_path / "runs", 1, 1.0, rounds=2), engine="ray")
    assert list((tmp_path / "runs" / "ray-logs").glob("session_*/raylet.out"))


@linux
@pytest.mark.cluster
def test_the_clients_of_a_long_run_are_spread(tmp_path: Path) -> None:
    run({**CONFIG, "seed": 0}, out=tmp_path / "here")
    seen: set[tuple[int, int]] = set()
    with small_cluster(2) as cluster:
        outcomes = train_jobs(
            jobs(tmp_path / "runs", 1, 1000.0), engine=RayCluster(address=cluster.address),
            watch=lambda _: seen.add((len(ray_workers("ProcessActor")), len(ray_workers()))),
        )  # fmt: skip
    assert outcomes[0].status == "finished" and (0, 2) in seen and max(whole for whole, _ in seen) == 0
    assert model(tmp_path / "runs/0") == model(tmp_path / "here")


@linux
@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_all_runs_and_the_same_command_goes_on(number: signal.Signals, tmp_path: Path) -> None:
    base = {**CONFIG, "rounds": 200, "data": {**CONFIG["data"], "validation": 0.2}}
    runs = {"one": {"grid": {"local.lr": [0.1]}}}
    file = {"title": "study", "base": base, "seeds": [0, 1, 2], "runs": runs, "equal_budgets": False}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(file))
    with small_cluster(2) as cluster:
        words = ["experiment", "study.yaml", "--engine", "ray", "--ray-address", cluster.address, "--out", "study"]
        study = subprocess.Popen(
            [sys.executable, "-m", "fedadc", *words], cwd=tmp_path, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        checkpoints = "study/**/checkpoints/round-*.json"
        eventually(lambda: study.poll() is not None or len(list(tmp_path.glob(checkpoints))) >= 2, 120)
        os.killpg(study.pid, number) if number == signal.SIGINT else os.kill(study.pid, number)
        assert study.wait(40) == (130 if number == signal.SIGINT else -9)
        eventually(lambda: not ray_workers("ProcessActor") and not _trainers(tmp_path), 30)
        before = contents(tmp_path / "study")
        assert any(name.endswith("metrics.jsonl") for name in before)
        subprocess.run([sys.executable, "-m", "fedadc", *words], cwd=tmp_path, check=True, capture_output=True)
    run({**base, "seed": 0, "local": {**base["local"], "lr": 0.1}}, out=tmp_path / "here")
    models = [path.read_bytes() for path in tmp_path.glob("study/**/model.safetensors")]
    assert len(models) == 3 and model(tmp_path / "here") in models


def _trainers(folder: Path) -> list[str]:
    """Processes that have files of a folder open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(file.readlink()).startswith(str(folder / "study")) for file in (process / "fd").iterdir()):
                found.append(process.name)
        except OSError:
            continue
    return found
