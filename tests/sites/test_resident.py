"""The process of a site that stays between two messages: it answers as a new process would, and it goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from direct_sites import config_of
from family import eventually, linux
from fedadc.errors import FedadcError
from fedadc.sites.app import write_app
from fedadc.sites.node import NodeSettings
from fedadc.sites.packets import PROBLEM, Packet
from fedadc.sites.replies import reply
from fedadc.sites.resident import ask_resident
from fedadc.sites.site import Site

pytestmark = linux


@pytest.fixture
def app(site_arrays: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_app(site_arrays / "app", config_of(site_arrays))
    with tempfile.TemporaryDirectory(prefix="f") as short:  # the paths of sockets are
        monkeypatch.setattr("tempfile.tempdir", short)
        yield site_arrays / "app"


def settings_of(app: Path, keeps: float) -> NodeSettings:
    return NodeSettings("bert", str(app.parent / "bert.npz"), app.parent / "kept", keeps=keeps)


def residents(app: Path) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"fedadc.sites.resident .*{app}"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


HELLO = Packet({"holds_out": True, "as_text": "[]"})


def test_it_answers_as_the_site_does_and_stays(app: Path) -> None:
    settings = settings_of(app, keeps=20)
    expected = reply(Site(settings, config_of(app.parent)), "hello", HELLO)
    assert expected.body
    answers = [ask_resident("hello", HELLO, app, settings) for _ in range(2)]
    assert answers == [expected, expected]
    (process,) = residents(app)
    assert ask_resident("train", Packet({"run": "r1"}), app, settings) == Packet(
        {"client": "bert", PROBLEM: "site bert has not joined run r1.", "not joined": True}
    )
    os.kill(process, signal.SIGKILL)
    eventually(lambda: not residents(app))
    assert ask_resident("hello", HELLO, app, settings) == expected, "another one is started"
    assert residents(app) != [process]
    os.kill(residents(app)[0], signal.SIGKILL)


def test_it_goes_when_no_request_comes(app: Path) -> None:
    settings = settings_of(app, keeps=0.5)
    assert ask_resident("hello", HELLO, app, settings) is not None
    eventually(lambda: not residents(app))


def test_a_site_may_do_without(app: Path) -> None:
    assert ask_resident("hello", HELLO, app, settings_of(app, keeps=0)) is None


def test_a_long_path_of_temporary_files_allows_none(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = app.parent / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert ask_resident("hello", HELLO, app, settings_of(app, keeps=5)) is None and not residents(app)


def test_one_that_cannot_start_is_no_answer(app: Path) -> None:
    (app / "fedadc.yaml").write_text("rounds: many")
    assert ask_resident("hello", HELLO, app, settings_of(app, keeps=5)) is None
    assert "Error" in (app.parent / "kept" / "resident.log").read_text()


def test_its_socket_is_for_its_owner_only(app: Path) -> None:
    settings = settings_of(app, keeps=5)
    folder = Path(tempfile.gettempdir()) / f"fedadc-{os.getuid()}"
    folder.mkdir(mode=0o755)
    with pytest.raises(FedadcError, match="only its owner may enter"):
        ask_resident("hello", HELLO, app, settings)


def test_it_needs_no_torch_to_ask() -> None:
    code = "import sys, fedadc.sites.resident, fedadc.sites.flower; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_several_requests_at_once_start_one_process(app: Path) -> None:
    settings = settings_of(app, keeps=20)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: ask_resident("hello", HELLO, app, settings), range(3)))
    assert answers[0] is not None and answers == [answers[0]] * 3
    eventually(lambda: len(residents(app)) == 1)  # the others have noticed that they are not needed
    (process,) = residents(app)
    os.kill(process, signal.SIGKILL)


def test_it_imports_nothing_from_the_working_folder(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (app.parent / "yaml.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(app.parent)
    assert ask_resident("hello", HELLO, app, settings_of(app, keeps=1)) is not None
