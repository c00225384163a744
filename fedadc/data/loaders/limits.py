"""Protection against files that would expand far beyond their size on disk.

The size that a file declares for itself is checked before memory is allocated for it.
"""

from __future__ import annotations

from fedadc.errors import DataError, FedadcError

ALWAYS_ALLOWED = 64 << 20  # bytes that any machine can spare
MAX_RATIO = 100  # real images and tables compress 2 to 50 times; a deflate bomb reaches 1,032


def require_proportionate(
    declared: int, stored: int, what: str, remedy: str, kind: type[FedadcError] = DataError
) -> None:
    """Refuse a file whose declared size in memory is out of proportion to its size on disk."""
    if declared > max(ALWAYS_ALLOWED, MAX_RATIO * stored):
        in_memory, on_disk = _readable(declared), _readable(stored)
        raise kind(f"{what} would take {in_memory} of memory, out of proportion to {on_disk} on disk; {remedy}.")


def _readable(size: int) -> str:
    """A size with its unit. A damaged or hostile file may declare far more than petabytes."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size} {unit}"
        size //= 1000
    return f"{size} PB" if size < 10**6 else "more than a million petabytes"
