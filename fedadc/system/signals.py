"""Ctrl-C and the signals that ask a process to end: they stop a run between two of its steps, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Listener:
    holding = 0  # how many `deferred_signals` are under way
    waiting: int | None = None  # a signal that nobody has answered: Python drops what is raised in a destructor
    last: int = signal.SIGINT

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.last = self.waiting = number
        if not self.holding:
            raise Stopped(number)


_listener = _Listener()


def last_signal() -> int:
    """The last signal that asked for the end; SIGINT if Python itself dealt with it."""
    return _listener.last


def ignoring_signals() -> None:
    """From here to the end of the process, which is under way."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Raise `Stopped` where a signal asks for the end; what a user has set up for a signal, or ignores, stays his."""
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    ours = [n for n in SIGNALS if signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)]
    before = {number: signal.signal(number, _listener) for number in ours}
    try:
        yield
    finally:
        _listener.waiting = None
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred_signals(for_good: bool = False) -> Iterator[None]:
    """A signal that comes meanwhile takes effect afterwards; never, if the end is under way already."""
    if threading.current_thread() is not threading.main_thread():  # where no signal is heard
        yield
        return
    _listener.holding += 1
    try:
        yield
    finally:
        _listener.holding -= 1
        number = _listener.waiting
        if number is not None and not _listener.holding:
            _listener.waiting = None
            if not for_good:
                raise Stopped(number)
