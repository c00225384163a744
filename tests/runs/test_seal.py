"""A run directory may come from anybody: its code is loaded if the user's own run has sealed it, or with --trust."""

from __future__ import annotations

import hmac
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedadc
from commands import Call, contents, fine, refused
from fedadc.config.settings import Config
from fedadc.errors import CannotResume, FedadcError
from fedadc.runs.record import load_config
from own_code import MINE, TINY, own_folder, trace

MODEL_AND_DATA = {"model": {"name": "mine:Net"}, "data": {"name": "mine:dots", "clients": 4}}
READERS: dict[str, Callable[..., Any]] = {
    "resume": lambda run, **how: fedadc.resume(run, "rounds=2", **how),
    "evaluate": fedadc.evaluate,
    "personalize": lambda run, **how: fedadc.personalize(run, **how),
    "run": lambda run, **how: fedadc.run(run / "config.yaml", **how),
    "load_config": lambda run, **how: load_config(run / "config.yaml", **how),
}


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the key in an empty home."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    return tmp_path / "settings/fedadc/key"


@pytest.fixture
def run(tmp_path: Path, key: Path) -> Path:
    """A run whose method, model and data are the user's own."""
    fedadc.run(own_folder(tmp_path / "own", MODEL_AND_DATA), out=tmp_path / "run")
    assert trace(tmp_path / "own") == ["mine", "my_helper"]
    return tmp_path / "run"


def refuses(read: Callable[[], Any], own: Path, *fragments: str) -> None:
    """One sentence that names `trust`, and nothing of the user's was executed."""
    with pytest.raises(FedadcError) as caught:
        read()
    for fragment in (*fragments, "`trust`"):
        assert fragment in str(caught.value)
    assert trace(own) == []


def change_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


# --- a user's own runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", READERS)
def test_a_sealed_run_is_read(run: Path, reader: str) -> None:
    READERS[reader](run)
    used = ["mine", "my_helper"]
    assert trace(run.parent / "own") == used


def test_the_seal_says_what_was_loaded(run: Path) -> None:
    seal = json.loads((run / "seal.json").read_text())
    assert seal["folder"] == str(run.parent / "own")
    assert seal["names"] == {"method": "mine:Slow", "model": "mine:Net", "data": "mine:dots"}
    assert seal["files"].keys() == {"mine.py", "my_helper.py"}


def test_the_key_is_private(run: Path, key: Path) -> None:
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    assert len(key.read_bytes()) == 32 and [p.name for p in key.parent.iterdir()] == ["key"]


def test_without_user_code_there_is_no_seal_and_no_key(tmp_path: Path, key: Path) -> None:
    fedadc.run(TINY, out=tmp_path / "run")
    for read in READERS.values():
        read(tmp_path / "run")
    assert not (tmp_path / "run/seal.json").exists() and not key.parent.exists()


def test_a_run_may_be_moved_and_extended_again_and_again(run: Path) -> None:
    moved = run.rename(run.with_name("moved"))
    for rounds in (2, 3):
        assert len(fedadc.resume(moved, [f"rounds={rounds}", "label=new"]).history) == rounds


def test_overwrite_replaces_the_seal_with_the_run(run: Path) -> None:
    fedadc.run(TINY, out=run, overwrite=True)
    assert not (run / "seal.json").exists() and not list(run.glob(".replaced-*"))


def test_a_home_that_cannot_be_written_leaves_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file/below"))
    config = own_folder(tmp_path / "own")
    assert len(fedadc.run(config, out=tmp_path / "run").history) == 1
    assert "will need `trust`" in caplog.text and not (tmp_path / "run/seal.json").exists()
    trace(tmp_path / "own")
    refuses(lambda: fedadc.resume(tmp_path / "run"), tmp_path / "own", "has no seal")
    assert len(fedadc.run(config, ["rounds=2"], out=tmp_path / "run", resume=True).history) == 2  # from his own config


# --- runs of others, and forged ones ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", READERS)
def test_a_run_of_another_user_is_not_read(run: Path, key: Path, reader: str) -> None:
    key.unlink()
    before = contents(run)
    refuses(lambda: READERS[reader](run), run.parent / "own", "was not made with your key")
    fedadc.run(own_folder(run.parent / "mine"), out=run.parent / "my-run")  # now there is another key
    trace(run.parent / "mine")
    refuses(lambda: READERS[reader](run), run.parent / "own", "was not made with your key")
    assert contents(run) == before


@pytest.mark.parametrize("reader", READERS)
def test_a_run_without_a_seal_is_not_read(run: Path, reader: str) -> None:
    (run / "seal.json").unlink()
    refuses(lambda: READERS[reader](run), run.parent / "own", "has no seal")
    (run.parent / "own/mine.py").write_text(MINE + "# changed\n")  # else it is loaded in this process
    READERS[reader](run, trust=True)
    assert trace(run.parent / "own") == ["mine", "my_helper"]


def forged(run: Path, **changes: Any) -> None:
    """A seal by somebody who knows everything but the key."""
    seal = json.loads((run / "seal.json").read_text()) | changes
    seal.pop("hmac")
    text = b"fedadc seal 1\n" + json.dumps(seal, sort_keys=True, separators=(",", ":")).encode()
    (run / "seal.json").write_text(json.dumps({**seal, "hmac": hmac.digest(b"\0" * 32, text, "sha256").hex()}))


@pytest.mark.parametrize("reader", READERS)
def test_a_forged_seal_is_refused(run: Path, reader: str) -> None:
    own_folder(run.parent / "evil")
    change_json(run / "environment.json", config_folder=str(run.parent / "evil"))
    forged(run, folder=str(run.parent / "evil"))
    refuses(lambda: READERS[reader](run), run.parent / "evil", "was not made with your key")


@pytest.mark.parametrize("what", ["folder", "settings", "names", "files"])
def test_every_part_of_the_seal_is_sealed(run: Path, what: str) -> None:
    seal = json.loads((run / "seal.json").read_text())
    changed = {"more": "x" * 64} | seal[what] if isinstance(seal[what], dict) else "x" + seal[what][1:]
    change_json(run / "seal.json", **{what: changed})
    refuses(lambda: fedadc.resume(run), run.parent / "own", "was not made with your key")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"hmac": 1}',
        b"[" * 100_000,
        b'{"hmac": "x", "folder": "", "settings": ""}',
    ],
)
def test_a_file_that_is_no_seal_is_one_sentence(run: Path, content: bytes) -> None:
    (run / "seal.json").write_bytes(content)
    refuses(lambda: fedadc.resume(run), run.parent / "own", "is no seal")


@pytest.mark.parametrize("value", [1, None, [], {"a": 1}, {"a": None}, "é\ud800"])
@pytest.mark.parametrize("name", ["folder", "settings", "names", "files", "hmac"])
def test_a_seal_of_odd_values_is_one_sentence(run: Path, name: str, value: Any) -> None:
    change_json(run / "seal.json", **{name: value})
    refuses(lambda: fedadc.resume(run), run.parent / "own")


def test_a_pipe_or_a_link_is_no_seal(run: Path) -> None:
    (run / "seal.json").rename(run.parent / "aside.json")
    os.mkfifo(run / "seal.json")
    refuses(lambda: fedadc.resume(run), run.parent / "own", "is no seal")
    (run / "seal.json").unlink()
    (run / "seal.json").symlink_to(run.parent / "aside.json")
    refuses(lambda: fedadc.resume(run), run.parent / "own", "is no seal")


def test_the_seal_of_another_run_does_not_count(run: Path) -> None:
    """A stranger's run names another function of the user's file, and brings a seal that the user has made."""
    own = run.parent / "own"
    fedadc.run(own / "c.yaml", "method=mine:Other", out=run.parent / "strange")
    shutil.copy(run / "seal.json", run.parent / "strange/seal.json")
    trace(own)
    refuses(lambda: fedadc.resume(run.parent / "strange"), own, "have changed since it was sealed")


@pytest.mark.parametrize(
    ("key_name", "value"),
    [
        ("method", {"name": "mine:Other"}),
        ("method", {"name": "mine:Slow", "gain": 9.0}),  # another setting of the sealed class
        ("data", {"name": "mine:dots", "clients": 4, "count": 66}),
        ("objective", {"name": "mine:Slow"}),
        ("seed", 5),
    ],
)
def test_an_edited_config_is_not_loaded(run: Path, key_name: str, value: Any) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**tree, key_name: value}))
    for reader in READERS.values():
        refuses(lambda reader=reader: reader(run), run.parent / "own", "have changed since it was sealed")


def test_what_may_change_on_resume_may_be_edited_too(run: Path) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**tree, "label": "new", "rounds": 2}))
    assert len(fedadc.resume(run).history) == 2


def test_an_override_cannot_name_another_function(run: Path) -> None:
    refuses(lambda: fedadc.run(run / "config.yaml", "method=mine:Other"), run.parent / "own", "does not name it")
    fedadc.run(run / "config.yaml", "method=mine:Other", trust=True)


@pytest.mark.parametrize("reader", READERS)
def test_a_folder_that_is_not_the_sealed_one_is_not_used(run: Path, reader: str) -> None:
    own_folder(run.parent / "evil")
    change_json(run / "environment.json", config_folder=str(run.parent / "evil"))
    refuses(lambda: READERS[reader](run), run.parent / "evil", "is for the folder")


@pytest.mark.parametrize("reader", ["resume", "evaluate", "personalize"])
def test_code_inside_a_run_directory_needs_a_seal_too(run: Path, reader: str) -> None:
    """Without a word about a folder, the run directory is the config's own folder."""
    (run / "environment.json").unlink()
    shutil.copy(run.parent / "own/mine.py", run)
    shutil.copy(run.parent / "own/my_helper.py", run)
    refuses(lambda: READERS[reader](run), run, "is for the folder")
    (run / "seal.json").unlink()
    refuses(lambda: READERS[reader](run), run, "has no seal")


# --- files that changed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", READERS)
def test_changed_files_are_named_and_not_executed(run: Path, reader: str) -> None:
    (run.parent / "own/mine.py").write_text(MINE + "# changed\n")
    refuses(lambda: READERS[reader](run), run.parent / "own", "mine.py has changed since")
    (run.parent / "own/my_helper.py").write_text("GAIN = 2.5\n")
    refuses(lambda: READERS[reader](run), run.parent / "own", "mine.py, my_helper.py have changed since")


def test_a_changed_helper_is_not_executed(run: Path) -> None:
    (run.parent / "own/my_helper.py").write_text("import pathlib\npathlib.Path(__file__).with_name('hacked').touch()\n")
    with pytest.raises(FedadcError, match=r"my_helper\.py has changed since"):
        fedadc.resume(run)
    assert trace(run.parent / "own") == ["mine"] and not (run.parent / "own/hacked").exists()


def test_a_helper_that_another_run_has_loaded_meanwhile_is_checked_too(run: Path) -> None:
    (run.parent / "own/my_helper.py").write_text("GAIN = 2.5\n")
    load_config(run.parent / "own/c.yaml")
    with pytest.raises(FedadcError, match=r"my_helper\.py has changed since"):
        fedadc.resume(run)


def test_run_resume_with_changed_code_is_refused(run: Path) -> None:
    """The config is the user's own, so its code is loaded; but the run would be continued with other code."""
    config = run.parent / "own/c.yaml"
    (run.parent / "own/my_helper.py").write_text("GAIN = 2.0  # the same\n")
    before = contents(run)
    with pytest.raises(CannotResume, match=r"my_helper\.py in .* has changed since .* `trust`"):
        fedadc.run(config, ["rounds=2"], out=run, resume=True)
    assert contents(run) == before
    assert len(fedadc.run(config, ["rounds=2"], out=run, resume=True, trust=True).history) == 2
    assert len(fedadc.resume(run, "rounds=3").history) == 3  # it is sealed anew


# --- the key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604])
def test_a_key_that_others_can_read_is_refused(
    run: Path, key: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    key.chmod(mode)
    refuses(lambda: fedadc.resume(run), run.parent / "own", f"chmod 600 {key}")
    fedadc.run(run.parent / "own/c.yaml", out=run.parent / "another")
    assert f"chmod 600 {key}" in caplog.text and not (run.parent / "another/seal.json").exists()
    key.chmod(0o600)
    fedadc.resume(run)


def test_a_damaged_key_is_refused(run: Path, key: Path) -> None:
    content = key.read_bytes()
    for damaged in (content[:31], b"", content + b"\n"):
        key.write_bytes(damaged)
        refuses(lambda: fedadc.resume(run), run.parent / "own", "is damaged")
    key.unlink()
    key.symlink_to(run.parent / "linked")
    (run.parent / "linked").write_bytes(content)
    (run.parent / "linked").chmod(0o600)
    refuses(lambda: fedadc.resume(run), run.parent / "own")


def test_processes_that_start_together_share_one_key(key: Path) -> None:
    make = "from fedadc.runs.seal import _own_key; import sys; sys.stdin.readline(); print(_own_key().hex())"
    started = [
        subprocess.Popen([sys.executable, "-c", make], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in started:
        assert process.stdin is not None
        process.stdin.write("now\n")
        process.stdin.flush()
    keys = {process.communicate(timeout=100)[0].strip() for process in started}
    assert keys == {key.read_bytes().hex()} and [p.name for p in key.parent.iterdir()] == ["key"]


# --- the command line ------------------------------------------------------------------------------------------------


def test_trust_loads_and_seals_anew(call: Call, run: Path, key: Path) -> None:
    key.unlink()
    own = run.parent / "own"
    for words in (("resume", run, "rounds=2"), ("evaluate", run), ("personalize", run), ("run", run / "config.yaml")):
        assert "--trust" in refused(call(*words), "was not made with your key")
    assert trace(own) == [] and not key.exists()
    fine(call("evaluate", run, "--trust"))
    assert not key.exists()  # looking at a run does not vouch for it
    assert (
        f"loading mine:Slow from {own / 'mine.py'}" in call("resume", run, "rounds=2", "--workers", "0", "--trust").err
    )
    assert len(key.read_bytes()) == 32
    for words in (("resume", run, "rounds=3", "--workers", "2"), ("evaluate", run), ("personalize", run)):
        fine(call(*words))
    fine(call("data", "show", run / "config.yaml"))
    (own / "mine.py").write_text(MINE + "# changed\n")
    assert "mine.py has changed" in refused(call("data", "show", run / "config.yaml"))


# --- a config is built once ------------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for every file that is read as a config and for every config that is built."""
    from fedadc.config import schema
    from fedadc.config import yaml as reading

    said: list[str] = []
    build, parse = schema.Schema.build, reading.parse_yaml

    def counted_build(self: Any, cls: type, *rest: Any) -> Any:
        said.extend(["built"] if cls is Config else [])
        return build(self, cls, *rest)

    def counted_parse(text: str, source: str) -> Any:
        said.extend(["read"] if text.startswith(("checkpoint:", "seed:")) else [])
        return parse(text, source)

    monkeypatch.setattr(schema.Schema, "build", counted_build)
    monkeypatch.setattr(reading, "parse_yaml", counted_parse)
    return said


def test_run_and_resume_build_the_config_once(call: Call, tmp_path: Path, built: list[str]) -> None:
    own_folder(tmp_path, MODEL_AND_DATA)
    fine(call("run", "c.yaml", "--workers", "0", "--out", "run"))
    assert built == ["read", "built"] and trace(tmp_path) == ["mine", "my_helper"]
    built.clear()
    fine(call("resume", "run", "--workers", "0"))
    assert built == ["read", "built"] and trace(tmp_path) == ["mine", "my_helper"]
    built.clear()
    fine(call("resume", "run", "rounds=2", "--workers", "0"))  # the new settings are compared with the original ones
    assert built == ["read", "built", "built"] and trace(tmp_path) == ["mine", "my_helper"]
    built.clear()
    fine(call("run", "c.yaml", "rounds=3", "--workers", "0", "--out", "run", "--resume"))  # two files, each once
    assert built == ["read", "built", "read", "built"]
    for start in (lambda: fedadc.run("c.yaml", out="run2"), lambda: fedadc.resume("run2")):
        built.clear()
        start()
        assert built == ["read", "built"]
