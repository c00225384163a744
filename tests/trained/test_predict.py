"""New data without labels: what a run saved suffices, the bits are those of evaluation, and mistakes are sentences."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedadc
from commands import Call, fine, refused
from fedadc.data.dataset import Samples
from fedadc.errors import DataError, FedadcError
from fedadc.trained.load import LoadedRun
from tables import LOCAL, ROWS, table_config, write_table


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table whose file is gone, the rows of that file, and new rows."""
    place = tmp_path_factory.mktemp("predict")
    write_table(place / "train.csv")
    result = fedadc.run(table_config(place / "train.csv", ensembles={"ema": {"decay": 0.5}}), out=place / "run")
    test = result.plan.federation.data.test
    assert test is not None
    np.save(place / "test.npy", test.x.numpy())
    np.save(place / "labels.npy", test.y.numpy())
    np.save(place / "logits.npy", result.plan.federation.predict(result.state, test.x).numpy())
    (place / "train.csv").rename(place / "kept.csv")
    write_table(place / "new.csv", 40, labels=False)
    return place


def encoded(x: np.ndarray | torch.Tensor) -> Samples:
    """Features of a table as samples of a data set."""
    return Samples(torch.as_tensor(x), torch.zeros(len(x), dtype=torch.int64))


def test_predictions_have_the_bits_and_the_accuracy_of_evaluation(place: Path) -> None:
    loaded = fedadc.load(place / "run")
    test, labels = np.load(place / "test.npy"), np.load(place / "labels.npy")
    found = loaded.predict(encoded(test))
    assert (found.outputs == np.load(place / "logits.npy")).all() and len(test) > 16, "several batches"
    right = found.classes == np.array(loaded.classes)[labels]
    assert right.mean() == loaded.history[-1]["test_accuracy"]
    shares = torch.from_numpy(found.outputs).double().softmax(1).numpy()
    assert np.allclose(found.probabilities, shares, atol=1e-7)


def test_a_file_a_frame_and_columns_give_the_rows_of_training(place: Path) -> None:
    """The very rows of training, from a file with labels: ignored, and the inputs are those of the run."""
    pandas = pytest.importorskip("pandas")
    loaded = fedadc.load(place / "run")
    data = fedadc.from_csv(place / "kept.csv", "sick", "ward", scale={"age": (40, 12)})
    with (place / "kept.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    owners = {name: [k for k, row in enumerate(rows) if row["ward"] == name] for name in ("w0", "w1", "w2", "w3")}
    assert data.owners is not None and {*data.owners} == {*owners}
    from_file = loaded.predict(place / "kept.csv")
    assert from_file.notes[0].endswith("that the model does not use are ignored: ward, sick") and len(from_file) == ROWS
    columns = {name: [row[name] for row in rows] for name in ("cp", "age")}
    frame = pandas.read_csv(place / "kept.csv", keep_default_na=False)
    for same in (columns, frame, pandas.read_csv(place / "kept.csv")):
        assert (loaded.predict(same).outputs == from_file.outputs).all()
    inputs = {x.numpy().tobytes() for part in data.splits().values() for x in part.x}
    assert {x.tobytes() for x in _features(loaded, place / "kept.csv")} == inputs


def _features(loaded: LoadedRun, path: Path) -> np.ndarray:
    from fedadc.trained.new_data import read_new_data

    return read_new_data(path, loaded.preprocessing).samples.x.numpy()


def test_what_is_unknown_is_noted_and_what_is_missing_is_refused(place: Path, tmp_path: Path) -> None:
    loaded = fedadc.load(place / "run")
    found = loaded.predict({"age": [1, 2, 3, None], "cp": ["typical", "new", "other", "new"], "id": [1, 2, 3, 4]})
    assert found.notes == (
        "the table: columns that the model does not use are ignored: id",
        "the table: column cp has categories that training did not have, in 3 of 4 rows: new (2), other (1); "
        "all features of the column are 0 there",
    )
    with pytest.raises(DataError, match=r"the table lacks the column cp\."):
        loaded.predict({"age": [1]})
    with pytest.raises(DataError, match=r"the table, row 3, column age: 'old' is not a number"):
        loaded.predict({"age": [1, "old"], "cp": ["typical", "typical"]})
    with pytest.raises(
        FedadcError, match=r"not all plain numbers \(cp\); give a DataFrame, a dict of columns or a CSV"
    ):
        loaded.predict(np.zeros((2, 6), dtype=np.float32))
    with pytest.raises(FedadcError, match=r"x has inputs \[3\] of type"):
        loaded.predict(encoded(np.zeros((2, 3), dtype=np.float32)))
    with pytest.raises(FedadcError, match="is a folder; a file is needed"):
        fedadc.predict(place / "run", place / "new.csv", tmp_path)
    with pytest.raises(DataError, match=r"there is no nowhere\.csv"):
        loaded.predict("nowhere.csv")


def test_files_have_what_the_arrays_have(place: Path, tmp_path: Path, call: Call) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run, new = place / "run", place / "new.csv"
    found = fedadc.predict(run, new, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [*rows[0]] == ["prediction", "p_no", "p_yes"] and len(rows) == 40
    assert [row["prediction"] for row in rows] == found.classes.tolist()
    shares = np.array([[row["p_no"], row["p_yes"]] for row in rows]).astype(np.float32)
    assert (shares == found.probabilities).all(), "the digits suffice to read the numbers back exactly"
    fine(call("predict", run, "--data", new, "-o", tmp_path / "a.json"))
    objects = json.loads((tmp_path / "a.json").read_text())
    assert [[o["p_no"], o["p_yes"]] for o in objects] == [[float(a), float(b)] for a, b in shares.astype(str)]
    fedadc.predict(run, new, tmp_path / "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet").to_pydict()
    assert table["prediction"] == found.classes.tolist() and table["p_yes"] == found.probabilities[:, 1].tolist()
    assert found.to_frame().equals(parquet.read_table(tmp_path / "a.parquet").to_pandas())
    printed = fine(call("predict", run, "--data", new))
    assert printed == (tmp_path / "a.csv").read_text()
    assert json.loads(fine(call("predict", run, "--data", new, "--json"))) == objects
    before = (tmp_path / "a.csv").read_bytes()
    assert "already exists" in refused(call("predict", run, "--data", place / "kept.csv", "-o", tmp_path / "a.csv"))
    assert (tmp_path / "a.csv").read_bytes() == before
    fine(call("predict", run, "--data", place / "kept.csv", "-o", tmp_path / "a.csv", "--overwrite"))
    assert len((tmp_path / "a.csv").read_text().splitlines()) == ROWS + 1


def test_other_models_of_a_run(place: Path) -> None:
    main, ema = fedadc.load(place / "run"), fedadc.load(place / "run", model="ema")
    test, labels = np.load(place / "test.npy"), np.load(place / "labels.npy")
    assert not torch.equal(main.agreement.start, ema.agreement.start)
    right = ema.predict(encoded(test)).classes == np.array(ema.classes)[labels]
    assert right.mean() == main.history[-1]["ema_test_accuracy"]
    with pytest.raises(FedadcError, match=r"no model-swa\.safetensors: the other models of this run are: ema"):
        fedadc.load(place / "run", model="swa")


@pytest.mark.parametrize("method", ["fedper", "fedrep", "ditto", "local_only"])
def test_a_client_predicts_with_its_own_model_without_its_data(method: str, tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv")
    config = table_config(tmp_path / "train.csv", method=method, cohort={"size": 2}, rounds=3)
    result = fedadc.run(config, out=tmp_path / "run")
    federation, names = result.plan.federation, ["w0", "w1", "w2", "w3"]
    x = federation.data.train.x
    kept, theta = result.state.clients, result.state.theta
    (tmp_path / "train.csv").unlink()
    for number, name in enumerate(names):
        loaded, by_number = (fedadc.load(tmp_path / "run", client=client) for client in (name, number))
        own = kept[number] if number in kept else federation.agreement.client_state(theta)
        expected = federation.method.personal(theta, own)
        assert torch.equal(loaded.agreement.start, expected) and torch.equal(by_number.agreement.start, expected)
        outputs = loaded.predict(encoded(x)).outputs
        assert federation.method.personalized == (method != "local_only")
        if federation.method.personalized:
            assert (outputs == federation.predict(result.state, x, client=name).numpy()).all(), name
    with pytest.raises(FedadcError, match=r"client 'w33' is unknown; did you mean 'w3'\?"):
        fedadc.load(tmp_path / "run", client="w33")
    if method in ("fedper", "fedrep"):
        with pytest.raises(FedadcError, match="has no global model that could predict, because each client has its"):
            fedadc.predict(tmp_path / "run", encoded(x))


def test_a_model_that_personalize_has_tuned(place: Path, tmp_path: Path) -> None:
    run = shutil.copytree(place / "run", tmp_path / "run")
    with pytest.raises(DataError, match="create them with `fedadc personalize`"):
        fedadc.load(run, client="w2")
    (place / "kept.csv").rename(place / "train.csv")
    try:
        fedadc.personalize(run, regularizers=["none", "prox"], lr=0.5)
    finally:
        (place / "train.csv").rename(place / "kept.csv")
    with pytest.raises(FedadcError, match="contains models for none, prox; set `regularizer`"):
        fedadc.load(run, client="w2")
    loaded = fedadc.load(run, client="w2", regularizer="prox")
    expected = fedadc.personal.personal_state_dict(run, 2, "prox")
    assert loaded.state_dict.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict.items())
    assert not torch.equal(loaded.agreement.start, fedadc.load(run).agreement.start)


def test_images_in_a_folder_and_arrays_in_a_file(tmp_path: Path, call: Call) -> None:
    rng = np.random.default_rng(0)
    for k in range(24):
        folder = tmp_path / "train" / ("dark", "light")[k % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 120, (6, 6, 3)).astype(np.uint8) + 120 * (k % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{k:02d}.png")
    data = {"name": "folder", "path": str(tmp_path / "train"), "clients": 2}
    result = fedadc.run(
        {"rounds": 3, "data": data, "model": {"name": "mlp", "hidden": [4]}, "local": LOCAL}, out=tmp_path / "run"
    )
    new = tmp_path / "new"
    (new / "deeper").mkdir(parents=True)
    for k, name in enumerate(["b.png", "a.png", "deeper/c.png"]):
        Image.open(tmp_path / f"train/light/{2 * k + 1:02d}.png").save(new / name)
    (tmp_path / "train").rename(tmp_path / "gone")
    found = fedadc.predict(tmp_path / "run", new, tmp_path / "a.csv")
    assert found.rows["file"].tolist() == ["a.png", "b.png", "deeper/c.png"]
    assert (tmp_path / "a.csv").read_text().startswith("file,prediction,p_dark,p_light\na.png,")
    x = np.stack([np.asarray(Image.open(new / name)).transpose(2, 0, 1) for name in found.rows["file"]])
    np.savez(tmp_path / "new.npz", x=x, y=np.array([1, 1, 1]))
    from_arrays = fedadc.predict(tmp_path / "run", tmp_path / "new.npz")
    assert from_arrays.notes == (f"{tmp_path / 'new.npz'}: arrays other than x are ignored: y",)
    assert (from_arrays.outputs == found.outputs).all()
    federation = result.plan.federation
    assert (found.outputs == federation.predict(result.state, x).numpy()).all()
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    refused(call("predict", tmp_path / "run", "--data", tmp_path / "rows.csv"), "was trained on arrays, not on a table")


def test_many_rows_show_progress(place: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "long.csv").write_text("age,cp\n" + "30,typical\n" * 20_001)
    answer = call("predict", place / "run", "--data", tmp_path / "long.csv", "-o", tmp_path / "a.csv")
    assert "predicting: " in answer.err and "batches" in answer.err and "20,001 rows" in fine(answer)


def test_a_run_of_an_earlier_version_loads_its_data_or_says_what_to_do(place: Path, tmp_path: Path, call: Call) -> None:
    run = shutil.copytree(place / "run", tmp_path / "run")
    (run / "preprocessing.json").unlink()
    words = r"has no preprocessing\.json, because an earlier version .* its data cannot be loaded .* `fedadc resume"
    with pytest.raises(DataError, match=words):
        fedadc.load(run)
    (place / "kept.csv").rename(place / "train.csv")
    try:
        notes: list[str] = []
        found = fedadc.predict(run, place / "new.csv", notes=notes.append)
        assert "the run's data was loaded instead" in notes[0]
        assert (found.outputs == fedadc.predict(place / "run", place / "new.csv").outputs).all()
        fedadc.resume(run)
        assert (run / "preprocessing.json").read_bytes() == (place / "run/preprocessing.json").read_bytes()
    finally:
        (place / "train.csv").rename(place / "kept.csv")


def test_a_regression_predicts_numbers_in_units_of_the_labels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    np.savez(tmp_path / "numbers.npz", x=x, y=1000 + 50 * x[:, 0])
    config = {"rounds": 15, "task": "regression", "local": LOCAL, "model": {"name": "mlp", "hidden": [8]}}
    data = {"name": "npz", "path": str(tmp_path / "numbers.npz"), "clients": 3}
    result = fedadc.run({**config, "data": data}, out=tmp_path / "run")
    test = result.plan.federation.data.test
    assert test is not None
    (tmp_path / "numbers.npz").unlink()
    found = fedadc.predict(tmp_path / "run", test.x, tmp_path / "a.csv")
    errors = found.values[:, 0].astype(float) - test.y.numpy()[:, 0]
    assert abs(np.mean(errors**2) / result.history[-1]["test_mse"] - 1) < 1e-4
    assert (tmp_path / "a.csv").read_text().startswith("predicted_")
    with pytest.raises(FedadcError, match="a regression predicts no classes; its numbers are in `values`"):
        _ = found.classes


@pytest.mark.parametrize("gaps", [False, True])
def test_an_array_for_a_table_is_encoded_as_its_columns_are(gaps: bool, tmp_path: Path) -> None:
    """One column more with gaps: the encoded width is not that of the table."""
    rng = np.random.default_rng(0)
    age, pulse = rng.normal(50, 9, 60), rng.normal(100, 20, 60).round(2)
    rows = [
        f"{'' if gaps and k < 5 else a},{b},{'yes' if a > 50 else 'no'}"
        for k, (a, b) in enumerate(zip(age, pulse, strict=True))
    ]
    (tmp_path / "train.csv").write_text("\n".join(["age,pulse,sick", *rows, ""]))
    data = {"name": "csv", "path": str(tmp_path / "train.csv"), "label": "sick", "clients": 2}
    fedadc.run({"rounds": 1, "data": data, "model": {"name": "mlp", "hidden": [4]}, "local": LOCAL}, out=tmp_path / "r")
    loaded = fedadc.load(tmp_path / "r")
    x = np.stack([age, pulse], axis=1)
    x[3, 0] = np.nan
    np.savez(tmp_path / "new.npz", x=x)
    found = loaded.predict({"pulse": x[:, 1], "age": x[:, 0]})
    center = loaded.preprocessing.encoding.columns[0].center if loaded.preprocessing.encoding else 0
    imputed = f"age has missing numbers, which training did not have, in 1 of 60 rows; its center {center} stands for"
    assert gaps == (found.notes == ()) and (gaps or imputed in found.notes[0])
    expected = found.outputs
    for same in (x, torch.from_numpy(x), x.tolist(), tmp_path / "new.npz"):
        assert (loaded.predict(same).outputs == expected).all()
    single = x.astype(np.float32)
    by_name = loaded.predict({"age": single[:, 0], "pulse": single[:, 1]})
    assert (loaded.predict(single).outputs == by_name.outputs).all()
    for wrong in (x[:, :1], np.zeros((2, 3)), x[0]):
        with pytest.raises(
            FedadcError, match=r"needs \[n, 2\]: the columns age, pulse, in this order; or give a DataFrame"
        ):
            loaded.predict(wrong)


def test_a_number_is_not_a_place_where_clients_are_named_by_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, owners = rng.normal(size=(60, 3)).astype(np.float32), np.arange(60) % 5 + 1
    np.savez(tmp_path / "n.npz", x=x, y=np.arange(60) // 5 % 2, client=owners)
    data = {"name": "npz", "path": str(tmp_path / "n.npz")}
    config = {"rounds": 2, "method": "fedper", "data": data, "model": {"name": "mlp", "hidden": [4]}, "local": LOCAL}
    result = fedadc.run({**config, "cohort": {"size": 5}}, out=tmp_path / "run")
    federation = result.plan.federation
    assert federation.client_names == ("1", "2", "3", "4", "5")
    own = federation.method.personal(result.state.theta, result.state.clients[0])
    for first in ("1", 1):
        assert torch.equal(fedadc.load(tmp_path / "run", client=first).agreement.start, own)
        predicted = federation.predict(result.state, x, client=first).numpy()
        assert (predicted == fedadc.predict(tmp_path / "run", x, client=first).outputs).all()
    for wrong in (0, "0", 6, True):
        with pytest.raises(FedadcError, match=r"client '.*' is unknown; choose from: 1, 2, 3, 4, 5"):
            fedadc.load(tmp_path / "run", client=wrong)
        with pytest.raises(FedadcError, match=r"client '.*' is unknown; choose from: 1, 2, 3, 4, 5"):
            federation.predict(result.state, x, client=wrong)
