"""Clusters that lose workers, nodes, heads and drivers; every method; where data and states are (make test-cluster)."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fedadc
from clusters import SmallCluster, ray_workers, small_cluster
from commands import command
from family import eventually, linux
from fedadc.cluster.connection import PREFIX, kept_signal_handlers
from fedadc.cluster.doctor import examine
from fedadc.cluster.reaper import processes_of
from fedadc.cluster.settings import RayCluster
from fedadc.config.build import prepare
from fedadc.errors import FedadcError, WorkersLost
from fedadc.methods import METHODS, PAIRS
from fedadc.runs.runner import run
from snapshots import outcome

pytestmark = [linux, pytest.mark.cluster]
CONFIG: dict[str, Any] = {
    "rounds": 8,
    "data": {"name": "digits", "clients": 24, "partition": {"name": "dirichlet", "alpha": 1.0}},
    "model": {"name": "mlp", "hidden": [8], "projection": 4},
    "local": {"steps": 3, "batch_size": 8, "lr": 0.1},
    "cohort": {"size": 21},
    "checkpoint": {"every": 3},
}
LARGE = {"name": "mlp", "hidden": [600]}  # states of more than 100 kB, which Ray keeps on the nodes


@pytest.fixture(scope="module")
def cluster() -> Iterator[SmallCluster]:
    with small_cluster(2) as started:
        yield started


def result_of(out: Path) -> dict[str, Any]:
    """All that must not depend on the engine."""
    found = outcome(out)
    found["metrics"] = [{k: v for k, v in line.items() if k != "events"} for line in found["metrics"]]
    return found


def events(out: Path) -> list[str]:
    return [event for line in outcome(out)["metrics"] for event in line.get("events", [])]


@pytest.mark.parametrize("method", [*METHODS, *PAIRS])
def test_every_method_has_the_bits_of_one_process(method: str, cluster: SmallCluster, tmp_path: Path) -> None:
    config = {**CONFIG, "method": method, "rounds": 3}
    run(config, out=tmp_path / "here")
    run(config, out=tmp_path / "there", engine=RayCluster(address=cluster.address))
    assert result_of(tmp_path / "there") == result_of(tmp_path / "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluate": {"every": 2, "overlap": True}},
        {"evaluate": {"drift": True, "metrics": ["per_class"]}},
        {"communication": {"uplink": "eight_bit"}, "method": "fedadc"},
        {"model": {"name": "cnn", "channels": [4, 8], "hidden": [16]}, "method": "fedadc+"},
        {"method": "scaffold", "model": LARGE, "storage": {"memory_gb": 0.001}},
        {"faults": {"drop": 0.2, "slow": 0.3}, "method": "feddyn"},
    ],
    ids=["overlap", "drift", "uplink", "images", "states in files", "faults"],
)
def test_other_settings_too(changes: dict[str, Any], cluster: SmallCluster, tmp_path: Path) -> None:
    config = {**CONFIG, **changes}
    run(config, out=tmp_path / "here")
    run(config, out=tmp_path / "there", engine=RayCluster(address=cluster.address))
    assert result_of(tmp_path / "there") == result_of(tmp_path / "here")


def test_states_lost_with_a_node_are_made_again_from_the_last_checkpoint(cluster: SmallCluster, tmp_path: Path) -> None:
    config = {**CONFIG, "method": "scaffold", "model": LARGE, "rounds": 12, "checkpoint": {"every": 5}}
    run(config, out=tmp_path / "here")
    doomed, seen = cluster.add_node(), []

    def watch(record: dict[str, Any]) -> None:
        seen.append(record["round"])
        if record["round"] == 8 and doomed in cluster.nodes:
            assert len(ray_workers()) == 3
            cluster.kill_node(doomed)

    run(config, out=tmp_path / "there", engine=RayCluster(address=cluster.address, patience=30), watch=watch)
    assert result_of(tmp_path / "there") == result_of(tmp_path / "here")
    assert seen[:8] == [*range(1, 9)] and 6 in seen[8:], "no round was trained again"
    assert any("was lost in round" in event for event in events(tmp_path / "there"))


def training(config: dict[str, Any], out: Path, *words: str) -> subprocess.Popen[str]:
    """A command, in a session of its own, that has trained ten rounds on Ray."""
    (out.parent / "config.yaml").write_text(yaml.safe_dump(config))
    words = ("run", "config.yaml", "--out", out.name, "--engine", "ray", *words)
    driver = subprocess.Popen(
        [sys.executable, "-m", "fedadc", *words],
        cwd=out.parent,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = out / "metrics.jsonl"
    eventually(lambda: metrics.exists() and metrics.read_text().count("\n") > 10, 90)
    return driver


def test_a_lost_head_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    config = {**CONFIG, "method": "scaffold", "model": LARGE, "rounds": 200, "checkpoint": {"every": 1000}}
    run(config, out=tmp_path / "here")
    with small_cluster(2) as doomed:
        driver = training(config, tmp_path / "there", "--ray-address", doomed.address)
        doomed.kill_head()
        _, err = driver.communicate(timeout=60)  # Ray would abort it then
        assert driver.returncode == 6 and "is saved at round" in err, err
        assert "the head of the Ray cluster at" in err.splitlines()[-1] and "Traceback" not in err
    fedadc.resume(tmp_path / "there")
    assert result_of(tmp_path / "there") == result_of(tmp_path / "here")


@pytest.mark.parametrize("method", ["fedadc", "scaffold"])
def test_ray_that_dies_on_the_machine_of_the_command_too(method: str, tmp_path: Path) -> None:
    """Ray then ends the process that uses it; the last periodic checkpoint is left."""
    config = {**CONFIG, "method": method, "model": LARGE, "rounds": 200}
    run(config, out=tmp_path / "here")
    with small_cluster(2) as doomed:
        driver = training(config, tmp_path / "there", "--ray-address", doomed.address)
        doomed.kill_all()
        _, err = driver.communicate(timeout=60)
    assert driver.returncode == 6 and err.splitlines()[-1].startswith("error: ") and "Traceback" not in err, err
    assert "`fedadc resume there" in err, err
    fedadc.resume(tmp_path / "there")
    assert result_of(tmp_path / "there") == result_of(tmp_path / "here")


def test_a_killed_driver_is_resumed_on_another_cluster(cluster: SmallCluster, tmp_path: Path) -> None:
    config = {**CONFIG, "method": "scaffold", "model": LARGE, "rounds": 60}
    run(config, out=tmp_path / "here")
    driver = training(config, tmp_path / "there", "--ray-address", cluster.address)
    driver.kill()
    driver.communicate()
    eventually(lambda: not ray_workers(), 30)  # they end with their driver
    answer = command("resume", "there", "--engine", "ray", cwd=tmp_path)  # on a cluster of its own
    assert answer.code == 0, answer.err
    assert result_of(tmp_path / "there") == result_of(tmp_path / "here")
    assert list((tmp_path / "there" / "ray-logs").glob("session_*/raylet.out"))


def local_clusters() -> set[Path]:
    """The folders of clusters that fedadc has started on this machine."""
    return {*Path(tempfile.gettempdir()).glob(f"{PREFIX}*")}


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_signal_leaves_no_process_no_folder_and_no_shared_memory(name: str, tmp_path: Path) -> None:
    before = {*os.listdir("/dev/shm")}  # noqa: PTH208
    running = local_clusters()
    driver = training({**CONFIG, "method": "scaffold", "rounds": 10**6}, tmp_path / "run")
    (folder,) = local_clusters() - running
    assert len(processes_of(str(folder))) > 5
    number = getattr(signal, name)
    os.killpg(driver.pid, number) if name == "SIGINT" else driver.send_signal(number)
    _, err = driver.communicate(timeout=30)
    assert driver.returncode == {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}[name]
    assert name == "SIGKILL" or "is saved at round" in err
    eventually(lambda: not processes_of(str(folder)) and not folder.exists(), 10)
    assert {*os.listdir("/dev/shm")} <= before  # noqa: PTH208
    answer = command("resume", "run", "rounds=100000000", "--engine", "rai", cwd=tmp_path)
    assert "--engine must be local or ray" in answer.err


def test_a_node_that_computes_other_bits_is_refused_left_out_or_used(tmp_path: Path) -> None:
    config = {**CONFIG, "rounds": 2}
    run(config, out=tmp_path / "here")
    with small_cluster(1) as mixed:
        mixed.add_node(env_vars={"ATEN_CPU_CAPABILITY": "default"})
        reports = examine(RayCluster(address=mixed.address))
        assert sorted(bool(report.problems) for report in reports) == [False, True]
        with pytest.raises(WorkersLost, match=r"has cpu DEFAULT instead of .*make the nodes equal"):
            run(config, out=tmp_path / "refused", engine=RayCluster(address=mixed.address))
        assert not (tmp_path / "refused").exists()
        leaving = RayCluster(address=mixed.address, other_nodes="leave out")
        run(config, out=tmp_path / "there", engine=leaving)
        assert result_of(tmp_path / "there") == result_of(tmp_path / "here")
        assert any("it is left out" in event for event in events(tmp_path / "there"))
        run(config, out=tmp_path / "used", engine=RayCluster(address=mixed.address, other_nodes="use"))
        answer = command("doctor", "ray", "--ray-address", mixed.address, cwd=tmp_path)
        assert answer.code == 6 and "cpu DEFAULT instead of" in answer.err and "as here" in answer.out


def test_a_cluster_that_is_too_small_is_one_sentence(cluster: SmallCluster, tmp_path: Path) -> None:
    for settings, need in [({"cpus_per_worker": 3.0}, "3 CPUs"), ({"gpus_per_worker": 0.5}, "0.5 GPUs")]:
        small = RayCluster(address=cluster.address, patience=2, **settings)
        with pytest.raises(WorkersLost, match=f"no node of the Ray cluster has room for a worker, .*{need}"):
            run(CONFIG, out=tmp_path / "run", engine=small)
        assert not (tmp_path / "run").exists()


def test_federations_of_one_process_share_their_connection(cluster: SmallCluster, tmp_path: Path) -> None:
    config = fedadc.load_config({**CONFIG, "method": "scaffold", "model": LARGE})
    engine = RayCluster(address=cluster.address, workers=1)
    first, second = (prepare(config, cluster=engine).federation for _ in range(2))
    (a,), (b,) = list(first.rounds(1)), list(second.rounds(1))
    first.close()
    eventually(lambda: len(ray_workers()) == 1)
    again = list(second.rounds(3, b.state))
    second.close()
    eventually(lambda: not ray_workers())
    assert torch.equal(a.state.theta, b.state.theta)
    for result in (a, b, again[-1]):  # all states were brought here
        assert {name for state in result.state.clients.values() for name in state} == {"c"}
    other = prepare(config, cluster=RayCluster()).federation
    list(first.rounds(1))
    with pytest.raises(FedadcError, match=r"this process is connected to the Ray cluster .*; close\(\)"):
        list(other.rounds(1))
    first.close()


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silence", "HTTP"])
def test_what_answers_at_an_address_may_be_no_ray(first: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))

    def answer_each() -> None:
        with suppress(OSError):  # it is closed
            while True:
                listening.accept()[0].sendall(first)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer_each, daemon=True).start()
        address, began = f"127.0.0.1:{listening.getsockname()[1]}", time.monotonic()
        answer = command("run", "config.yaml", "--engine", "ray", "--ray-address", address, cwd=tmp_path)
        listening.shutdown(socket.SHUT_RDWR)
    assert answer.code == 6 and answer.err == f"error: what answers at the address {address} is no Ray cluster.\n"
    assert time.monotonic() - began < 60


def test_a_cluster_of_the_users_own_is_used_unless_the_address_is_another(cluster: SmallCluster) -> None:
    import ray

    with pytest.raises(FedadcError, match=r"address is ray://.*: addresses of Ray Client are not supported"):
        RayCluster(address="ray://10.0.0.1:10001")
    config = fedadc.load_config(CONFIG)
    with kept_signal_handlers():
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        for address in (None, "auto", cluster.address):
            federation = prepare(config, cluster=RayCluster(address=address)).federation
            assert len(list(federation.rounds(1))) == 1
            federation.close()
            assert ray.is_initialized()
        other = prepare(config, cluster=RayCluster(address="192.0.2.77:6379")).federation
        with pytest.raises(FedadcError, match=rf"connected to the Ray cluster {cluster.address}; call ray.shutdown"):
            list(other.rounds(1))
    finally:
        ray.shutdown()


def test_fewer_workers_than_were_asked_for_are_an_event(cluster: SmallCluster, tmp_path: Path) -> None:
    config = {**CONFIG, "rounds": 2}
    run(config, out=tmp_path / "run", engine=RayCluster(address=cluster.address, workers=5))
    assert events(tmp_path / "run") == ["the cluster has room for 2 of the 5 workers"]


def test_a_gpu_that_torch_does_not_see_is_one_sentence(tmp_path: Path) -> None:
    with small_cluster(1) as claiming:
        claiming.add_node(num_gpus=1)
        with pytest.raises(FedadcError, match="torch finds no CUDA device on a node that offers one to Ray"):
            run(CONFIG, out=tmp_path / "run", engine=RayCluster(address=claiming.address, gpus_per_worker=0.5))


def test_nodes_read_data_from_their_own_disks_if_it_is_the_same(cluster: SmallCluster, tmp_path: Path) -> None:
    """Both nodes are on this machine, so the one folder is that of both."""
    import numpy as np

    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    np.savez(folder / "table.npz", x=rng.normal(size=(300, 5)).astype(np.float32), y=rng.integers(0, 3, 300))
    config = {**CONFIG, "rounds": 3, "data": {"name": "npz", "path": str(folder / "table.npz"), "clients": 24}}
    run(config, out=tmp_path / "here")
    run(config, out=tmp_path / "there", data_dir=folder, engine=RayCluster(address=cluster.address))
    assert result_of(tmp_path / "there") == result_of(tmp_path / "here") and not events(tmp_path / "there")

    def watch(record: dict[str, Any]) -> None:  # a node joins, and finds other data
        if record["round"] == 1:
            np.savez(folder / "table.npz", x=rng.normal(size=(300, 5)).astype(np.float32), y=rng.integers(0, 3, 300))
            joined.append(cluster.add_node())

    joined: list[Any] = []
    run(config, out=tmp_path / "later", data_dir=folder, engine=RayCluster(address=cluster.address), watch=watch)
    cluster.kill_node(joined[0])
    assert result_of(tmp_path / "later") == result_of(tmp_path / "here")
    assert any("which cannot read it (its data has another checksum)" in event for event in events(tmp_path / "later"))


def test_memory_stays_flat(cluster: SmallCluster, tmp_path: Path) -> None:
    """Of this process and all processes of Ray, over 200 rounds of a method with states."""
    config = {**CONFIG, "method": "scaffold", "model": LARGE, "rounds": 200, "evaluate": {"every": 50}}
    used: list[float] = []

    def watch(record: dict[str, Any]) -> None:
        if record["round"] % 5 == 0:
            used.append(memory_of_ray())

    run(config, out=tmp_path / "run", engine=RayCluster(address=cluster.address), watch=watch)
    early, late = statistics.median(used[8:16]), statistics.median(used[-8:])  # rounds 45 to 80, 165 to 200
    assert late < early * 1.05, used


def memory_of_ray() -> float:
    """MB of this process and of all processes of Ray, shared pages counted once."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
            if int(process.name) == os.getpid() or b"ray" in words.split(b"\0")[0] or b"/ray/" in words:
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        except (OSError, StopIteration):  # it has ended
            continue
    return total / 1000
