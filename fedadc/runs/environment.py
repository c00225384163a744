"""The environment of a run: software versions and hardware on which its result depends besides its config."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedadc.runs.layout import ENVIRONMENT
from fedadc.system.version import __version__

# results may differ in their bits if one of these differs
BIT_RELEVANT = ("fedadc", "torch", "machine", "cpu_capability", "mkl_cbwr", "device")
Facts = dict[str, Any]


def read_facts(folder: Path) -> Facts:
    """The recorded environment of the run in a folder; empty if it cannot be read."""
    try:
        facts = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
        return facts if isinstance(facts, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def text_of(facts: Facts, key: str) -> str | None:
    """The value of a key if it is printable text, else None."""
    value = facts.get(key)
    return value if isinstance(value, str) and value.isprintable() else None


def environment_changes(before: Facts, now: Facts) -> list[str]:
    """The differences between two environments that may change the bits of a result."""
    return [f"{key} {before.get(key)} (now {now.get(key)})" for key in BIT_RELEVANT if before.get(key) != now.get(key)]


def resumed_environment(before: Facts, now: Facts, round: int) -> Facts:
    """The record of a run that is resumed after a round: the current, the original and every resumed environment."""
    begun = before.get("begun")
    resumed = before.get("resumed")
    return {
        **now,
        "begun": begun if isinstance(begun, dict) else before,
        "resumed": [*(resumed if isinstance(resumed, list) else []), {"round": round, **now}],
    }


def environment(device: str) -> Facts:
    """The current environment."""
    return {
        "fedadc": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl_cbwr": os.environ.get("MKL_CBWR"),
        "device": device,
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    """The git commit of the current directory, and whether files were changed since; None outside a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
