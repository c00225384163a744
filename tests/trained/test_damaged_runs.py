"""What a stranger may have put into a run directory: one sentence, the right exit code, and no unpickling."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedadc
from commands import Call, refused
from fedadc.errors import DataError, FedadcError
from fedadc.runs.preprocessing import as_file, read_preprocessing
from fedadc.system.files import checksum
from tables import table_config, write_table

ROWS = {"age": [1, 2], "cp": ["typical", "atypical"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    write_table(folder / "train.csv")
    fedadc.run(table_config(folder / "train.csv"), out=folder / "run")
    fedadc.run({**table_config(folder / "train.csv"), "model": {"name": "mlp", "hidden": [9]}}, out=folder / "other")
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


def resealed(tree: Any) -> bytes:
    """A file with a checksum that fits, as a stranger would write it."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return json.dumps({"format": 1, "checksum": checksum(text.encode()), "preprocessing": tree}).encode()


def tree_of(run: Path) -> Any:
    return json.loads((run / "preprocessing.json").read_text())["preprocessing"]


def test_what_is_written_is_read_back(run: Path) -> None:
    found = read_preprocessing(run)
    assert found is not None and as_file(found) == (run / "preprocessing.json").read_bytes()
    assert found.clients == ("w0", "w1", "w2", "w3") and sum(found.samples.values()) == 90


Place = tuple[str | int, ...]
WRONG: dict[str, Callable[[Any], None]] = {
    "classes that the head does not have": lambda tree: tree["schema"]["classes"].append("maybe"),
    "a class twice": lambda tree: tree["schema"].update(classes=["no", "no"]),
    "no classes": lambda tree: tree["schema"].update(classes=[]),
    "an unknown type": lambda tree: tree["schema"].update(dtype="quint8"),
    "a type that is a function": lambda tree: tree["schema"].update(dtype="load"),
    "a huge input": lambda tree: tree["schema"].update(shape=[10**15], encoding=None),
    "an input of other width": lambda tree: tree["schema"].update(shape=[3], encoding=None),
    "a negative input": lambda tree: tree["schema"].update(shape=[-8], encoding=None),
    "a column less": lambda tree: tree["schema"]["encoding"]["columns"].pop(),
    "a spread of zero": lambda tree: tree["schema"]["encoding"]["columns"][0].update(spread=0.0),
    "a center without end": lambda tree: tree["schema"]["encoding"]["columns"][0].update(center=1e400),
    "a scale of zero": lambda tree: tree["schema"]["normalization"].update(scale=0.0),
    "a std of zero": lambda tree: tree["schema"]["normalization"].update(mean=[0.0], std=[0.0]),
    "clients that are no names": lambda tree: tree.update(clients=[{"a": 1}]),
    "a list for a schema": lambda tree: tree.update(schema=[]),
    "nothing": lambda tree: tree.clear(),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_with_a_good_checksum_and_wrong_content_is_refused(case: str, run: Path) -> None:
    tree = tree_of(run)
    WRONG[case](tree)
    (run / "preprocessing.json").write_bytes(resealed(tree))
    with pytest.raises(DataError) as caught:
        fedadc.predict(run, ROWS)
    assert "preprocessing.json" in str(caught.value) and caught.value.exit_code == 5


def test_a_damaged_file_is_refused_and_a_missing_one_is_not_guessed(run: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age,cp\n1,typical\n")
    path, predict = run / "preprocessing.json", ("predict", run, "--data", tmp_path / "new.csv")
    good = path.read_bytes()
    for damaged in (good[:-40], good.replace(b"40.0", b"41.0"), b"", b"[]", b"null", b"\xff\xfe", b"[" * 100_000):
        path.write_bytes(damaged)
        refused(call(*predict), "preprocessing.json cannot be used: it is damaged", code=5)
    path.write_bytes(good.replace(b'"format": 1', b'"format": 2'))
    refused(call(*predict), "its format is 2, but this version of fedadc reads format 1", code=5)
    path.unlink()
    path.mkdir()
    refused(call(*predict), "is not a file", code=5)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused(made: Path, tmp_path: Path, data: st.DataObject) -> None:
    """No exception but ours, whatever stands at a place of the file."""
    tree: Any = copy.deepcopy(tree_of(made))
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        )
    )
    place = tmp_path / "run"
    place.mkdir(exist_ok=True)
    (place / "preprocessing.json").write_bytes(resealed(tree))
    try:
        read_preprocessing(place)
    except FedadcError as error:
        assert error.exit_code == 5


def test_parts_of_another_run_are_refused(run: Path, made: Path, call: Call, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age,cp\n1,typical\n")
    other, predict = made.parent / "other", ("predict", run, "--data", tmp_path / "new.csv")
    good = (run / "model.safetensors").read_bytes()
    shutil.copy(other / "model.safetensors", run)
    refused(call(*predict), "does not fit MLP: the shape differs in", code=5)
    (run / "model.safetensors").write_bytes(good[: len(good) // 2])
    refused(call(*predict), "is not a safetensors file", code=5)
    (run / "model.safetensors").unlink()
    refused(call(*predict), "has no model.safetensors", code=5)


def test_states_of_clients_that_are_damaged_are_refused(tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv")
    run = tmp_path / "run"
    fedadc.run(table_config(tmp_path / "train.csv", method="fedper", checkpoint={"every": 1}), out=run)
    whole = fedadc.load(run, client="w1")
    newest = max(run.glob("checkpoints/round-*.json"))
    newest.write_text(newest.read_text().replace("round", "ruond"))
    assert fedadc.load(run, client="w1").round == whole.round - 1, "the checkpoint before it"
    for state in run.glob("checkpoints/clients/1-*.safetensors"):
        state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"has no usable state of client 1: .* damaged"):
        fedadc.load(run, client="w1")
    with pytest.raises(FedadcError, match=r"client '9' is unknown"):
        fedadc.load(run, client=9)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(DataError, match="has no usable state of client 1: it has no checkpoints"):
        fedadc.load(run, client="w1")
