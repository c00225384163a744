"""Many runs at once: signals and kills of real processes, whose runs would take hours; what is kept and resumed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedadc
from conftest import slow
from fedadc.errors import FedadcError
from fedadc.runs.record import is_finished, read_run
from fedadc.studies.progress import PaceLearner, remaining
from fedadc.studies.queue import Job, Outcome, Progress, RunsFailed, require_none_failed, train_jobs

SMALL: dict[str, Any] = {
    "rounds": 4,
    "data": {"name": "digits", "clients": 6, "validation": 0.2},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "fedadc", "nesterov": True},
    "local": {"steps": 2, "batch_size": 8, "lr": 0.1},
    "cohort": {"size": 2},
}
HOURS = 10**6  # rounds
RUNS = "runs/long/*/*/"
LINUX = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="only Linux lists all processes of a group")
KILLER = """
import os, pathlib, signal
import fedadc

class Killed(fedadc.methods.FedAvg):
    "Its process is killed in round 3, the first time."
    def update(self, theta, server, mean, info):
        mark = pathlib.Path(__file__).parent / "killed"
        if info.round == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update(theta, server, mean, info)

class Doomed(fedadc.methods.FedAvg):
    def update(self, theta, server, mean, info):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def job(place: Path, name: str = "run", until: int | None = None, **changes: Any) -> Job:
    return Job(name, fedadc.load_config({**SMALL, **changes}, folder=place), place / "out" / name, until)


def records(path: Path) -> list[dict[str, Any]]:
    return [{**record, "seconds": 0} for record in read_run(path).records]


def test_runs_are_kept_when_finished_and_resumed_when_not(tmp_path: Path) -> None:
    jobs = [job(tmp_path, f"seed{seed}", seed=seed) for seed in range(3)]
    fedadc.run(jobs[0].config, out=jobs[0].path)
    before = (jobs[0].path / "metrics.jsonl").stat().st_mtime_ns
    fedadc.run(jobs[1].config, out=jobs[1].path, until=2)
    outcomes = train_jobs(jobs, slots=2)
    assert [outcome.status for outcome in outcomes] == ["finished"] * 3
    assert outcomes[0].seconds == 0 < outcomes[1].seconds
    assert (jobs[0].path / "metrics.jsonl").stat().st_mtime_ns == before
    for done in jobs:
        whole = fedadc.run(done.config).history
        assert records(done.path) == [{**record, "seconds": 0} for record in whole]


def test_a_paused_run_goes_on_with_the_bits_of_one_that_never_paused(tmp_path: Path) -> None:
    schedule = {"local": {**SMALL["local"], "schedule": "cosine"}}
    whole = job(tmp_path, "whole", **schedule)
    train_jobs([whole])
    for until in (1, 3, 9):
        paused = job(tmp_path, "paused", until, **schedule)
        (outcome,) = train_jobs([paused])
        assert outcome.status == "finished" and records(paused.path)[-1]["round"] == min(until, 4)
        assert is_finished(paused.path, paused.config) == (until == 9)
    assert records(paused.path) == records(whole.path)
    model = "model.safetensors"
    assert (paused.path / model).read_bytes() == (whole.path / model).read_bytes()


def test_a_run_of_other_settings_is_named_and_left_alone(tmp_path: Path) -> None:
    mine, other = job(tmp_path), job(tmp_path, seed=7)
    good = job(tmp_path, "good")
    for rounds in (4, 2):  # finished, and not
        fedadc.run(other.config, out=other.path, until=rounds, overwrite=True)
        before = {file: file.read_bytes() for file in other.path.rglob("*") if file.is_file()}
        failed, fine = train_jobs([mine, good])
        assert failed.status == "failed" and "was started with other settings: seed 7 (now 0)" in failed.message
        assert fine.status == "finished"
        assert {file: file.read_bytes() for file in other.path.rglob("*") if file.is_file()} == before


def test_a_damaged_run_is_named_and_left_alone(tmp_path: Path) -> None:
    broken = job(tmp_path)
    fedadc.run(broken.config, out=broken.path, until=3)
    shutil.rmtree(broken.path / "checkpoints")
    (outcome,) = train_jobs([broken])
    assert outcome.status == "failed" and outcome.exit_code == 5 and "checkpoints are missing" in outcome.message
    with pytest.raises(RunsFailed, match="checkpoints are missing"):
        require_none_failed([outcome])


def test_a_killed_process_is_reported_and_its_run_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.py").write_text(KILLER)
    killed = job(tmp_path, method="mine:Killed")
    (outcome,) = train_jobs([killed])
    assert outcome.status == "finished" and (tmp_path / "killed").exists()
    assert f"{killed.path}: its process was killed by SIGKILL" in caplog.text and "started again" in caplog.text
    assert records(killed.path) == [{**r, "seconds": 0} for r in fedadc.run(killed.config).history]


def test_a_process_that_is_killed_every_time_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KILLER)
    doomed, good = train_jobs([job(tmp_path, method="mine:Doomed"), job(tmp_path, "good")], slots=1)
    assert doomed.status == "failed" and doomed.exit_code == 6
    assert "was killed by SIGKILL, 3 times in all; if memory is short, use fewer `jobs`" in doomed.message
    assert good.status == "finished"


def test_a_run_starts_only_if_it_is_expected_to_fit_the_budget(tmp_path: Path) -> None:
    fits, too_long, small = (job(tmp_path, name) for name in ("fits", "long", "small"))
    costs = {"fits": 1.0, "long": 1e6, "small": 1.0}
    jobs = [Job(j.label, j.config, j.path, cost=costs[j.label]) for j in (fits, too_long, small)]
    outcomes = train_jobs(jobs, slots=1, deadline=time.monotonic() + 600)
    assert [outcome.status for outcome in outcomes] == ["finished", "not run", "finished"]
    assert not too_long.path.exists()
    fedadc.run(too_long.config, out=too_long.path, until=3)  # a quarter is left
    (rest,) = train_jobs([replace(jobs[1], cost=800.0)], deadline=time.monotonic() + 600)
    assert rest.status == "finished" and rest.rounds == 1


def test_progress_counts_runs_and_learns_the_time_left(tmp_path: Path) -> None:
    seen: list[Progress] = []
    train_jobs([job(tmp_path, str(n), seed=n, rounds=30) for n in range(3)], slots=1, watch=seen.append)
    assert seen[0].ended == 0 and seen[0].runs == 3 and seen[0].seconds_left is None
    assert seen[-1].ended == 3 and seen[-1].seconds_left == 0
    assert [p.share for p in seen] == sorted(p.share for p in seen)
    assert any(p.running and (p.seconds_left or 0) > 0 for p in seen)


def test_the_pace_of_a_kind_is_its_own_once_it_is_known() -> None:
    learned = PaceLearner()
    assert learned.seconds("a", 10) is None
    learned.add("a", 10, 20)
    assert learned.seconds("a", 5) == 10 and learned.seconds("b", 5) == 10
    learned.add("b", 1, 8)
    assert learned.seconds("a", 5) == 10 and learned.seconds("b", 5) == 40
    assert learned.seconds("c", 11) == 28
    learned.add("d", 0, 100)  # a process that is still loading says nothing about the pace
    assert learned.seconds("c", 11) == 28 and learned.seconds("d", 11) == 28
    assert remaining([30, 1, 1], 2) == 30 and remaining([4, 4, 4], 2) == 6 and remaining([], 2) == 0


def test_two_jobs_never_share_a_directory(tmp_path: Path) -> None:
    with pytest.raises(FedadcError, match="same run directory"):
        train_jobs([job(tmp_path), job(tmp_path)])


def test_divergence_is_a_result(tmp_path: Path) -> None:
    (outcome,) = train_jobs([job(tmp_path, local={**SMALL["local"], "lr": 1e25})])
    assert outcome.status == "diverged"
    require_none_failed([outcome])
    require_none_failed([Outcome(outcome.job, "not run")])


EXPERIMENT: dict[str, Any] = {
    "title": "long",
    "seeds": [0, 1, 2],
    "budget": 2,
    "base": {**SMALL, "rounds": HOURS},
    "runs": {"FedAvg": {"set": {"method": "fedavg"}, "grid": {"local.lr": [0.1, 0.2]}}},
}


SLOW = """
import time
import fedadc

class Slow(fedadc.methods.FedAvg):
    "It takes seconds to save its model, as on a slow disk."
    def evaluated(self, theta, server):
        time.sleep(2)
        return super().evaluated(theta, server)
"""


@contextmanager
def long_experiment(place: Path, jobs: int = 2, **changes: Any) -> Iterator[subprocess.Popen[str]]:
    """An experiment of six runs that would take hours, once two of them have checkpoints."""
    (place / "long.yaml").write_text(yaml.safe_dump({**EXPERIMENT, **changes}, sort_keys=False))
    words = [sys.executable, "-m", "fedadc", "experiment", "long.yaml", "--jobs", str(jobs)]
    process = subprocess.Popen(
        words, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        wait_for(lambda: len(list(place.glob("runs/long/*/*/checkpoints/*.json"))) >= jobs)
        yield process
    finally:
        with_group(process.pid, signal.SIGKILL)
        process.wait()


def with_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def members(session: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@LINUX
@pytest.mark.parametrize(
    ("number", "code", "to_group"),
    [(signal.SIGTERM, 143, False), slow(signal.SIGTERM, 143, True), (signal.SIGINT, 130, True),
     slow(signal.SIGHUP, 129, True), (signal.SIGKILL, -9, False), slow(signal.SIGINT, 130, False),
     slow(signal.SIGQUIT, -3, False)],
)  # fmt: skip
def test_a_signal_ends_an_experiment_within_seconds(tmp_path: Path, number: int, code: int, to_group: bool) -> None:
    with long_experiment(tmp_path) as process:
        begun = set(tmp_path.glob(RUNS))
        (os.killpg if to_group else os.kill)(process.pid, number)
        sent = time.monotonic()
        assert process.wait(60) == code
        wait_for(lambda: not members(process.pid))
        assert time.monotonic() - sent < 15, "processes have 10 seconds to save their runs"
        printed = process.stdout.read() if process.stdout else ""
    assert "Traceback" not in printed
    assert set(tmp_path.glob(RUNS)) == begun, "no further run was begun"
    assert len(begun) == 2
    for path in begun:  # all that was recorded is in a checkpoint, so nothing is lost
        last = read_run(path).records[-1]["round"]
        manifests = sorted(path.glob("checkpoints/*.json"))
        if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            assert manifests[-1].stem == f"round-{last:08d}"
            assert "give the same command again to continue" in printed
        trained = fedadc.resume(path, f"rounds={last + 1}").history
        assert trained[-1]["round"] == last + 1


@LINUX
@pytest.mark.parametrize("server_dies", [slow(False), True])
def test_no_process_is_left_when_the_command_has_ended_even_if_saving_is_slow(
    tmp_path: Path, server_dies: bool
) -> None:
    """A signal to the group also ends the server that starts processes; its children are waited for all the same."""
    (tmp_path / "mine.py").write_text(SLOW)
    runs = {"Slow": {"set": {"method": "mine:Slow"}, "grid": {"local.lr": [0.1, 0.2]}}}
    base = {**EXPERIMENT["base"], "evaluate": {"every": HOURS}}
    with long_experiment(tmp_path, runs=runs, base=base) as process:
        (os.killpg if server_dies else os.kill)(process.pid, signal.SIGTERM)
        assert process.wait(60) == 143
        assert not [pid for pid in members(process.pid) if trains(pid)]
    for path in tmp_path.glob(RUNS):
        assert (path / "model.safetensors").is_file()


@LINUX
def test_the_same_command_goes_on_and_a_killed_run_is_tried_again(tmp_path: Path) -> None:
    rounds: dict[Path, int] = {}
    for _ in range(2):
        with long_experiment(tmp_path) as process:
            wait_for(lambda done=rounds: all(rounds_of(p) > done.get(p, 0) + 1 for p in tmp_path.glob(RUNS)))  # type: ignore[misc]
            children = [pid for pid in members(process.pid) if pid != process.pid and trains(pid)]
            os.kill(victim := children[-1], signal.SIGKILL)
            wait_for(lambda gone=victim: not trains(gone))  # type: ignore[misc]
            wait_for(lambda: len([pid for pid in members(process.pid) if trains(pid)]) == 2)
            assert process.poll() is None
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(60) == 143
            assert "was killed by SIGKILL" in (process.stdout.read() if process.stdout else "")
        now = {path: rounds_of(path) for path in tmp_path.glob(RUNS)}
        assert len(now) == 2 and all(now[path] >= rounds.get(path, 1) for path in now)  # resumed, not begun again
        rounds = now


def rounds_of(path: Path) -> int:
    try:
        return int(read_run(path).records[-1]["round"])
    except FedadcError:
        return 0


def trains(pid: int) -> bool:
    """True if a process has a metrics file open."""
    try:
        return any(file.readlink().name == "metrics.jsonl" for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
