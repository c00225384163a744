"""Where torch computes, and the settings under which the same config gives the same bits (docs/architecture.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedadc.errors import require


@contextmanager
def exact() -> Iterator[None]:
    """One thread, no TF32, deterministic kernels; what was set before comes back after."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic  # a module with a property, which type checkers do not see
    filled = memory.fill_uninitialized_memory
    torch.set_num_threads(1)  # two threads change the order of additions
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # a safety net for kernels, at the price of a pass
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = filled
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32[0], tf32[1]
        torch.backends.cudnn.benchmark = tf32[2]


def resolve_workers(text: str) -> int:
    """`auto` is one worker per core that this process may use."""
    if text == "auto":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    require(text.isdecimal(), f"--workers is auto or a number such as 2 (0: this process alone), not {text!r}.")
    return int(text)


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
