"""Commands that use Ray run in a child process, and this process reports how it ended.

If Ray dies on the machine of a program, it ends the program at once, with exit code 1 and without a word. The child
announces its exit code before it ends; if it does not, the parent explains what has happened.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from fedadc.errors import WorkersLost

VARIABLE = "FEDADC_SUPERVISOR"  # of the environment: the child's end of the connection
RAYS_EXIT_CODE = 1  # of a program on whose machine Ray has died
MOST_WORDS = 1 << 16  # bytes of all messages of a child


class NeedsSupervision(Exception):
    """Raised in the first process of a command that uses Ray."""


class _Process:
    may_supervise = False  # it was started for a command, and is no child
    to_parent: socket.socket | None = None  # if it is a child


def require_supervision(engine: str) -> str:
    """The callback of --engine, and of what `fedadc doctor` examines."""
    if engine == "ray" and _Process.may_supervise:
        raise NeedsSupervision
    return engine


def supervise() -> int:
    """Run the same command in a child process. Returns its exit code; an error if Ray or somebody else has ended it."""
    from fedadc.system.processes import manner_of_death
    from fedadc.system.signals import SIGNALS

    received: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.send_signal(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, forward)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environment = {**os.environ, VARIABLE: str(theirs.fileno())}
        command = [sys.executable, *sys.orig_argv[1:]]
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the child accepts them when it can handle them
        try:
            children.append(subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        code = children[0].wait()
        said = _read(ours)
    if "exit" in said:
        return int(said["exit"])
    if sys.stderr is not None and sys.stderr.isatty():
        print("\x1b[?25h", file=sys.stderr)  # a progress bar hides the cursor
    cause = "Ray has died on this machine and has ended this command"
    if code not in (RAYS_EXIT_CODE, -signal.SIGABRT):
        cause = f"this command {manner_of_death(code)}"
    elif received:
        cause = f"this command was ended by {signal.Signals(received[-1]).name}"
    raise WorkersLost(f"{cause}; {_advice(said.get('run'))}.")


def _read(connection: socket.socket) -> dict[str, Any]:
    """What the child has said. It has ended; a process that it has forked may still have its end of the connection."""
    connection.setblocking(False)
    try:
        text = connection.recv(MOST_WORDS).decode()
    except OSError:
        return {}
    said: dict[str, Any] = {}
    for line in text.splitlines():
        said |= json.loads(line)
    return said


def _advice(run: str | None) -> str:
    from fedadc.runs.layout import CHECKPOINTS

    if run is None:
        return "start it again; a study continues where it was"
    if any((Path(run) / CHECKPOINTS).glob("round-*")):
        return f"`{shlex.join(['fedadc', 'resume', run, '--engine', 'ray'])}` continues from the last checkpoint"
    return "there was no checkpoint yet, so start it again"


def connect_to_supervisor() -> None:
    """Called first by a process that was started for a command. A child ends when its parent does."""
    number = os.environ.pop(VARIABLE, None)
    try:
        connection = None if number is None else socket.socket(fileno=int(number))
    except (OSError, ValueError):  # not from a supervisor
        connection = None
    if connection is None:
        _Process.may_supervise = os.name == "posix" and _is_command()
        return
    _Process.to_parent = connection
    connection.set_inheritable(False)

    def end_with_parent() -> None:
        with suppress(OSError):  # a parent that was killed before it had read leaves an error, not an end
            connection.recv(1)  # the parent sends nothing
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _is_command() -> bool:
    """Whether this process is `fedadc ...` or `python -m fedadc ...`, and no program that calls our main function."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    started = Path(sys.argv[0]).stem if spec is None else spec.name.partition(".")[0]
    return started == "fedadc"


def accept_signals() -> None:
    """A child can handle signals now; its parent has started it with signals blocked."""
    from fedadc.system.signals import SIGNALS

    if _Process.to_parent is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def announce_run(out: Path) -> None:
    """Tell the parent which run could be resumed."""
    _send({"run": str(out)})


def announce_exit(code: int) -> None:
    _send({"exit": code})


def _send(message: dict[str, Any]) -> None:
    if _Process.to_parent is not None:
        _Process.to_parent.sendall(f"{json.dumps(message)}\n".encode())
