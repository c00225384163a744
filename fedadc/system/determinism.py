"""Torch settings that make results bit-identical (docs/architecture.md), and the choice of devices and workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedadc.errors import require
from fedadc.system.processes import cores


@contextmanager
def deterministic() -> Iterator[None]:
    """Use one thread, no TF32 and deterministic kernels; restore the previous settings afterwards."""
    threads = torch.get_num_threads()
    deterministic = torch.get_deterministic_debug_mode()
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic  # a module with a property, which type checkers do not see
    filled = memory.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    mkldnn: Any = torch.backends.mkldnn
    enabled = mkldnn.set_flags(True, _fp32_precision=None)[0]
    torch.set_num_threads(1)  # more threads would change the order of additions
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms would import a compiler (1 s)
    memory.fill_uninitialized_memory = False  # only a safety net for kernels, and it costs a pass over memory
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


MAX_WORKERS = 512


def resolve_workers(workers: int | str, device: str, per_gpu: int = 1, gpus: int | None = None) -> int:
    """The number of worker processes; 0 means that this process trains the clients itself.

    `auto` is one worker per core, or `per_gpu` workers on each GPU of the device; 0 where that would be one worker.
    """
    if workers != "auto":
        number = str(workers)  # as text, so that True is rejected
        valid = number.isdecimal() and int(number) <= MAX_WORKERS
        require(valid, f"workers must be auto or a number from 0 (no extra process) to {MAX_WORKERS}, not {workers!r}.")
        return int(number)
    require(per_gpu >= 1, f"workers_per_gpu must be at least 1, not {per_gpu}.")
    kind, index = torch.device(device).type, torch.device(device).index
    if kind == "cpu":
        count = cores()
    elif kind == "cuda":
        count = per_gpu * (1 if index is not None else torch.cuda.device_count() if gpus is None else gpus)
    else:
        count = 1
    return count if count > 1 else 0


def device_of(worker: int, device: torch.device, gpus: int | None = None) -> torch.device:
    """The device of a worker; with `cuda`, the workers are assigned to all GPUs in turn."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", worker % (torch.cuda.device_count() if gpus is None else gpus))


def resolve_device(name: str) -> str:
    """Check the name of a device; `auto` is cuda or mps if available, else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    require(kind in ("cpu", "cuda", "mps"), f"device must be auto, cpu, cuda, cuda:N or mps, not {name!r}.")
    require(kind != "cuda" or torch.cuda.is_available(), f"device is {name}, but this machine has no CUDA device.")
    require(kind != "mps" or torch.backends.mps.is_available(), "device is mps, but this machine has no MPS device.")
    return name
