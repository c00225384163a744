"""Every exit code, by the cause that leads to it, in real processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from commands import SMALL, records
from doomed import Life
from family import linux
from fedadc.cli.app import EXIT_CODES

pytestmark = linux

METHODS = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path

from fedadc.errors import DataError
from fedadc.methods import FedAvg


@dataclass(frozen=True, kw_only=True)
class Troubled(FedAvg):
    trouble: str = "none"
    after: int = 1  # rounds that go well

    @property
    def mark(self):
        return Path(__file__).with_name(f"{self.trouble}.mark")

    def update(self, theta, server, mean, info):
        if info.round == self.after:
            self.mark.touch()
        return super().update(theta, server, mean, info)

    def step(self, theta, grad, local):
        if self.after == 0 or self.mark.exists():
            self.fail()
        return super().step(theta, grad, local)

    def fail(self):
        if self.trouble == "bug":
            return 1 / 0
        if self.trouble == "prior":
            open("prior.npy")
        if self.trouble == "late data":
            time.sleep(0.5)
            raise DataError("the prior is damaged.")
        if self.trouble == "forbidden":
            raise PermissionError(13, "Permission denied", "prior.npy")
        if self.trouble == "death":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config small.yaml, methods that fail, and the finished run `good`."""
    folder = tmp_path_factory.mktemp("exits")
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    (folder / "mine.py").write_text(METHODS)
    assert code(folder, *run(folder, "good"))[0] == 0
    return folder


def run(place: Path, name: str, *changes: str, workers: int = 0) -> list[str]:
    words = ["run", str(place / "small.yaml"), *changes, "--out", str(place / name), "--workers", str(workers)]
    return [*words, "--data-dir", str(place / "data")]


def code(place: Path, *words: str) -> tuple[int, str]:
    """The exit code of `fedadc ...` in a forked process, and what it printed."""
    with Life(list(words), place / "log") as life:
        return life.end(), life.printed()


def sentence(place: Path, expected: int, *words: str) -> str:
    """The last line of a command that fails with this exit code and no traceback."""
    found, printed = code(place, *words)
    last = printed.splitlines()[-1]
    assert found == expected and last.startswith("error: ") and "Traceback" not in printed, (found, printed)
    return last


def troubled(trouble: str, after: int = 1) -> str:
    return f"method={{name: 'mine:Troubled', trouble: {trouble}, after: {after}}}"


def test_0_is_success_also_where_nothing_is_left_to_do(place: Path) -> None:
    found, printed = code(place, "resume", str(place / "good"))
    assert found == 0 and "already finished" in printed


@pytest.mark.parametrize("workers", [0, 1])
def test_1_is_a_bug_with_its_traceback_and_the_run_is_saved(place: Path, workers: int) -> None:
    name = f"bug{workers}"
    (place / "bug.mark").unlink(missing_ok=True)
    found, printed = code(place, *run(place, name, troubled("bug"), workers=workers))
    assert found == 1 and "Traceback (most recent call last)" in printed and "ZeroDivisionError" in printed
    assert f"is saved at round 1 of 3; resume it with `fedadc resume {place / name}`" in printed
    assert len(records(place / name)) == 1 and (place / name / "model.safetensors").is_file()


@pytest.mark.parametrize(("trouble", "workers"), [("forbidden", 1), ("prior", 0)])
def test_1_is_also_a_file_that_a_users_method_cannot_open(place: Path, trouble: str, workers: int) -> None:
    """The traceback says where; a sentence without it would hide whose file it is."""
    found, printed = code(place, *run(place, trouble, troubled(trouble), workers=workers))
    assert found == 1 and "Traceback (most recent call last)" in printed and "prior.npy" in printed


def test_2_is_wrong_usage_or_config(place: Path) -> None:
    good = str(place / "good")
    assert "No such command" in sentence(place, 2, "frobnicate")
    assert "did you mean 'lr'" in sentence(place, 2, *run(place, "new", "local.lrr=1"))
    assert "there is no config" in sentence(place, 2, "run", str(place / "absent.yaml"))
    assert "there is no run directory" in sentence(place, 2, "resume", str(place / "absent"))
    assert "has no top5 in any round; it has lr" in sentence(place, 2, "compare", good, "--metric", "top5")
    assert "started with other settings" in sentence(place, 2, "resume", good, "local.lr=0.3")
    (place / "table.csv").write_text("a,b\n1,0\n2,1\n3,0\n4,1\n")
    table = f"data={{name: csv, path: {place / 'table.csv'}, label: c, clients: 2}}"
    assert "column 'c' is unknown" in sentence(place, 2, *run(place, "new", table))
    assert not (place / "new").exists()


def test_3_is_divergence(place: Path) -> None:
    assert "its update is not finite" in sentence(
        place, 3, *run(place, "wild", "local.lr=1e25", "faults.bad_update=stop")
    )
    assert "training has diverged" in sentence(place, 3, *run(place, "wild", "local.lr=1e25"))


def test_4_is_a_folder_that_cannot_be_written(place: Path) -> None:
    below_a_file = str(place / "small.yaml" / "x")
    assert "cannot write to" in sentence(place, 4, *run(place, "small.yaml/x"))
    assert "cannot write" in sentence(place, 4, "init", below_a_file)
    assert "plot cannot be written" in sentence(
        place, 4, "compare", str(place / "good"), "--plot", below_a_file + ".png"
    )


def test_4_is_a_full_disk_and_the_run_can_be_resumed(place: Path) -> None:
    """A limit on the size of files stops the metrics from growing, as a full disk would, without being root."""
    words = run(
        place, "full", "rounds=40", "model.hidden=[4]", "checkpoint.every=1", "data.clients=20", "cohort.size=20"
    )
    limited = 'ulimit -f 8; exec "$0" -m fedadc "$@"'
    done = subprocess.run(["bash", "-c", limited, sys.executable, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 4 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"error: cannot write to .*full \(File too large\)\.\n$", done.stderr)
    kept = len(records(place / "full"))
    assert 1 <= kept < 40 and f"is saved at round {kept} of 40; resume it with" in done.stderr
    found, printed = code(place, "resume", str(place / "full"))
    assert found == 0 and f"resuming after round {kept}" in printed and len(records(place / "full")) == 40


def test_4_is_output_that_cannot_be_written(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "fedadc", "list", "schedules"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (4, "error: [Errno 28] No space left on device.\n")


def test_5_is_data_that_is_missing_or_damaged(place: Path) -> None:
    def own(name: str, file: str, more: str = "") -> str:
        return f"data={{name: {name}, path: {place / file}, clients: 2{more}}}"

    assert "there is no file" in sentence(place, 5, *run(place, "new", own("npz", "absent.npz")))
    assert "fedadc data get mnist" in sentence(place, 5, *run(place, "new", "data.name=mnist"))
    (place / "broken.csv").write_text("a,b\n1,0\n2,1,9\n")
    assert "row 3 has 3 fields" in sentence(place, 5, *run(place, "new", own("csv", "broken.csv", ", label: b")))
    (place / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    assert "is damaged or not an .npz" in sentence(place, 5, *run(place, "new", own("npz", "broken.npz")))
    np.savez(place / "nan.npz", x=np.full((4, 2), np.nan), y=np.arange(4))
    assert "has a NaN" in sentence(place, 5, *run(place, "new", own("npz", "nan.npz")))
    (place / "fake").mkdir()
    (place / "fake/train-images-idx3-ubyte.gz").write_bytes(b"not the official file")
    get = ("data", "get", "mnist", "--from", str(place / "fake"), "--data-dir", str(place / "data"))
    assert "damaged or not the official file" in sentence(place, 5, *get)
    (place / "prior.mark").touch()
    assert not (place / "new").exists()


def test_5_is_a_run_directory_with_missing_or_damaged_files(place: Path) -> None:
    bad = place / "damaged"

    def damage(file: str, content: bytes) -> str:
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(place / "good", bad)
        for path in bad.glob(file):
            path.write_bytes(content)
        return str(bad)

    assert "line 1 is damaged" in sentence(place, 5, "compare", damage("metrics.jsonl", b"{\n"))
    assert "not valid YAML" in sentence(place, 5, "compare", damage("config.yaml", b"a: ["))
    assert "not valid YAML" in sentence(place, 5, "resume", damage("config.yaml", b"a: ["))
    assert "not a safetensors file" in sentence(place, 5, "evaluate", damage("model.safetensors", b""))
    words = ("resume", damage("checkpoints/*.json", b"{}"), "rounds=4")
    assert "no checkpoint is usable" in sentence(place, 5, *words)
    shutil.rmtree(bad / "checkpoints")
    assert "its checkpoints are missing" in sentence(place, 5, *words)


def test_6_is_workers_lost_and_the_checkpoint_is_kept(place: Path) -> None:
    found, printed = code(place, *run(place, "lost", troubled("death"), workers=2))
    assert found == 6 and "worker processes died one after another" in printed.splitlines()[-1]
    assert f"is saved at round 1 of 3; resume it with `fedadc resume {place / 'lost'}`" in printed
    (place / "death.mark").unlink()  # the machine has enough memory again
    assert code(place, "resume", str(place / "lost"), "--workers", "0")[0] == 0


def test_signals_end_a_run_with_128_and_their_number(place: Path) -> None:
    numbers = {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}
    with ExitStack() as ended:
        words = {n: run(place, n.name, "rounds=1000000") for n in numbers}
        lives = {n: ended.enter_context(Life(words[n], place / f"{n.name}.log")) for n in numbers}
        for number, life in lives.items():
            assert life.until((place / number.name / "checkpoints").is_dir), life.printed()
            life.signal(number)
            assert life.end() == numbers[number] and "resume it with" in life.printed()


def experiment(place: Path, name: str, runs: dict[str, Any], jobs: int = 1) -> list[str]:
    base = {**SMALL, "rounds": 2, "data": {"name": "digits", "clients": 4, "validation": 0.2}, "method": "fedavg"}
    tree = {"title": name, "seeds": [0], "budget": 1, "base": base, "runs": runs}
    (place / f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return ["experiment", str(place / f"{name}.yaml"), "--out", str(place / "experiment"), "--jobs", str(jobs)]


GOOD: dict[str, Any] = {"FedAvg": {"grid": {"local.lr": [0.1]}}}
WILD: dict[str, Any] = {"Wild": {"grid": {"local.lr": [1e25]}}}


def failing(trouble: str) -> dict[str, Any]:
    return {"set": {"method": {"name": "mine:Troubled", "trouble": trouble, "after": 0}}, "grid": {"local.lr": [0.1]}}


def test_an_experiment_ends_with_0_if_its_runs_end_or_diverge(place: Path) -> None:
    found, printed = code(place, *experiment(place, "fine", {**WILD, **GOOD}))
    assert found == 0 and "all diverged" in printed
    found, printed = code(place, *experiment(place, "wild", WILD))
    assert found == 0 and "every setting diverged" in printed


def test_an_experiment_ends_with_the_code_of_its_first_failure(place: Path) -> None:
    """The first in the file is the last to fail. All are listed, and the other runs are trained."""
    runs = {"Late": failing("late data"), "Buggy": failing("bug"), **WILD, **GOOD}
    found, printed = code(place, *experiment(place, "failing", runs, jobs=2))
    assert found == 5 and "ZeroDivisionError: division by zero\n" in printed and "Traceback" in printed
    late, buggy = (line for line in printed.splitlines() if line.startswith("error: "))
    assert re.fullmatch(r"error: \S*/experiment/late/\S*-seed0: the prior is damaged\.", late)
    assert re.fullmatch(r"error: \S*/experiment/buggy/\S*-seed0: ZeroDivisionError: division by zero", buggy)
    assert len(list(place.glob("experiment/fedavg/*/model.safetensors"))) == 1


def test_an_experiment_ends_with_6_if_a_training_process_is_killed_every_time(place: Path) -> None:
    found, printed = code(place, *experiment(place, "killed", {"Dead": failing("death")}))
    assert found == 6 and "its process was killed by SIGKILL, 3 times in all" in printed.splitlines()[-1]


def test_the_help_and_the_docs_list_every_code(place: Path) -> None:
    """Within 80 columns, one line for each."""
    done = subprocess.run(
        [sys.executable, "-m", "fedadc", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80", "TERM": "dumb"},
    )
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 80
    docs = (Path(__file__).parents[2] / "docs/reliability.md").read_text()
    for number, meaning in EXIT_CODES.items():
        assert f"{number:<15}{meaning}" in lines
        assert f"| {number} | {meaning}" in docs
