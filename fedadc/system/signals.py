"""Ctrl-C and termination signals: they stop a run between two steps, never in the middle of one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has only the latter, which ends a process at once
INSISTENCE = 10.0  # seconds after which a second signal interrupts what the first one has led to


class Stopped(KeyboardInterrupt):
    """Raised when a signal asks the process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Handler:
    deferring = 0  # nesting depth of `deferred_signals`
    pending: int | None = None  # a signal that has not stopped the process yet: Python drops errors in a destructor
    last: int = signal.SIGINT
    stopping_since = -INSISTENCE  # when `Stopped` was raised last

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.last = self.pending = number
        # One signal often comes twice, e.g. to a group of processes and then from the parent. The second must not
        # interrupt what the first one has led to: saving the run.
        if not self.deferring and time.monotonic() - self.stopping_since > INSISTENCE:
            raise self.stopped(number)

    def stopped(self, number: int) -> Stopped:
        self.stopping_since = time.monotonic()
        return Stopped(number)


_handler = _Handler()


def last_signal() -> int:
    """The last signal that asked the process to stop; SIGINT if Python handled it itself."""
    return _handler.last


def ignoring_signals() -> None:
    """Ignore further signals until the process exits; called when it is already about to exit."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Raise `Stopped` when a signal asks to stop. Signals that the user handles or ignores are left alone."""
    if threading.current_thread() is not threading.main_thread():  # Python allows signal handlers only there
        yield
        return
    unhandled = [n for n in SIGNALS if signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)]
    before = {number: signal.signal(number, _handler) for number in unhandled}
    try:
        yield
    finally:
        _handler.pending, _handler.stopping_since = None, -INSISTENCE
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def deferred_signals(drop: bool = False) -> Iterator[None]:
    """Delay signals until afterwards. With `drop`, discard them: the process is already stopping."""
    if threading.current_thread() is not threading.main_thread():  # other threads receive no signals
        yield
        return
    _handler.deferring += 1
    try:
        yield
    finally:
        _handler.deferring -= 1
        number = _handler.pending
        if number is not None and not _handler.deferring:
            _handler.pending = None
            if not drop:
                raise _handler.stopped(number)
