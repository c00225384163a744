"""The number of workers, their devices, and the environment in which processes are started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedadc.errors import FedadcError
from fedadc.system.determinism import device_of, resolve_workers
from fedadc.system.processes import KEEP_MEMORY, cores, environment_set


def test_auto_is_a_worker_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_workers("auto", "cpu") == (cores() if cores() > 1 else 0)
    for count, workers in ((1, 0), (2, 2), (7, 7)):  # on a single core, a worker process only adds overhead
        monkeypatch.setattr("fedadc.system.determinism.cores", lambda count=count: count)
        assert resolve_workers("auto", "cpu") == workers


@pytest.mark.parametrize(("quota", "count"), [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("", 8)])
def test_the_quota_of_a_container_limits_the_cores(
    quota: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    assert cores(tmp_path / "cpu.max") == count and cores(tmp_path / "none") == 8


@pytest.mark.parametrize(
    ("device", "per_gpu", "gpus", "workers"),
    [
        ("cuda", 1, 4, 4),
        ("cuda", 3, 4, 12),
        ("cuda:1", 3, 4, 3),
        ("cuda", 1, 1, 0),
        ("cuda:0", 1, 8, 0),
        ("mps", 5, 0, 0),
    ],
)
def test_auto_counts_gpus(device: str, per_gpu: int, gpus: int, workers: int) -> None:
    assert resolve_workers("auto", device, per_gpu, gpus) == workers


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "mps"])
def test_a_number_of_workers_is_used_as_given(device: str) -> None:
    assert (resolve_workers("3", device), resolve_workers(3, device), resolve_workers("0", device)) == (3, 3, 0)


@pytest.mark.parametrize("text", ["many", "-1", "2.5", "", "513", True])
def test_invalid_numbers_of_workers_are_rejected(text: str) -> None:
    with pytest.raises(FedadcError, match="workers must be auto or a number from 0"):
        resolve_workers(text, "cpu")


def test_workers_take_turns_on_the_gpus() -> None:
    turns = [device_of(worker, torch.device("cuda"), gpus=3) for worker in range(5)]
    assert turns == [torch.device("cuda", index) for index in (0, 1, 2, 0, 1)]
    for one in ("cuda:2", "cpu", "mps"):
        assert device_of(4, torch.device(one), gpus=3) == torch.device(one)


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "17")
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    before = dict(os.environ)
    with environment_set(KEEP_MEMORY):
        assert os.environ["MALLOC_MMAP_MAX_"] == "17"
        assert os.environ["MALLOC_TRIM_THRESHOLD_"] == KEEP_MEMORY["MALLOC_TRIM_THRESHOLD_"]
    assert dict(os.environ) == before


INTERRUPTED = """
import os, signal, subprocess, sys
from fedadc.system.processes import blocked_interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
child = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('child alive')"
try:
    with blocked_interrupts():
        started = subprocess.Popen([sys.executable, "-c", child])
        os.kill(os.getpid(), signal.SIGINT)
        assert started.wait() == 0
    print("signal lost")
except KeyboardInterrupt:
    print("signal received")
"""


def test_an_interrupt_during_a_process_start_reaches_only_the_parent() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert done.stdout == "child alive\nsignal received\n", done.stderr


def test_starting_the_process_server_does_not_import_torch() -> None:
    code = "import sys, fedadc.system.processes as p; p.start_process_server(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_training_imports_no_compiler() -> None:
    """torch.use_deterministic_algorithms would import one, which takes a second."""
    code = (
        "import sys; from fedadc.system.determinism import deterministic\n"
        "with deterministic(): pass\nassert 'torch._inductor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
