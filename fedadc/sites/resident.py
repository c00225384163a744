"""A process of a site that stays between two messages.

Flower starts a process for every message. To import torch there would take longer than most local updates, so that
process only passes the request on to this one, which has torch, the config and the user's code ready. It keeps nothing
else: what a site must not forget is on its disk. It ends after some time without a request, and if it dies, another one
is started. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, cast

from fedadc.errors import require
from fedadc.sites.node import NodeSettings
from fedadc.sites.packets import Kind, Packet
from fedadc.system.version import __version__

LISTENS_AFTER = 120.0  # seconds for a new process, at most
TRY_AGAIN = 0.05
OTHER_IS_THERE = 3  # exit code of a process that is not needed
LONGEST_ADDRESS = 100  # bytes; systems allow 104 or 108 for a socket
RESIDENT_LOG = "resident.log"  # in the folder of the site


def ask_resident(kind: Kind, request: Packet, app: Path, settings: NodeSettings) -> Packet | None:
    """The answer of the resident process, which is started if there is none; None if it died or there can be none."""
    if not settings.keeps or not hasattr(socket, "AF_UNIX"):
        return None
    address = _address(app, settings)
    if len(os.fsencode(address)) > LONGEST_ADDRESS:
        return None
    for _ in range(2):  # the first may be about to end
        with suppress(OSError, EOFError), _connected(address, app, settings) as channel:
            channel.send_bytes(kind.encode())
            _send(channel, request)
            return _receive(channel)
    return None


def _send(channel: Connection[bytes, bytes], packet: Packet) -> None:
    for part in (json.dumps(dict(packet.facts)).encode(), packet.head, packet.body):
        channel.send_bytes(part)


def _receive(channel: Connection[bytes, bytes]) -> Packet:
    return Packet(json.loads(channel.recv_bytes()), channel.recv_bytes(), channel.recv_bytes())


def _address(app: Path, settings: NodeSettings) -> Path:
    """The socket for an app, settings and version, in a folder that only this user may enter."""
    folder = Path(tempfile.gettempdir()) / f"fedadc-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    mine = status.st_uid == os.getuid() and status.st_mode & 0o777 == 0o700 and folder.is_dir()
    require(mine, f"{folder} must be a folder that only its owner may enter; remove it.")
    words = json.dumps([str(app), __version__, sys.executable, settings.text()])
    return folder / hashlib.sha256(words.encode()).hexdigest()[:32]


def _connect(address: Path) -> Connection[bytes, bytes]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(address))
        return Connection(connection.detach())


def _connected(address: Path, app: Path, settings: NodeSettings) -> Connection[bytes, bytes]:
    with suppress(OSError):
        return _connect(address)
    until, process = time.monotonic() + LISTENS_AFTER, None
    while time.monotonic() < until and (process is None or process.poll() in (None, OTHER_IS_THERE)):
        if not _is_locked(address) and (process is None or process.poll() is not None):
            process = _started(address, app, settings)
        time.sleep(TRY_AGAIN)
        with suppress(OSError):
            return _connect(address)
    raise OSError


def _lock_file(address: Path) -> Path:
    return address.with_suffix(".lock")


def _is_locked(address: Path) -> bool:
    """Whether a process is there, or about to be there."""
    with _lock_file(address).open("w") as lock:
        return not _lock(lock)


def _lock(file: IO[str]) -> bool:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _started(address: Path, app: Path, settings: NodeSettings) -> subprocess.Popen[bytes]:
    # -P: what is in the working folder is not imported
    words = [sys.executable, "-P", "-m", __name__, str(address), str(app), settings.text()]
    with (settings.own_folder() / RESIDENT_LOG).open("ab") as log:
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def main(address: str, app: str, text: str) -> int:
    """Answer requests until none has come for a while; a second process for the same requests ends at once."""
    with _lock_file(Path(address)).open("w") as lock:
        if not _lock(lock):
            return OTHER_IS_THERE
        _answer_requests(address, app, text)
    return 0


def _answer_requests(address: str, app: str, text: str) -> None:
    from fedadc.sites.app import config_of_app  # these import torch
    from fedadc.sites.replies import reply
    from fedadc.sites.site import Site

    site = Site(NodeSettings.from_text(text), config_of_app(Path(app)))
    Path(address).unlink(missing_ok=True)  # of a process that was killed
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        listening.settimeout(site.settings.keeps)
        with suppress(TimeoutError):
            while True:
                accepted = listening.accept()[0]
                accepted.setblocking(True)
                with Connection(accepted.detach()) as channel, suppress(OSError, EOFError):  # the other was killed
                    kind, request = cast(Kind, channel.recv_bytes().decode()), _receive(channel)
                    _send(channel, reply(site, kind, request))
    Path(address).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
