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
    assert err == "error: this command was killed by SIGKILL; start it again; a study continues where it was.\n"


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


def test_closed_streams_and_a_wrong_supervisor_do_no_harm(tmp_path: Path) -> None:
    """The numbers of closed streams must not go to the connection between both processes."""
    words = f"{sys.executable} -m fedadc run absent.yaml --engine ray"
    for closed in ("<&- >&-", "<&- >&- 2>&-", ">&-"):
        done = subprocess.run(
            ["sh", "-c", f"{words} {closed}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "2>" in closed or done.stderr.startswith("error: there is no config absent.yaml"), done.stderr
    for wrong in ("x", "99"):
        environment = {**os.environ, "FEDADC_SUPERVISOR": wrong}
        done = subprocess.run([sys.executable, "-m", "fedadc", "--version"], env=environment, capture_output=True)
        assert done.returncode == 0


def program(folder: Path, work: str) -> list[str]:
    """A command whose child does the work given."""
    (folder / "fedadc.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\nsys.path.pop(0)\nfrom fedadc.cli import app, supervision\n"
        "supervision.connect_to_supervisor()\n"
        "if supervision._Process.to_parent is None:\n    sys.exit(app._exit_code_of_child())\n" + work
    )
    return [sys.executable, str(folder / "fedadc.py")]


def test_the_parent_waits_for_its_child_only(tmp_path: Path) -> None:
    """A process that the child has forked keeps the connection open."""
    command = program(tmp_path, "if os.fork() == 0:\n    time.sleep(60)\nos._exit(1)\n")
    done = subprocess.run(command, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=30)
    assert done.returncode == 6


def test_a_killed_command_takes_a_process_that_has_announced_its_run_along(tmp_path: Path) -> None:
    """The connection then ends in an error, since its parent had not read the message."""
    work = "supervision.announce_run(Path('run'))\nPath('announced').touch()\ntime.sleep(60)\n"
    parent = subprocess.Popen(program(tmp_path, work), cwd=tmp_path)
    eventually((tmp_path / "announced").exists)
    (child,) = children(parent.pid)
    parent.kill()
    parent.wait()
    eventually(lambda: not alive({child}))
