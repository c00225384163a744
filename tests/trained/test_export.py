"""What is exported gives the outputs of fedadc in processes without it, and has the same bytes every time."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import fedadc
from commands import Call, contents, fine, refused
from fedadc.data.batches import Inputs
from fedadc.data.dataset import Normalization, Samples
from fedadc.errors import FedadcError
from fedadc.system.determinism import deterministic
from fedadc.trained.export import write_folder
from fedadc.trained.load import LoadedRun
from fedadc.trained.new_data import read_new_data
from fedadc.trained.program import FromRaw
from tables import LOCAL, table_config, write_table

OWN_MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self, input_shape, classes, width=7):
        super().__init__()
        self.body = torch.nn.Linear(input_shape[0], width)
        self.head = torch.nn.Linear(width, classes)
        self.register_buffer("shift", torch.full((width,), 0.25))

    def embed(self, x):
        return torch.tanh(self.body(x) + self.shift)

    def forward(self, x):
        return self.head(self.embed(x))
"""
DIGITS = {"name": "digits", "clients": 4}
COLORS = {
    "name": "npz",
    "path": "colors.npz",
    "clients": 3,
    "normalize": {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]},
}
IMAGES: dict[str, dict[str, Any]] = {
    "cnn, one channel": {
        "data": DIGITS,
        "model": {"name": "cnn", "channels": [4, 6], "hidden": [8], "channels_last": True},
    },
    "cnn, plane by plane": {
        "data": DIGITS,
        "model": {"name": "cnn", "channels": [4], "hidden": [8], "channels_last": False},
    },
    "resnet": {"data": COLORS, "model": {"name": "resnet18", "width": 4}},
    "mlp": {"data": DIGITS, "model": {"name": "mlp", "hidden": [9]}},
}
RARER = ("cnn, plane by plane", "resnet", "mlp")
CASES = [
    pytest.param(case, marks=pytest.mark.slow if case in RARER else ()) for case in (*IMAGES, "table", "own model")
]


def make(case: str, folder: Path) -> Path:
    """A run of one round and its folder."""
    (folder / "mine.py").write_text(OWN_MODEL)
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    np.savez(
        folder / "colors.npz",
        x=(rng.integers(0, 150, (60, 3, 16, 16)) + 50 * (y[:, None, None, None] % 3)).astype(np.uint8),
        y=y,
    )
    write_table(folder / "train.csv")
    tree = table_config(Path("train.csv"))
    if case == "own model":
        tree["model"] = {"name": "mine:Net", "width": 5}
    config = (
        {"rounds": 1, "local": LOCAL, "evaluate": {"batch_size": 32}, "cohort": {"size": 2}, **IMAGES[case]}
        if case in IMAGES
        else tree
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    fedadc.run(folder / "config.yaml", out=folder / "run")
    return folder / "run"


@pytest.fixture(scope="module", params=CASES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedRun, Path]:
    """A model, and the folder of its export in all formats."""
    folder = tmp_path_factory.mktemp("export")
    run = make(request.param, folder)
    fedadc.export(run, folder / "out", format=["state_dict", "torch", "onnx"])
    return fedadc.load(run), folder / "out"


def raw_inputs(loaded: LoadedRun, rows: int) -> torch.Tensor:
    """Raw inputs of the type and the range that the data has."""
    rng = np.random.default_rng(rows)
    schema = loaded.preprocessing
    shape = (rows, *schema.shape)
    if schema.dtype == "uint8":
        return torch.from_numpy(rng.integers(0, int(schema.normalization.scale) + 1, shape).astype(np.uint8))
    return torch.from_numpy(rng.normal(size=shape).astype(schema.dtype))


def samples(x: torch.Tensor) -> Samples:
    """Inputs as samples of a data set: of a table, encoded already."""
    return Samples(x, torch.zeros(len(x), dtype=torch.int64))


def in_a_process(program: str, folder: Path, **environment: str) -> str:
    """The output of a program that cannot import fedadc."""
    blocked = "import sys; sys.modules['fedadc'] = None\n"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(
        [sys.executable, "-c", blocked + program],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ALONE = """
import torch, numpy
torch.set_num_threads(1)
program = torch.export.load("{folder}/model.pt2").module()
for rows in (1, 2, 5, 32):
    x = torch.from_numpy(numpy.load("{place}/x" + str(rows) + ".npy"))
    with torch.no_grad():
        numpy.save("{place}/torch" + str(rows) + ".npy", program(x).numpy())
"""


def test_torch_export_gives_the_same_bits_to_a_process_without_fedadc(
    exported: tuple[LoadedRun, Path], tmp_path: Path
) -> None:
    loaded, folder = exported
    kernels = {"MKL_CBWR": os.environ["MKL_CBWR"]}
    expected = {}
    for rows in (1, 2, 5, 32):
        x = raw_inputs(loaded, rows)
        expected[rows] = loaded.predict(samples(x)).outputs
        np.save(tmp_path / f"x{rows}.npy", x.float().numpy())
    in_a_process(ALONE.format(folder=folder, place=tmp_path), tmp_path, **kernels)
    for rows, outputs in expected.items():
        assert (np.load(tmp_path / f"torch{rows}.npy") == outputs).all(), rows


def test_onnx_gives_the_same_classes_and_nearly_the_same_outputs(exported: tuple[LoadedRun, Path]) -> None:
    runtime = pytest.importorskip("onnxruntime")
    loaded, folder = exported
    session = runtime.InferenceSession(folder / "model.onnx")
    for rows in (1, 7, 50):
        x = raw_inputs(loaded, rows)
        (outputs,) = session.run(None, {"x": x.float().numpy()})
        expected = loaded.predict(samples(x))
        assert np.abs(outputs - expected.outputs).max() <= 1e-5
        assert (outputs.argmax(axis=1) == expected.outputs.argmax(axis=1)).all()


def test_a_state_dict_gives_the_same_bits_to_a_module_of_ones_own(exported: tuple[LoadedRun, Path]) -> None:
    from safetensors.torch import load_file

    loaded, folder = exported
    module = loaded.module
    for parameter in module.parameters():
        parameter.data.zero_()
    module.load_state_dict(load_file(folder / "model.safetensors"))
    inputs = loaded.agreement.inputs
    for rows in (1, 5, 32):
        x = raw_inputs(loaded, rows)
        normalized, _ = inputs.gather(samples(x), np.arange(rows))
        with torch.no_grad(), deterministic():
            outputs = module(normalized).numpy()
        assert (outputs == loaded.predict(samples(x)).outputs).all()


def test_the_same_run_gives_the_same_files_in_another_process(exported: tuple[LoadedRun, Path], tmp_path: Path) -> None:
    loaded, folder = exported
    words = [
        "export",
        str(loaded.path),
        "-o",
        "again",
        *(w for f in ("state_dict", "torch", "onnx") for w in ("--format", f)),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "fedadc", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "again") == contents(folder)
    everything = b"".join(contents(folder).values())
    places = {str(loaded.path.parent), str(Path(fedadc.__file__).parent), str(Path(torch.__file__).parent)}
    assert not [place for place in places if place.encode() in everything], "names a folder of this machine"


def test_no_part_of_an_export_is_pickled_but_the_empty_list_of_example_inputs(
    exported: tuple[LoadedRun, Path],
) -> None:
    import zipfile

    with zipfile.ZipFile(exported[1] / "model.pt2") as archive:
        configs = [json.loads(archive.read(n)) for n in archive.namelist() if n.endswith("_config.json")]
    entries = [entry for config in configs for entry in config["config"].values()]
    assert entries and not any(entry["use_pickle"] for entry in entries)


def programs_of_the_card(folder: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)


def test_the_programs_of_the_card_run_as_they_stand(exported: tuple[LoadedRun, Path], tmp_path: Path) -> None:
    """Those of torch and ONNX without fedadc, the one of the state dict with the model's own class."""
    loaded, folder = exported
    of_state_dict, *others = programs_of_the_card(folder)
    needed = "from mine, which is not in this folder: put mine.py, and what it imports, beside it."
    assert (needed in (folder / "README.md").read_text()) == (loaded.config.model.name == "mine:Net")
    place = {"PYTHONPATH": os.pathsep.join([str(loaded.path.parent), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(
        [sys.executable, "-c", of_state_dict], cwd=folder, env={**os.environ, **place}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    shown = [done.stdout, *(in_a_process(program, folder) for program in others)]
    probabilities = [json.loads(text.replace("'", '"')) for text in shown]
    for found in probabilities:
        assert [*found] == list(loaded.classes) and abs(sum(found.values()) - 1) < 1e-5
        assert all(abs(found[name] - value) < 1e-5 for name, value in probabilities[0].items())


def test_the_card_encodes_rows_of_a_table_as_fedadc_does(tmp_path: Path) -> None:
    """With the state dict of one's own module, in a process without fedadc: the bits of `predict`."""
    run = make("own model", tmp_path)
    fedadc.export(run, tmp_path / "out", format=["state_dict", "torch"])
    rows = [
        {"age": 33.25, "cp": "typical"}, {"age": "", "cp": "NA"}, {"age": "1e1", "cp": " atypical "},
        {"age": None, "cp": "never seen"}, {"age": 99, "cp": "none of these"},
    ]  # fmt: skip
    columns = {name: [row[name] for row in rows] for name in ("age", "cp")}
    expected = fedadc.predict(run, columns)
    for program in programs_of_the_card(tmp_path / "out"):
        changed = re.sub(r"rows = .*", f"rows = {rows!r}", program)
        threads = "import torch; torch.set_num_threads(1)\n"
        end = "\nimport numpy; numpy.save('outputs.npy', outputs.numpy())"
        in_a_process(
            "sys.path.insert(0, '..')\n" + threads + changed + end, tmp_path / "out", MKL_CBWR=os.environ["MKL_CBWR"]
        )
        assert (np.load(tmp_path / "out/outputs.npy") == expected.outputs).all()


def test_the_card_reads_fields_as_fedadc_does(tmp_path: Path) -> None:
    """Spellings of numbers, as categories and as missing values, gaps, and categories that training did not have."""
    lines = [f"{20 + k},{k % 3},{['a', 'NaN', 'b'][k % 3]},{['no', 'yes'][k % 2]}" for k in range(60)]
    gaps = [f"-9,,,{['no', 'yes'][k % 2]}" for k in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["age,grade,kind,sick", *lines, *gaps, ""]))
    data = {"name": "csv", "path": str(tmp_path / "t.csv"), "label": "sick", "clients": 2, "categories": ["grade"]}
    data["missing"] = [-9, "unknown", "1e3"]
    fedadc.run({"rounds": 1, "data": data, "model": {"name": "mlp", "hidden": [5]}, "local": LOCAL}, out=tmp_path / "r")
    fedadc.export(tmp_path / "r", tmp_path / "out", format="torch")
    ages = [33, "+33.50", "-9", -9.0, float("nan"), None, " Unknown ", "1000", "3.3e1", 1e3, "7"]
    grades = [1, 1.0, "1.0", "+1", " 2 ", "-9.00", float("nan"), "0.5", "", 7, "-0"]
    kinds = ["a", " b ", "A", "NaN", float("nan"), "UNKNOWN", "-9.0", None, "1.0", "1_0", "nan"]
    columns = {"age": ages, "grade": grades, "kind": kinds}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (program,) = programs_of_the_card(tmp_path / "out")
    program = program.replace(re.findall(r"rows = .*", program)[0], f"nan = float('nan')\nrows = {rows!r}")
    shown = in_a_process(program + "\nimport numpy; numpy.save('x.npy', x.numpy())", tmp_path / "out")
    loaded = fedadc.load(tmp_path / "r")
    expected = read_new_data(columns, loaded.preprocessing)
    assert np.array_equal(np.load(tmp_path / "out/x.npy"), expected.samples.x.numpy())
    unknown = re.findall(r"column (\w+): training did not have the category (.*); all", shown)
    assert unknown == [
        ("kind", "'A'"), ("grade", "'0.5'"), ("kind", "'1.0'"), ("grade", "7"), ("kind", "'1_0'"), ("kind", "'nan'")
    ]  # fmt: skip
    assert "in 4 of 11 rows: 1 (1), 1_0 (1), A (1), nan (1)" in " ".join(expected.notes)


def test_the_card_scales_rows_by_the_constants_of_their_client(tmp_path: Path) -> None:
    lines = [f"{20 + k + 50 * (k % 3)},{k % 3}.0,{k % 2}" for k in range(90)]
    (tmp_path / "t.csv").write_text("\n".join(["age,ward,sick", *lines, ""]))
    data = {"name": "csv", "path": str(tmp_path / "t.csv"), "label": "sick", "client": "ward", "scale": "per-client"}
    tree = {"rounds": 1, "data": data, "model": {"name": "mlp", "hidden": [5]}, "local": LOCAL}
    fedadc.run(tree, out=tmp_path / "r")
    fedadc.export(tmp_path / "r", tmp_path / "out", format="torch")
    columns = {"age": [33, "+133.5", None, 70, 71], "ward": ["2", " 1.0 ", 0, "+1.", 0.0]}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (program,) = programs_of_the_card(tmp_path / "out")
    assert json.loads(in_a_process(program, tmp_path / "out").replace("'", '"')).keys() == {"0", "1"}
    changed = re.sub(r"rows = .*", f"rows = {rows!r}", program) + "\nimport numpy; numpy.save('x.npy', x.numpy())"
    in_a_process(changed, tmp_path / "out")
    loaded = fedadc.load(tmp_path / "r")
    expected = read_new_data(columns, loaded.preprocessing)
    assert np.array_equal(np.load(tmp_path / "out/x.npy"), expected.samples.x.numpy())
    assert "(age - center) / spread, by the constants of the row's client" in (tmp_path / "out/README.md").read_text()
    strange = re.sub(r"rows = .*", "rows = [{'age': 33, 'ward': 'nan'}]", program)
    with pytest.raises(AssertionError, match="no scale is known for the client 'nan', only for 0, 1, 2"):
        in_a_process(strange, tmp_path / "out")


def test_the_card_takes_names_that_are_merged_as_one(tmp_path: Path) -> None:
    lines = [f"{20 + k},{['St. Gallen', 'st. gallen', '07', '7'][k % 4]},{k % 2}" for k in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["age,ward,sick", *lines, ""]))
    data = {"name": "csv", "path": str(tmp_path / "t.csv"), "label": "sick", "client": "ward", "scale": "per-client"}
    tree = {"rounds": 1, "data": {**data, "merge_names": True}, "model": {"name": "mlp", "hidden": [5]}, "local": LOCAL}
    fedadc.run(tree, out=tmp_path / "r")
    fedadc.export(tmp_path / "r", tmp_path / "out", format="torch")
    columns = {"age": [33, 44, 55], "ward": ["ST.  gallen", "7.0", "007"]}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    (program,) = programs_of_the_card(tmp_path / "out")
    changed = re.sub(r"rows = .*", f"rows = {rows!r}", program) + "\nimport numpy; numpy.save('x.npy', x.numpy())"
    in_a_process(changed, tmp_path / "out")
    expected = read_new_data(columns, fedadc.load(tmp_path / "r").preprocessing)
    assert np.array_equal(np.load(tmp_path / "out/x.npy"), expected.samples.x.numpy())


def test_numbers_to_predict_in_a_card(tmp_path: Path) -> None:
    """The program gives what `predict` gives, in units of the labels, and the card says of which columns."""
    lines = [f"{20 + k},{300 + 50 * (k % 7)},{0.01 * k}" for k in range(80)]
    (tmp_path / "t.csv").write_text("\n".join(["age,cost,dose", *lines, ""]))
    data = {"name": "csv", "path": str(tmp_path / "t.csv"), "label": ["cost", "dose"], "clients": 2}
    tree = {"rounds": 1, "task": "regression", "data": data, "model": {"name": "mlp", "hidden": [5]}, "local": LOCAL}
    last = fedadc.run({**tree, "evaluate": {"metrics": ["per_target"]}}, out=tmp_path / "r").history[-1]
    fedadc.export(tmp_path / "r", tmp_path / "out", format="torch")
    (program,) = programs_of_the_card(tmp_path / "out")
    shown = in_a_process(re.sub(r"rows = .*", "rows = [{'age': 33}, {'age': 71}]", program), tmp_path / "out")
    found = [json.loads(line.replace("'", '"')) for line in shown.splitlines()]
    expected = fedadc.predict(tmp_path / "r", {"age": [33, 71]}).values
    assert np.allclose([[row["cost"], row["dose"]] for row in found], expected, rtol=1e-5)
    cost, dose = last["test_per_target_mae"]
    text = (tmp_path / "out/README.md").read_text()
    assert "cost, dose" in text and f"| test_per_target_mae | cost {cost:.4f}, dose {dose:.4f} |" in text
    assert "targets=2" in repr(fedadc.load(tmp_path / "r"))


def test_the_model_of_a_client_has_its_own_constants_only(tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv")
    tree = table_config(tmp_path / "train.csv", method="fedper")
    tree["data"]["scale"] = "per-client"
    fedadc.run(tree, out=tmp_path / "run")
    fedadc.export(tmp_path / "run", tmp_path / "out", client=1, format="torch")
    described = json.loads((tmp_path / "out/model.json").read_text())["input"]
    loaded = fedadc.load(tmp_path / "run", client="w1")
    encoding = loaded.preprocessing.encoding
    assert encoding is not None and loaded.client == "w1"
    assert described["client"] == "ward" and described["scales"] == {"w1": {"age": [*encoding.scales["w1"][0]]}}
    assert "'ward': 'w1'" in programs_of_the_card(tmp_path / "out")[0]
    alone, named = ({"age": [33], "cp": ["typical"]} | own for own in ({}, {"ward": ["w1"]}))
    assert (loaded.predict(alone).outputs == loaded.predict(named).outputs).all()
    with pytest.raises(FedadcError, match="row 2: no scale is known for the client 'w0', only for w1;"):
        loaded.predict({**alone, "ward": ["w0"]})


def test_the_description_and_the_card_say_what_the_model_is(exported: tuple[LoadedRun, Path]) -> None:
    loaded, folder = exported
    description, card = json.loads((folder / "model.json").read_text()), (folder / "README.md").read_text()
    assert description["output"]["classes"] == list(loaded.classes)
    encoding = loaded.preprocessing.encoding
    if encoding is not None:
        assert len(description["input"]["features"]) == encoding.width
        assert "(age - 40.0) / 12.0; 0 if it is missing" in card and "| 1 | 1 if age is missing, else 0 |" in card
        assert "4: w0, w1, w2, w3" in card
    for value in (f"{loaded.history[-1]['test_accuracy']:.4f}", torch.__version__, fedadc.__version__, "fedadc run"):
        assert value in card, value
    (text,) = re.findall(r"```yaml\n(.*?)```", card, flags=re.DOTALL)
    assert yaml.safe_load(text) == loaded.tree


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_program_normalizes_as_training_does(channels: int, channels_last: bool) -> None:
    values = tuple(0.1 * k + 0.3 for k in range(channels))
    for constants in (Normalization(), Normalization(255.0), Normalization(255.0, values, values[::-1])):
        inputs = Inputs(constants, channels_last=channels_last)
        x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, channels, 4, 6)).astype(np.uint8))
        expected, _ = inputs.gather(Samples(x, torch.zeros(5, dtype=torch.int64)), np.arange(5))
        found = FromRaw(torch.nn.Identity(), inputs, channels_last)(x.float())
        assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_a_folder_is_replaced_only_if_it_is_an_export(tmp_path: Path, call: Call) -> None:
    run, out = make("mlp", tmp_path), tmp_path / "out"
    fine(call("export", run, "-o", out, "--format", "torch"))
    assert {p.name for p in out.iterdir()} == {"model.pt2", "model.json", "README.md"}
    refused(call("export", run, "-o", out), "is not empty; choose another --out, or use --overwrite")
    fine(call("export", run, "-o", out, "--overwrite"))
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "model.json", "README.md"}
    (out / "thesis.txt").write_text("mine")
    before = contents(out)
    refused(call("export", run, "-o", out, "--overwrite"), "contains thesis.txt, which no export has written")
    assert contents(out) == before
    refused(
        call("export", run, "-o", tmp_path / "new", "--format", "onxx"), "format 'onxx' is unknown; did you mean 'onnx'"
    )
    assert not (tmp_path / "new").exists()


def killed_at(number: int, folder: Path, files: dict[str, bytes]) -> bool:
    """Whether a process that writes a folder was killed at its n-th flush, rename or deletion."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    calls = itertools.count(1)

    def dying(original: Any) -> Any:
        def call(*given: Any, **kw: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*given, **kw)

        return call

    for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))
    write_folder(folder, files)
    os._exit(0)


def test_a_kill_leaves_the_old_export_or_the_new_one(tmp_path: Path) -> None:
    old, new = ({name: f"{name} {k}".encode() for name in files} for k, files in enumerate(["abc", "bcd"]))
    folder, seen = tmp_path / "out", []
    for number in itertools.count(1):
        write_folder(folder, old)
        was_killed = killed_at(number, folder, new)
        if not folder.exists():  # between the two renames
            assert contents(tmp_path / "out-old.part") == old and contents(tmp_path / "out.part") == new
            seen.append("between")
        else:
            seen.append("old" if contents(folder) == old else "new" if contents(folder) == new else "mixed")
        if not was_killed:
            break
    assert number > 8 and "mixed" not in seen and seen.count("between") == 1 and seen == sorted(seen, key=order)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def order(state: str) -> int:
    return ("old", "between", "new").index(state)


def test_the_working_directory_is_replaced_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    number = tmp_path.stat().st_ino
    for files in ({"a": b"1", "b": b"2"}, {"b": b"3"}):
        write_folder(Path(), files)
        assert contents(tmp_path) == files and tmp_path.stat().st_ino == number


def test_the_own_model_of_a_client(tmp_path: Path) -> None:
    write_table(tmp_path / "train.csv")
    fedadc.run(table_config(tmp_path / "train.csv", method="fedper"), out=tmp_path / "run")
    fedadc.export(tmp_path / "run", tmp_path / "out", client="w1", format="torch")
    loaded = fedadc.load(tmp_path / "run", client="w1")
    x = raw_inputs(loaded, 9)
    program = torch.export.load(tmp_path / "out/model.pt2").module()
    with torch.no_grad(), deterministic():
        assert (program(x).numpy() == loaded.predict(samples(x)).outputs).all()
    assert "The model is the own one of client w1." in (tmp_path / "out/README.md").read_text()
    with pytest.raises(FedadcError, match="each client has its own; give `client`"):
        fedadc.export(tmp_path / "run", tmp_path / "other")


def test_a_model_that_cannot_be_traced_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(
        "import torch\nclass Odd(torch.nn.Module):\n    def __init__(self, input_shape, classes):\n"
        "        super().__init__()\n        self.head = torch.nn.Linear(input_shape[0], classes)\n"
        "    def forward(self, x):\n        return self.head(x * 2 if float(x.sum()) > 0 else x)\n"
    )
    write_table(tmp_path / "train.csv")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(table_config(Path("train.csv"), model={"name": "odd:Odd"})))
    fedadc.run(tmp_path / "config.yaml", out=tmp_path / "run")
    with pytest.raises(
        FedadcError, match=r"model Odd cannot be exported as a program .* the format state_dict is always"
    ):
        fedadc.export(tmp_path / "run", tmp_path / "out", format="torch")
    assert not (tmp_path / "out").exists()
    assert len(fedadc.export(tmp_path / "run", tmp_path / "out")) == 3


def test_a_program_of_an_embedding_takes_whole_numbers(tmp_path: Path) -> None:
    (tmp_path / "bag.py").write_text(
        "import torch\nclass Bag(torch.nn.Module):\n    def __init__(self, classes):\n        super().__init__()\n"
        "        self.words = torch.nn.Embedding(30, 5)\n        self.head = torch.nn.Linear(5, classes)\n"
        "    def embed(self, x):\n        return self.words(x).mean(dim=1)\n"
        "    def forward(self, x):\n        return self.head(self.embed(x))\n"
    )
    x = np.random.default_rng(0).integers(0, 30, (60, 8))
    np.savez(tmp_path / "words.npz", x=x, y=x[:, 0] % 2)
    data = {"name": "npz", "path": "words.npz", "clients": 2}
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"rounds": 1, "data": data, "model": {"name": "bag:Bag"}, "local": LOCAL})
    )
    fedadc.run(tmp_path / "config.yaml", out=tmp_path / "run")
    fedadc.export(tmp_path / "run", tmp_path / "out", format="torch")
    assert json.loads((tmp_path / "out/model.json").read_text())["input"]["dtype"] == "int64"
    program = torch.export.load(tmp_path / "out/model.pt2").module()
    with torch.no_grad(), deterministic():
        assert (program(torch.from_numpy(x)).numpy() == fedadc.predict(tmp_path / "run", x).outputs).all()
