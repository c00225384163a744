"""The memory of this process: its peak so far, and giving back what is free."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

PROCESS = Path("/proc/self")  # Linux


def peak_memory() -> int:
    """The largest number of bytes that this process had in memory so far; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        status = (PROCESS / "status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Let the peak be what is in memory now, where the system can (Linux)."""
    with suppress(OSError):
        (PROCESS / "clear_refs").write_text("5")


def give_memory_back() -> None:
    """Return free memory to the system, which a process may otherwise keep (`processes.KEEP_MEMORY`); glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
