"""Where a run happens: what its result depends on beside its config."""

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

SAME_BITS = ("fedadc", "torch", "machine", "cpu_capability", "mkl_cbwr", "device")
Facts = dict[str, Any]


def read_facts(folder: Path) -> Facts:
    """Of the run in a folder; nothing if they cannot be read."""
    try:
        facts = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
        return facts if isinstance(facts, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def text_of(facts: Facts, key: str) -> str | None:
    """A fact that should be a text, and is a usable one."""
    value = facts.get(key)
    return value if isinstance(value, str) and value.isprintable() else None


def changes_of(before: Facts, now: Facts) -> list[str]:
    """What differs between two environments in which the bits of a result may differ."""
    return [f"{key} {before.get(key)} (now {now.get(key)})" for key in SAME_BITS if before.get(key) != now.get(key)]


def gone_on(before: Facts, now: Facts, round: int) -> Facts:
    """Of a run that goes on after a round: the present ones, with those of its beginning and of every resumption."""
    begun = before.get("begun")
    resumed = before.get("resumed")
    return {
        **now,
        "begun": begun if isinstance(begun, dict) else before,
        "resumed": [*(resumed if isinstance(resumed, list) else []), {"round": round, **now}],
    }


def environment(device: str) -> Facts:
    """What a result depends on beside its config."""
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
    """Commit of the folder the command ran in, and whether it held changes; None outside a repository."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None
