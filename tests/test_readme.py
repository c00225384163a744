"""What the README shows works as it stands."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml

import fedadc
from commands import command as run_command
from commands import fine
from fedadc.communication.clock import Clock
from fedadc.communication.network import Communication
from fedadc.config.build import FILLED_IN, prepare
from fedadc.config.settings import (
    Checkpointing,
    CohortConfig,
    Config,
    DataConfig,
    FederationConfig,
    ModelConfig,
)
from fedadc.config.yaml import overlay, parse_yaml
from fedadc.data import DATASETS
from fedadc.evaluation.metrics import Evaluation
from fedadc.evaluation.stopping import Stopping
from fedadc.methods import METHODS
from fedadc.objectives import OBJECTIVES
from fedadc.runs.record import load_config
from fedadc.runs.runner import run
from fedadc.training.client_states import Storage
from fedadc.training.ensembles import Ensembles
from fedadc.training.faults import Faults
from fedadc.views.local_work import LocalWork
from public import public_objects

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    code = "\n".join(text for language, text in BLOCKS if language == "python")
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec", dont_inherit=True), names)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(1, 11))
    assert float(lines[-1].split()[1]) > 0.6  # it learns


def test_command_line_quick_start_runs(tmp_path: Path) -> None:
    """The lines as they stand, with fewer rounds."""
    (text,) = (text for language, text in BLOCKS if text.startswith("fedadc init"))
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    assert len(lines) == 5 and all(words[0] == "fedadc" for words in lines)
    for _, command, *words in lines:
        fewer = ["rounds=3"] if command == "run" else []
        fine(run_command(command, *words, *fewer, cwd=tmp_path))
    assert (tmp_path / "curves.png").is_file()


def test_own_method_is_short_and_trains(tmp_path: Path) -> None:
    """The class of the README, named in a config as it says."""
    text = next(text for language, text in BLOCKS if language == "python" and "class SignAvg" in text)
    assert len(text.strip().splitlines()) <= 8
    (tmp_path / "mine.py").write_text(text)
    tree = overlay(DIGITS, {"method": {"name": "mine:SignAvg", "scale": 0.5}, "local": {"steps": 1, "lr": 0.1}})
    config = load_config(tree, folder=tmp_path)
    start = prepare(config).federation.start().theta
    moved = (run(config).state.theta - start).abs().max()
    assert 0 < moved <= 0.5 * 0.1 + 1e-6  # the mean of steps of scale × lr in every direction


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 120


def test_config_example_is_complete() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/config.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert prepare(load_config(yaml.safe_load(text))).federation.coordinator.cohort == 10


METHOD_PAGE = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
DIGITS = {
    "rounds": 1,
    "data": {"name": "digits", "clients": 10, "partition": {"name": "sort", "labels_per_client": 2}},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"steps": 2, "batch_size": 8},
    "cohort": {"size": 3},
}


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", METHOD_PAGE, flags=re.DOTALL))
def test_every_example_of_a_method_runs(text: str, tmp_path: Path) -> None:
    assert len(text.strip().splitlines()) == 2
    base = DIGITS
    if "regression" in text:
        np.savez(tmp_path / "numbers.npz", x=np.eye(60, 4), y=np.linspace(0, 9, 60))
        base = {**DIGITS, "data": {"name": "npz", "path": str(tmp_path / "numbers.npz"), "clients": 10}}
    assert run(overlay(base, parse_yaml(text, "docs"))).history[-1]["train_loss"] > 0


def test_every_method_has_its_example() -> None:
    examples = [parse_yaml(text, "docs") for text in re.findall(r"```yaml\n(.*?)```", METHOD_PAGE, flags=re.DOTALL)]
    configs = [load_config(overlay(DIGITS, example)) for example in examples]
    shown = {type(c.method) for c in configs}
    missing = {name for name, cls in METHODS.items() if cls not in shown}
    assert missing <= {"fedyogi", "fedadagrad"}  # one section and one example for the three of one paper
    assert {type(c.objective) for c in configs} == set(OBJECTIVES.values())


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_named_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"make ([\w-]+)", (ROOT / page).read_text(encoding="utf-8")):
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_every_key_of_a_config_is_explained() -> None:
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    nodes = {"": Config, "data.": DataConfig, "model.": ModelConfig, "local.": LocalWork, "cohort.": CohortConfig,
             "evaluate.": Evaluation, "stop.": Stopping, "storage.": Storage, "faults.": Faults,
             "checkpoint.": Checkpointing, "ensembles.": Ensembles, "communication.": Communication,
             "clock.": Clock, "federation.": FederationConfig}  # fmt: skip
    branches = {node.rstrip(".") for node in nodes} | {"folder", "code", "options"}
    for node, cls in nodes.items():
        for field in dataclasses.fields(cls):
            assert field.name in branches or f"`{node}{field.name}`" in text, f"{node}{field.name}"
    for loader in DATASETS.values():
        for name in inspect.signature(loader).parameters.keys() - {"path", "test", *FILLED_IN}:
            assert f"`data.{name}`" in text, name


def test_the_page_on_python_is_true(capsys: pytest.CaptureFixture[str]) -> None:
    """Its example runs, and every name of its tables exists."""
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        exec(compile(code, "python.md", "exec", dont_inherit=True), {})
    assert "test_accuracy" in capsys.readouterr().out
    top, namespaces = (table.split("\n\n")[0] for table in re.split(r"^\|---.*\n", text, flags=re.MULTILINE)[1:3])
    named = set(re.findall(r"`(\w+)`", top))
    assert named == {n for n in fedadc.__all__ if n not in fedadc._NAMESPACES and n != "__version__"}
    public = public_objects()
    for name in re.findall(r"`([A-Z]\w+)`", namespaces):
        assert name in public, name


def test_the_example_of_two_halves_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """What docs/architecture.md shows gives the losses of the simulation."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    simulated = prepare(load_config(DIGITS)).federation
    sizes, data = simulated.clients.sizes, simulated.data
    own = [data.train.take(simulated.clients[k]) for k in range(len(sizes))]
    names = {"fedadc": fedadc, "source": DIGITS, "spec": data.spec, "sizes": sizes, "own": own}
    exec(compile(code, "architecture.md", "exec", dont_inherit=True), names)
    printed = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert printed == [r.train_loss for r in simulated.rounds(len(printed))]
