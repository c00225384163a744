"""A site that runs only the apps that it knows.

Flower runs the Python files of an app at every site, so whoever starts a run decides what sites execute. A SuperNode
that is started by `fedadc federation site --pin` runs only apps with given checksums. Flower starts the program
`flwr-clientapp` for every message, and finds it by the PATH; a pinned SuperNode finds ours, which checks first.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import string
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from fedadc.errors import FedadcError, require
from fedadc.sites.app import APP_CONFIG
from fedadc.system.files import write_file

PROGRAM = "flwr-clientapp"
SUPERNODE = "flower-supernode"
CHECKSUM_LENGTH = 64  # of a checksum
PROGRAM_TEXT = """#!/bin/sh
exec {python} -P -c 'from fedadc.sites.pinning import main; main()' {pins} -- "$@"
"""


def checksum_of_app(folder: Path) -> str:
    """The checksum of an app as Flower packs and sends it."""
    require((folder / APP_CONFIG).is_file(), f"{folder} is not the folder of an app: it has no {APP_CONFIG}.")
    from fedadc.sites.flower import packed_app

    return hashlib.sha256(packed_app(folder)).hexdigest()


def pins_of(words: Sequence[str]) -> list[str]:
    """Checksums, each given as itself or as the folder of an app."""
    return [word.lower() if _is_checksum(word.lower()) else checksum_of_app(Path(word)) for word in words]


def _is_checksum(text: str) -> bool:
    return len(text) == CHECKSUM_LENGTH and {*text} <= {*string.hexdigits.lower()}


def become_pinned_site(pins: Collection[str], words: Sequence[str]) -> None:
    """Become a SuperNode with these options, which runs only apps with these checksums. Does not return."""
    for word in words:
        require(
            not "--isolation".startswith(word.partition("=")[0]) or len(word) < len("--i"),
            "--pin works with Flower's own way of starting an app only; leave out --isolation.",
        )
    folder = Path("~/.fedadc/pinned").expanduser() / hashlib.sha256(" ".join(sorted(pins)).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = PROGRAM_TEXT.format(python=shlex.quote(sys.executable), pins=" ".join(sorted(pins)))
    write_file(folder / PROGRAM, text.encode())
    (folder / PROGRAM).chmod(0o700)
    programs = Path(sys.executable).parent
    path = os.pathsep.join([str(folder), str(programs), os.environ.get("PATH", os.defpath)])
    try:
        os.execve(programs / SUPERNODE, [SUPERNODE, *words], {**os.environ, "PATH": path})
    except OSError as error:
        raise FedadcError(
            f"{programs / SUPERNODE} cannot be started ({error.strerror}): pip install 'fedadc[flower]'."
        ) from error


def main() -> None:
    """What Flower starts for a message at a pinned site."""
    from fedadc.sites.flower import run_client_app

    end = sys.argv.index("--")
    pins, sys.argv[1:] = sys.argv[1:end], sys.argv[end + 1 :]
    run_client_app(pins)
