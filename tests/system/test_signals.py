"""Termination signals: handled between steps, delayed inside them, never lost."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading

import pytest

from fedadc.system.signals import SIGNALS, Stopped, deferred_signals, last_signal, stopping_on_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_stopped(number: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as caught, stopping_on_signals():
        os.kill(os.getpid(), number)
    assert isinstance(caught.value, Stopped) and caught.value.number == number == last_signal()
    assert signal.getsignal(number) is before


def test_a_signal_is_delayed_until_a_step_is_done() -> None:
    done = []
    with pytest.raises(Stopped), stopping_on_signals():
        with deferred_signals():
            with deferred_signals():
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("inner")
            done.append("outer")
        done.append("never")
    assert done == ["inner", "outer"]


def test_a_signal_while_stopping_is_dropped() -> None:
    with pytest.raises(ZeroDivisionError), stopping_on_signals():
        with deferred_signals(drop=True):
            os.kill(os.getpid(), signal.SIGTERM)
        with deferred_signals():
            pass  # the signal was dropped
        raise ZeroDivisionError


def test_a_signal_that_python_drops_takes_effect_at_the_next_step() -> None:
    """Python ignores exceptions raised in a destructor."""

    class Fragile:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                pass  # signal handlers run between two bytecode instructions

    reached = False
    with pytest.raises(Stopped), stopping_on_signals():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.unraisablehook", lambda _: None)
            Fragile()
            gc.collect()
        reached = True
        with deferred_signals():
            pass
    assert reached


def test_a_second_signal_does_not_interrupt_what_the_first_one_has_led_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to a group of processes comes to a child twice: once more from its parent."""
    saved = False
    with pytest.raises(Stopped), stopping_on_signals():
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        except Stopped:
            os.kill(os.getpid(), signal.SIGTERM)
            saved = True
            raise
    assert saved
    with pytest.raises(Stopped), stopping_on_signals():  # a later run is stopped as the first was
        os.kill(os.getpid(), signal.SIGHUP)
    monkeypatch.setattr("fedadc.system.signals.INSISTENCE", 0.0)  # a person who insists is obeyed
    with pytest.raises(Stopped) as caught, stopping_on_signals():
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        except Stopped:
            os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.number == signal.SIGTERM


def test_handlers_of_the_user_are_kept() -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup and shells in the background do
    try:
        with stopping_on_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, ignored)
    assert received == [signal.SIGTERM]


def test_other_threads_are_not_affected() -> None:
    ended = []

    def work() -> None:
        with stopping_on_signals(), deferred_signals():
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended


def test_stopped_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(Stopped(signal.SIGTERM)))
    assert isinstance(again, Stopped) and again.number == signal.SIGTERM
