"""A command that uses Ray waits for a process that does its work: what happens if either of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from commands import SMALL
from family import alive, children, eventually, linux

pytestmark = linux


@pytest.fixture
def command(tmp_path: Path) -> subprocess.Popen[str]:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**SMALL, "rounds": 10**6}))
    words = ["run", "config.yaml", "--out", "run", "--engine", "ray"]
    started = subprocess.Popen(
        [sys.executable, "-m", "fedadc", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    eventually(lambda: children(started.pid))
    return started


def test_the_command_says_that_its_process_was_killed(command: subprocess.Popen[str]) -> None:
    (child,) = children(command.pid)
    os.kill(child, signal.SIGKILL)
    _, err = command.communicate(timeout=60)
    assert command.returncode == 6
    assert err == "error: this command was killed by SIGKILL; the same command goes on from the last checkpoint.\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_are_forwarded(name: str, command: subprocess.Popen[str]) -> None:
    (child,) = children(command.pid)
    number = getattr(signal, name)
    command.send_signal(number)
    command.communicate(timeout=60)
    assert command.returncode == 128 + number and not alive({child})


def test_a_killed_command_takes_its_process_along(command: subprocess.Popen[str]) -> None:
    (child,) = children(command.pid)
    command.kill()
    command.communicate(timeout=60)
    eventually(lambda: not alive({child}))
