"""Real processes: what is left of them after Ctrl-C, after kill -9, and under the start method of other systems."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import slow, small_federation
from family import alive, descendants, eventually, linux
from fedadc.errors import FedadcError
from fedadc.federation import Federation
from fedadc.methods import FedAvg
from fedadc.models import MLP


def named_memory() -> set[str]:
    """Shared memory of Python's and torch's making that has a name, and so could stay behind."""
    return {path.name for start in ("torch_*", "psm_*", "fedadc*") for path in Path("/dev/shm").glob(start)}


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """`fedadc run` with two workers, some rounds on its way, in a session of its own as in a terminal."""
    config, out = tmp_path / "long.yaml", tmp_path / "out"
    subprocess.run([sys.executable, "-m", "fedadc", "init", str(config)], check=True, capture_output=True)
    command = [sys.executable, "-m", "fedadc", "run", str(config), "rounds=100000", "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--workers", "2"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    metrics = out / "metrics.jsonl"
    eventually(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size > 1000))
    try:
        yield process, out
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@linux
def test_ctrl_c_ends_the_run_and_leaves_nobody(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, out = long_run
    family = descendants(process.pid)
    assert len(family) >= 3  # two workers and their server
    shared = named_memory()
    os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does
    printed = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert re.search(
        rf"{out} is saved at round \d+ of 100000; resume it with `fedadc resume {out}`.*\ninterrupted\.\n$", printed
    )
    assert "Traceback" not in printed
    assert (out / "model.safetensors").is_file()
    eventually(lambda: not alive(family), 5)
    assert named_memory() <= shared


@linux
@pytest.mark.parametrize("seconds", [slow(0.0), 0.4, slow(0.8)])
def test_ctrl_c_during_the_start_is_as_quiet(seconds: float, tmp_path: Path) -> None:
    """While torch is being imported here and in the server of the workers."""
    config = tmp_path / "fedadc.yaml"
    subprocess.run([sys.executable, "-m", "fedadc", "init", str(config)], check=True, capture_output=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "fedadc", "run", str(config), "rounds=100000", "--workers", "2"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=tmp_path,
    )
    try:
        eventually(lambda: descendants(process.pid))  # the first of them
        time.sleep(seconds)
        family = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        printed = process.communicate(timeout=30)[1]
    finally:
        process.kill()  # if it has not ended
    # -2 is 130 to a shell: Python ends by the signal itself if the interrupt came while it ran a string
    assert process.returncode in (130, -signal.SIGINT) and "Traceback" not in printed, printed
    assert printed.rstrip().endswith("interrupted.")
    eventually(lambda: not alive(family), 10)


@linux
def test_workers_do_not_outlive_a_killed_parent(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, _ = long_run
    family = descendants(process.pid)
    process.kill()
    printed = process.communicate(timeout=30)[1]
    eventually(lambda: not alive(family), 10)
    assert "Traceback" not in printed


def test_what_cannot_be_sent_to_a_worker_is_refused() -> None:
    model = MLP((5,), 4, [6])
    model.activation = lambda x: x  # type: ignore[assignment]
    with pytest.raises(FedadcError, match=r"can be sent to another process \(.*lambda.*workers=0 works without"):
        next(Federation(model=model, data=small_federation(), workers=1).rounds(1))


class Dawdling(FedAvg):
    """Clients finish in another order than they are handed out."""

    def begin(self, local: Any) -> Any:
        time.sleep((int(local.data.indices[0]) * 37 % 5) / 100)
        return super().begin(local)


def theta_of(method: FedAvg, workers: int) -> torch.Tensor:
    torch.manual_seed(0)
    trained = Federation(model=MLP((5,), 4, [6]), data=small_federation(), method=method, workers=workers)
    theta = list(trained.rounds(2))[-1].state.theta
    trained.close()
    return theta


def test_who_finishes_first_changes_nothing() -> None:
    assert torch.equal(theta_of(Dawdling(), 3), theta_of(FedAvg(), 0))


def test_spawned_workers_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS and Windows, where nothing is forked."""
    alone = theta_of(FedAvg(), 0)
    monkeypatch.setattr("fedadc.engines.pool.context", lambda: multiprocessing.get_context("spawn"))
    assert torch.equal(theta_of(FedAvg(), 2), alone)


SCRIPT = """
from dataclasses import dataclass
import torch, fedadc

@dataclass(frozen=True, kw_only=True)
class Mine(fedadc.methods.FedAvg):
    def step(self, theta, grad, local):
        return theta - local.lr * grad(theta).sign()

def main():
    net = torch.nn.Sequential(torch.nn.Linear(4, 3))
    data = fedadc.from_clients([(torch.randn(5, 4), torch.arange(5) % 3) for _ in range(6)])
    federation = fedadc.Federation(model=net, data=data, method=Mine(), workers=2)
    for result in federation.rounds(2):
        print("round", result.round)
    federation.close()

"""


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(text)
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60)


def test_a_class_of_the_script_itself_works_in_workers(tmp_path: Path) -> None:
    done = run_script(SCRIPT + 'if __name__ == "__main__":\n    main()\n', tmp_path)
    assert (done.returncode, done.stdout) == (0, "round 1\nround 2\n"), done.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    done = run_script(SCRIPT + "main()\n", tmp_path)
    assert done.returncode == 1
    last = done.stderr.rstrip().splitlines()[-1]
    assert "could not start" in last and 'must do so under `if __name__ == "__main__":`' in last


@pytest.mark.slow
def test_what_a_worker_cannot_find_is_told(tmp_path: Path) -> None:
    """As in a notebook, whose classes no other process can import."""
    nameless = "import sys\ndel sys.modules['__main__'].__file__\n"
    hidden = nameless + SCRIPT + 'if __name__ == "__main__":\n    main()\n'
    done = run_script(hidden, tmp_path)
    assert done.returncode == 1 and "cannot load the model, the method or the objective (Can't get" in done.stderr


@pytest.mark.parametrize("workers", [slow("0"), "2"])
def test_the_command_line_says_in_which_round_and_by_which_client(workers: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import fedadc\nclass Bad(fedadc.methods.FedAvg):\n  def step(self, theta, grad, local): return None\n"
    )
    command = [sys.executable, "-m", "fedadc"]
    subprocess.run([*command, "init", "c.yaml"], check=True, capture_output=True, cwd=tmp_path)
    bad = [*command, "run", "c.yaml", "method=mine:Bad", "--workers", workers]
    done = subprocess.run(bad, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(r"error: Bad.step must return .*not NoneType\. \(in round 1, client \d+\)\n$", done.stderr)
