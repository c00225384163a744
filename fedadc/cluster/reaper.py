"""Ends what is left of a local Ray cluster when the process that started it is gone, however it ended.

This file is run as a script by `connection.py`, in a process of its own: it waits until its standard input is closed,
then kills every process of Ray that has open files in the cluster's temporary folder, and deletes the folder. It
imports the standard library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PASSES = 3


def processes_of(folder: str) -> list[int]:
    """The processes of Ray that have files of the folder open: each writes a log there. (Only Linux lists them.)"""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to somebody else
            words = (process / "cmdline").read_bytes()
            of_ray = words.startswith(b"ray::") or b"/ray/" in words
            if of_ray and any(str(file.readlink()).startswith(folder) for file in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def end_cluster(folder: str, owner: int) -> None:
    """Kill the processes of a cluster, except the one that started it, and delete the cluster's folder."""
    for _ in range(PASSES):  # a process may be started while the others are looked for
        for process in processes_of(folder):
            if process != owner:
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_cluster(sys.argv[1], int(sys.argv[2]))
