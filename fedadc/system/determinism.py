"""Where torch computes, and the settings under which the same config gives the same bits (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedadc.errors import require
from fedadc.system.processes import cores


@contextmanager
def deterministic() -> Iterator[None]:
    """One thread, no TF32, deterministic kernels; what was set before comes back after."""
    threads = torch.get_num_threads()
    deterministic = torch.get_deterministic_debug_mode()
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic  # a module with a property, which type checkers do not see
    filled = memory.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    mkldnn: Any = torch.backends.mkldnn
    enabled = mkldnn.set_flags(True, _fp32_precision=None)[0]
    torch.set_num_threads(1)  # two threads change the order of additions
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import a compiler, for a second
    memory.fill_uninitialized_memory = False  # a safety net for kernels, at the price of a pass
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        mkldnn.set_flags(enabled, _fp32_precision=None)
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)
        memory.fill_uninitialized_memory = filled
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32[0], tf32[1]
        torch.backends.cudnn.benchmark = tf32[2]
        torch.set_float32_matmul_precision(precision)


MOST_WORKERS = 512


def resolve_workers(workers: int | str, device: str, per_gpu: int = 1, gpus: int | None = None) -> int:
    """`auto` is a worker per core, or `per_gpu` on each GPU that the device names; where that is one, this process."""
    if workers != "auto":
        number = str(workers)  # True is none
        right = number.isdecimal() and int(number) <= MOST_WORKERS
        require(right, f"workers is auto or a number from 0 (this process alone) to {MOST_WORKERS}, not {workers!r}.")
        return int(number)
    require(per_gpu >= 1, f"--workers-per-gpu must be at least 1, not {per_gpu}.")
    kind, index = torch.device(device).type, torch.device(device).index
    if kind == "cpu":
        many = cores()
    elif kind == "cuda":
        many = per_gpu * (1 if index is not None else torch.cuda.device_count() if gpus is None else gpus)
    else:
        many = 1
    return many if many > 1 else 0


def device_of(worker: int, device: torch.device, gpus: int | None = None) -> torch.device:
    """Where a worker computes: `cuda` is all GPUs in turn."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", worker % (torch.cuda.device_count() if gpus is None else gpus))


def resolve_device(name: str) -> str:
    """`auto` is the first GPU there is, else the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    require(kind in ("cpu", "cuda", "mps"), f"--device is auto, cpu, cuda, cuda:N or mps, not {name!r}.")
    require(kind != "cuda" or torch.cuda.is_available(), f"--device {name}: this machine has no CUDA device.")
    require(kind != "mps" or torch.backends.mps.is_available(), "--device mps: this machine has no MPS device.")
    return name
