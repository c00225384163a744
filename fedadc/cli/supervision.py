"""Commands that use Ray run in a child process, and this process reports how it ended.

If Ray dies on the machine of a program, it ends the program at once, with exit code 1 and without a word. The child
sends a last message before an orderly end; without it, the parent explains what has happened.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from types import FrameType

from fedadc.errors import WorkersLost

SOCKET = "FEDADC_SUPERVISOR"  # the environment variable with the child's end of the connection
ORDERLY_END = "\n"
RAYS_EXIT_CODE = 1  # of a program on whose machine Ray has died


class NeedsSupervision(Exception):
    """Raised in the first process of a command that uses Ray."""


class _Process:
    may_have_child = False
    to_parent: socket.socket | None = None  # if this is a child


def require_supervision(engine: str) -> str:
    """The callback of --engine."""
    if engine == "ray" and _Process.may_have_child:
        raise NeedsSupervision
    return engine


def supervise() -> int:
    """Run the same command in a child process. Returns its exit code; an error if Ray or somebody else has ended it."""
    from fedadc.system.processes import manner_of_death
    from fedadc.system.signals import SIGNALS

    ours, theirs = socket.socketpair()
    received: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.send_signal(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, forward)
    with ours, theirs:
        environment = {**os.environ, SOCKET: str(theirs.fileno())}
        command = [sys.executable, *sys.orig_argv[1:]]
        children.append(subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]))
        for number in tuple(received):  # while it was started
            children[0].send_signal(number)
        theirs.close()
        with ours.makefile("rb") as stream:
            words = stream.read().decode()  # until the child has ended
        code = children[0].wait()
    if words.endswith(ORDERLY_END):
        return code
    if received:  # before the child could handle it
        return 128 + received[-1]
    if sys.stderr.isatty():
        print("\x1b[?25h", file=sys.stderr)  # a progress bar hides the cursor
    cause = "Ray has died on this machine and has ended this command"
    if code not in (RAYS_EXIT_CODE, -signal.SIGABRT):
        cause = f"this command {manner_of_death(code)}"
    raise WorkersLost(f"{cause}; {words or 'the same command'} goes on from the last checkpoint.")


def begin() -> None:
    """Called first by a process that was started for a command. The child ends when its parent does."""
    number = os.environ.pop(SOCKET, None)
    if number is None:
        _Process.may_have_child = os.name == "posix"
        return
    connection = _Process.to_parent = socket.socket(fileno=int(number))
    connection.set_inheritable(False)

    def end_with_parent() -> None:
        connection.recv(1)  # the parent sends nothing
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()


def say_how_to_go_on(command: str) -> None:
    """What the parent should advise if this process is ended."""
    _send(f"`{command}`")


def announce_orderly_end() -> None:
    _send(ORDERLY_END)


def _send(text: str) -> None:
    if _Process.to_parent is not None:
        _Process.to_parent.sendall(text.encode())
