"""How much memory a file may ask for before anything in it is believed."""

from __future__ import annotations

from fedadc.errors import require

ALWAYS = 64 << 20  # bytes that any machine has to spare
RATIO = 100  # honest pixels and tables shrink 2 to 50 times; deflate can pretend up to 1,032


def require_proportionate(asked: int, stored: int, what: str, remedy: str) -> None:
    """Refuse what grows out of proportion in memory, by what it says of itself."""
    require(
        asked <= max(ALWAYS, RATIO * stored),
        f"{what} would take {_shown(asked)} of memory, out of proportion to the {_shown(stored)} on disk; {remedy}.",
    )


def _shown(size: int) -> str:
    """A size as people say it; no file has more than petabytes, but it may say so."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size} {unit}"
        size //= 1000
    return f"{size} PB" if size < 10**6 else "endless petabytes"
