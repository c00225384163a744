"""`fedadc federation` refuses what cannot work, before it writes anything."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fedadc.config.starter import init
from fedadc.errors import FedadcError
from fedadc.runs.record import load_config
from fedadc.sites.app import write_app
from fedadc.sites.trial import prepared

PROGRAM = """
import sys
{before}
from fedadc.cli.app import main
sys.exit(main())
"""


def said(folder: Path, *words: str, before: str = "") -> tuple[int, str]:
    """The exit code and the sentence of `fedadc`, in a process of its own."""
    program = [sys.executable, "-c", PROGRAM.format(before=before), *words]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, " ".join(done.stderr.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text("rounds: 1\ndata: {name: digits, clients: 2}\nmodel: {name: logistic}\n")
    return tmp_path


UP = ("federation", "up", "trial", "--config", "c.yaml", "--sites", "2")


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        (
            "sys.modules['flwr'] = None",
            "federations need Flower, which is not installed: pip install 'fedadc[flower]'.",
        ),
        ("import flwr; flwr.__version__ = '1.40.2'", "federations need Flower 1.41 or newer, not 1.40.2."),
    ],
)
def test_flower_that_is_absent_or_too_old(before: str, sentence: str, folder: Path) -> None:
    code, text = said(folder, *UP, before=before)
    assert code == 2 and sentence in text
    assert not (folder / "trial").exists()


def test_a_port_that_is_taken(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, text = said(folder, *UP, "--port", str(port))
    assert code == 2 and f"port {port} is taken; choose another one with --port." in text
    assert not (folder / "trial").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("federation", "up", "trial"), "trial has no data for sites; give --config, whose data is dealt to them."),
        (("federation", "up", "trial", "rounds=3"), "settings can be changed with --config only, before a run begins."),
        (("federation", "down", "trial"), "trial has no federation of this machine."),
        (("federation", "init", "trial"), "--config is missing"),
        (("federation", "init", "trial", "--config", "d.yaml"), "d.yaml"),
        (("federation", "init", ".", "--config", "c.yaml"), ". exists and is not an empty folder; name a new one."),
        ((*UP, "federation.patience=-1"), "federation.patience"),
    ],
)
def test_what_cannot_be_done(words: tuple[str, ...], sentence: str, folder: Path) -> None:
    code, text = said(folder, *words)
    assert code != 0 and sentence in text
    assert not (folder / "trial").exists()


def test_a_trial_that_has_not_begun_may_be_prepared_again(folder: Path) -> None:
    config = load_config(folder / "c.yaml")
    prepared(folder / "trial", config, 2)
    known = prepared(folder / "trial", load_config(folder / "c.yaml", ["seed=7"]), 2)[1]
    assert known.seed == 7
    (folder / "trial" / "local" / "run").mkdir()
    with pytest.raises(FedadcError, match=r"the run in .* has begun; leave out --config"):
        prepared(folder / "trial", config, 2)
    assert prepared(folder / "trial", None, None)[1].seed == 7


def test_an_app_is_not_replaced_by_a_trial(folder: Path) -> None:
    write_app(folder / "app", load_config(folder / "c.yaml"))
    before = (folder / "app" / "fedadc.yaml").read_bytes()
    with pytest.raises(FedadcError, match="needs a new folder"):
        prepared(folder / "app", load_config(folder / "c.yaml", ["seed=7"]), 2)
    assert (folder / "app" / "fedadc.yaml").read_bytes() == before


@pytest.mark.parametrize("name", ["../escaped", "a/b", ".hidden", "x" * 65])
def test_clients_whose_names_could_not_be_names_of_files(name: str, tmp_path: Path) -> None:
    rows = "".join(f"{client},{k},{k % 2}\n" for client in (name, "bern") for k in range(10))
    (tmp_path / "all.csv").write_text("client,x,y\n" + rows)
    data = {"name": "csv", "path": str(tmp_path / "all.csv"), "label": "y", "client": "client"}
    config = load_config({"rounds": 1, "data": data, "model": {"name": "logistic"}})
    with pytest.raises(FedadcError, match="the name of a client must be at most 64 characters, without slashes"):
        prepared(tmp_path / "a" / "b" / "trial", config, None)
    assert not list(tmp_path.rglob("*escaped*"))


def test_the_first_command_of_the_documentation(tmp_path: Path) -> None:
    """Its settings fit the config that `fedadc init` writes."""
    text = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("fedadc federation up trial --sites 3")]
    words = line.split()
    init(tmp_path / words[words.index("--config") + 1])
    config = load_config(tmp_path / "fedadc.yaml", [word for word in words if "=" in word])
    federation, known = prepared(tmp_path / "trial", config, 3)
    assert federation.dealt is not None and len(federation.dealt.sites) == 3 and known.rounds == 3
