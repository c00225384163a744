"""A site that runs only the apps that it knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from family import eventually, linux
from fedadc.cli.app import app as commands
from fedadc.errors import FedadcError
from fedadc.runs.record import load_config
from fedadc.sites.app import write_app
from fedadc.sites.pinning import checksum_of_app, pins_of
from federations import Parts, config_of, parts_of


def app_of(folder: Path, rounds: int) -> Path:
    tree = {"rounds": rounds, "data": {"name": "digits", "clients": 2}, "federation": {"sites": 2}}
    write_app(folder, load_config({**tree, "model": {"name": "mlp"}}), name="hospitals")
    return folder


def test_a_checksum_depends_on_what_is_run_and_on_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    first, same, other = app_of(tmp_path / "a", 3), app_of(tmp_path / "b", 3), app_of(tmp_path / "c", 4)
    (first / "__pycache__").mkdir()
    (first / "__pycache__/client_app.cpython-311.pyc").write_bytes(b"compiled")
    assert checksum_of_app(first) == checksum_of_app(same) != checksum_of_app(other)
    assert pins_of(["a" * 64, str(other)]) == ["a" * 64, checksum_of_app(other)]
    said = CliRunner().invoke(commands, ["federation", "checksum", str(first)])
    assert said.output.strip() == checksum_of_app(first)
    (same / "client_app.py").write_text((same / "client_app.py").read_text() + "import os\n")
    assert checksum_of_app(first) != checksum_of_app(same)


def test_what_is_no_app_has_no_checksum(tmp_path: Path) -> None:
    with pytest.raises(FedadcError, match=r"is not the folder of an app: it has no fedadc\.yaml"):
        checksum_of_app(tmp_path)


def test_a_pin_needs_flowers_own_way_of_starting_apps(tmp_path: Path) -> None:
    words = ["federation", "site", "--pin", "A" * 64, "--", "--isolation", "process"]
    said = CliRunner().invoke(commands, words)
    assert "leave out --isolation" in str(said.exception)


class Pinned(Parts):
    """A federation whose second site runs only one app."""

    pin = ""

    def _started(self, name: str) -> object:  # type: ignore[override]
        if name != self.names[1]:
            return super()._started(name)
        words = ["federation", "site", "--pin", self.pin or checksum_of_app(self.federation.app), "--"]
        return self.federation.start_program(
            f"site-{name}", "fedadc", [*words, *self.federation.site_options(name, self.address)]
        )


@linux
@pytest.mark.federation
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("pin", ["", "0" * 64])
def test_a_pinned_site(pin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains with the app that it knows; of another one, nothing is unpacked and nothing run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(Pinned, "pin", pin)
    with parts_of(config_of(), tmp_path / "there", kind=Pinned) as parts:
        if not pin:
            parts.finished()
            return
        sentence = "this site runs only apps that it knows (--pin), not the one with checksum"
        eventually(lambda: f"a site: Flower's error 2: {sentence}" in parts.federation.run_log(), 100)
        assert not parts.federation.run.exists() and not (parts.federation.folder / "sites/1").exists()
