"""`module:Name` leads to a file in the config's own folder and nowhere else, whoever wrote the config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedadc
from commands import Call, command, fine, refused
from conftest import slow
from fedadc.config.build import prepare
from fedadc.errors import FedadcError
from fedadc.runs.record import load_config
from own_code import MINE, TINY, TRACE, own_folder, trace

ALL = {
    "data": {"name": "mine:dots", "clients": 4},
    "model": {"name": "mine:Net"},
    "cohort": {"size": 2, "selection": "mine:Everybody"},
}


def refusal(folder: Path, **nodes: Any) -> str:
    """The sentence that refuses a config in a folder; nothing of the folder was executed."""
    (folder / "attack.yaml").write_text(yaml.safe_dump({**TINY, **nodes}))
    with pytest.raises(FedadcError) as caught:
        prepare(load_config(folder / "attack.yaml"))
    assert trace(folder) == [] and "\n" not in str(caught.value)
    return str(caught.value)


# --- names that are no file beside the config ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "subprocess:call", "builtins:eval", "builtins:exec", "posix:system", "shutil:rmtree"),
        *("os.path:join", "torch.nn:Linear", "torch:load", "numpy:load", "pip:main", "fedadc:run"),
        *("../up:run", "..up:run", "./mine:dots", "/tmp/x:run", "sub/mod:run", "sub.mod:run", "sub\\mod:run"),
        *("mine:os.system", "mine:dots.__globals__", "mine::dots", "mine:", ":dots", ":", "mine.py:dots", "mine :dots"),
        *("__main__:run", "mi\0ne:dots", "mine:dots\0", "MINE:dots", "__pycache__:x", "mine:dots:more", "~/x:run"),
    ],
)  # fmt: skip
def test_only_a_plain_name_of_a_file_of_the_folder_is_loaded(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "configs"
    own_folder(folder)
    (tmp_path / "up.py").write_text(MINE)
    (folder / "sub").mkdir()
    (folder / "sub/mod.py").write_text(MINE)
    for node in ({"data": {"name": name, "clients": 2, "command": "x"}}, {"model": {"name": name}}, {"method": name}):
        sentence = refusal(folder, **node)
        assert sentence.startswith(f"{next(iter(node))}: ")
    assert not trace(tmp_path) and not trace(folder / "sub")


@pytest.mark.parametrize("name", ["os:system", slow("subprocess:getoutput"), slow("os:popen")])
def test_no_shell_command_runs(tmp_path: Path, name: str) -> None:
    """The attack of the issue, in a real process."""
    data = {"name": name, "command": "touch hacked", "cmd": "touch hacked", "clients": 2}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**TINY, "data": data}))
    for words in (("run", "c.yaml", "--workers", "0"), ("data", "show", "c.yaml")):
        refused(command(*words, cwd=tmp_path), "is a module of Python")
    assert not (tmp_path / "hacked").exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["json", "torch", "numpy", "fedadc", "pytest", "yaml"])
def test_a_file_with_the_name_of_an_installed_module_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text(MINE)
    sentence = refusal(tmp_path, method=f"{name}:Slow")
    assert "module of Python" in sentence or "rename it" in sentence


def test_a_package_that_was_never_imported_is_not_shadowed_either(tmp_path: Path) -> None:
    """Found without importing it."""
    site, folder = tmp_path / "site", tmp_path / "configs"
    (site / "lonely").mkdir(parents=True)
    (site / "lonely/__init__.py").write_text(TRACE)
    own_folder(folder, {"method": "lonely:Slow"}, lonely=MINE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-m", "fedadc", "run", "c.yaml", "--workers", "0"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "lonely.py in" in done.stderr and "rename it" in done.stderr
    assert not trace(folder) and not trace(site / "lonely")


@pytest.mark.parametrize(
    "name", ["getoutput", "os", "Path", "partly", "load_file", "__builtins__", "__loader__", "NUMBER"]
)
def test_what_a_file_has_imported_is_not_offered_to_configs(tmp_path: Path, name: str) -> None:
    (tmp_path / "tools.py").write_text(
        "import os\nfrom functools import partial\nfrom pathlib import Path\nfrom subprocess import getoutput\n"
        "from safetensors.torch import load_file\npartly, NUMBER = partial(getoutput), 3\n"
    )
    sentence = refusal(tmp_path, data={"name": f"tools:{name}", "cmd": f"touch {tmp_path}/hacked", "clients": 2})
    assert "is not a class or function that tools.py defines" in sentence and not (tmp_path / "hacked").exists()


def test_what_a_file_passes_on_from_a_file_beside_it_is_offered(tmp_path: Path) -> None:
    own_folder(tmp_path, {"method": "front:Slow"}, front="from mine import Slow\n")
    config = load_config(tmp_path / "c.yaml")
    assert config.tree()["method"]["name"] == "mine:Slow"  # where it is defined
    assert load_config(config, ["rounds=3"]).method == config.method
    fedadc.run(config, ["label=x"], out=tmp_path / "run")
    assert len(fedadc.resume(tmp_path / "run", ["rounds=2"]).history) == 2


# --- files that are no plain files -----------------------------------------------------------------------------------


def test_a_link_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    own_folder(tmp_path / "elsewhere")
    folder = tmp_path / "configs"
    folder.mkdir()
    for number, target in enumerate(
        ("../elsewhere/mine.py", tmp_path / "elsewhere/mine.py", "nowhere.py", "linked3.py")
    ):
        (folder / f"linked{number}.py").symlink_to(target)
        assert "symbolic link" in refusal(folder, method=f"linked{number}:Slow")
    assert not trace(tmp_path / "elsewhere")


def test_a_linked_helper_is_refused(tmp_path: Path) -> None:
    own_folder(tmp_path)
    (tmp_path / "my_helper.py").rename(tmp_path / "aside.py")
    (tmp_path / "my_helper.py").symlink_to("aside.py")
    with pytest.raises(FedadcError, match="symbolic link"):
        load_config(tmp_path / "c.yaml")
    assert trace(tmp_path) == ["mine"]


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    own_folder(tmp_path / "real")
    (tmp_path / "link").symlink_to("real", target_is_directory=True)
    assert load_config(tmp_path / "link/c.yaml").tree()["method"]["name"] == "mine:Slow"
    config = load_config({**TINY, "method": "mine:Slow"}, folder=tmp_path / "link")
    assert config.tree()["method"]["gain"] == 2.0


def test_a_folder_a_pipe_and_an_unreadable_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")  # reading it would wait forever
    for name in ("folder", "pipe"):
        assert "is not a regular file" in refusal(tmp_path, method=f"{name}:Slow")
    (tmp_path / "absent.py").mkdir()
    (tmp_path / "absent.py").rmdir()
    assert "there is no absent.py" in refusal(tmp_path, method="absent:Slow")


@pytest.mark.parametrize("content", [b"def\n", b"\0", b"x = '\xff'\n", b"# coding: nonsense\n", b"raise Exit\n"])
def test_a_broken_file_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.py").write_bytes(content)
    assert "importing broken failed" in refusal(tmp_path, method="broken:Slow")
    (tmp_path / "broken.py").write_text(MINE.replace("import my_helper", "").replace("my_helper.GAIN", "3.0"))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**TINY, "method": "broken:Slow"}))
    assert load_config(tmp_path / "c.yaml").tree()["method"]["gain"] == 3.0  # mended, in the same process


# --- what is loaded --------------------------------------------------------------------------------------------------


def test_every_node_is_loaded_once_and_named(tmp_path: Path) -> None:
    notes: list[str] = []
    config = load_config(own_folder(tmp_path, ALL), notes=notes.append)
    prepare(config)
    assert trace(tmp_path) == ["mine", "my_helper"]
    assert {"method", "data", "model", "cohort.selection"} == {note.partition(":")[0] for note in notes}
    assert all(f"from {tmp_path / 'mine.py'}" in note or f"{tmp_path / 'my_helper.py'}, " in note for note in notes)
    assert config.code is not None and config.code.used == {
        "method": "mine:Slow", "data": "mine:dots", "model": "mine:Net", "cohort.selection": "mine:Everybody",
    }  # fmt: skip
    assert config.code.files.keys() == {"mine.py", "my_helper.py"}


def test_a_cached_translation_of_another_file_is_not_executed(tmp_path: Path) -> None:
    """A stranger's folder may have a __pycache__ whose content is not that of the file."""
    config = own_folder(tmp_path)
    import py_compile

    py_compile.compile(
        str(tmp_path / "mine.py"), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    (tmp_path / "mine.py").write_text(MINE.replace("my_helper.GAIN", "7.0"))
    assert load_config(config).tree()["method"]["gain"] == 7.0


def test_a_changed_file_or_helper_is_loaded_again(tmp_path: Path) -> None:
    config = own_folder(tmp_path)
    assert load_config(config).tree()["method"]["gain"] == 2.0
    (tmp_path / "my_helper.py").write_text("GAIN = 3.0\n")
    assert load_config(config).tree()["method"]["gain"] == 3.0


def test_a_file_that_changes_meanwhile_stays_as_it_was_for_the_config_that_has_loaded_it(tmp_path: Path) -> None:
    config = load_config(own_folder(tmp_path, {"model": {"name": "mine:Net"}}))
    (tmp_path / "mine.py").write_text("1 / 0\n")
    prepare(config)
    assert trace(tmp_path) == ["mine", "my_helper"]


def test_an_installed_module_wins_over_a_helper_of_its_name(tmp_path: Path) -> None:
    own_folder(tmp_path, json=TRACE, yaml=TRACE, numpy=TRACE)
    prepare(load_config(tmp_path / "c.yaml"))
    assert trace(tmp_path) == ["mine", "my_helper"]


def test_no_folder_stays_on_the_path(tmp_path: Path) -> None:
    before = list(sys.path)
    load_config(own_folder(tmp_path))
    assert sys.path == before
    with pytest.raises(ModuleNotFoundError):
        __import__("trace_of_nothing")
    (tmp_path / "lone_file.py").write_text(TRACE)
    with pytest.raises(ModuleNotFoundError):
        __import__("lone_file")


def test_classes_given_in_python_are_never_looked_up(tmp_path: Path) -> None:
    class Mine(fedadc.methods.FedAvg):
        """Local to this function, so no name leads to it."""

    config = load_config({**TINY, "rounds": 2})
    own = fedadc.Config(rounds=2, data=config.data, model=config.model, method=Mine(), local=config.local)
    result = fedadc.run(own, ["local.lr=0.2"], out=tmp_path / "run")
    assert type(result.config.method) is Mine and result.config.local.lr == 0.2
    assert len(fedadc.run(own, ["local.lr=0.2", "rounds=3"], out=tmp_path / "run", resume=True).history) == 3
    assert not (tmp_path / "run/seal.json").exists()
    with pytest.raises(FedadcError, match="cannot be loaded"):
        fedadc.resume(tmp_path / "run", trust=True)


def test_workers_use_the_bytes_that_were_checked(tmp_path: Path) -> None:
    """The files are gone before the workers start, and a module that they did not have is not found by them."""
    config = own_folder(tmp_path, {**ALL, "rounds": 2})
    plan = prepare(load_config(config), workers=2)
    alone = prepare(load_config(config))
    for name in ("mine", "my_helper"):
        (tmp_path / f"{name}.py").write_text("1 / 0\n")
    try:
        both = [[r.state.theta for r in p.federation.rounds(2)][-1] for p in (plan, alone)]
    finally:
        plan.federation.close()
    assert (both[0] == both[1]).all()


def test_a_script_that_has_imported_the_module_keeps_its_classes(tmp_path: Path) -> None:
    own_folder(tmp_path)
    (tmp_path / "script.py").write_text(
        "import fedadc, mine\nresult = fedadc.run('c.yaml', out='run')\n"
        "assert type(result.config.method) is mine.Slow\nfedadc.resume('run', 'rounds=2')\n"
    )
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert trace(tmp_path) == ["mine", "my_helper"]


# --- commands that only look -----------------------------------------------------------------------------------------


def test_commands_that_only_look_import_nothing(call: Call, tmp_path: Path) -> None:
    local = {"steps": 1, "schedule": "mine:Missing"}
    own_folder(tmp_path, {**ALL, "data": TINY["data"], "objective": "mine:Missing", "local": local})
    assert "10 classes" not in fine(call("data", "show", "c.yaml"))
    own_folder(tmp_path / "own", ALL)
    fine(call("run", "own/c.yaml", "--workers", "0", "--out", "run"))
    assert trace(tmp_path / "own") == ["mine", "my_helper"]
    (tmp_path / "own/mine.py").write_text(TRACE + "1 / 0\n")
    fine(call("compare", "run"))
    fine(call("compare", "."))
    for what in ("methods", "objectives", "models", "datasets", "selections", "partitions"):
        fine(call("list", what))
    assert trace(tmp_path) == [] and trace(tmp_path / "own") == []


def test_commands_that_load_say_what(call: Call, tmp_path: Path) -> None:
    own_folder(tmp_path, ALL)
    answer = call("run", "c.yaml", "--workers", "0", "--out", "run")
    for key, name in (("method", "Slow"), ("data", "dots"), ("model", "Net"), ("cohort.selection", "Everybody")):
        assert answer.err.count(f"note: {key}: loading mine:{name} from {tmp_path / 'mine.py'}\n") == 1
    assert f"loading {tmp_path / 'my_helper.py'}, which is imported there" in answer.err
    answer = call("data", "show", "c.yaml")
    assert "note: data: loading mine:dots" in answer.err and "method" not in answer.err
    answer = call("evaluate", "run")
    assert "note: data: loading mine:dots" in answer.err and "note: model: loading mine:Net" in answer.err
    assert "method" not in answer.err and "selection" not in answer.err


@pytest.mark.parametrize("words", [slow(["run", "c.yaml", "--workers", "2"]), ["experiment", "e.yaml"]])
def test_files_of_the_current_folder_are_not_imported_by_any_process(words: list[str], tmp_path: Path) -> None:
    """A stranger's folder may have files with names of modules that Python or fedadc import when a process starts."""
    launcher, folder = tmp_path / "bin/launcher", tmp_path / "folder"  # as the installed command `fedadc` is started
    launcher.parent.mkdir()
    launcher.write_text("from fedadc.cli.app import main\nif __name__ == '__main__': main()\n")
    folder.mkdir()
    for name in ("multiprocessing", "pickle", "signal", "socket", "threading", "torch", "numpy", "typing", "random"):
        (folder / f"{name}.py").write_text("open('ran', 'a').write(__name__)\nraise SystemExit(99)\n")
    tree = {"rounds": 1, "data": {"name": "digits", "clients": 4, "validation": 0.2}, "model": "logistic"}
    (folder / "c.yaml").write_text(json.dumps(tree))
    runs = {"A": {"grid": {"local.lr": [0.1]}}}
    experiment = {"title": "t", "base": tree, "runs": runs, "seeds": [0], "budget": 1}
    (folder / "e.yaml").write_text(json.dumps(experiment))
    done = subprocess.run([sys.executable, str(launcher), *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (folder / "ran").exists()
