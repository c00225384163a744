"""From a messy table to clients: what is refused, what is noted, and how scaling decides whether training works.

    python examples/hospitals.py                     (some seconds)
    python examples/hospitals.py patients.csv        only writes the table there, for `docs/table.md`

The table is made here: five hospitals, two of them spelled in two ways, ages, cholesterol in mg/dl, a code for the kind
of pain, gaps. `docs/data.md` says what becomes of every column.
"""

import csv
import sys
import tempfile
from pathlib import Path

import numpy as np

import fedadc

HOSPITALS = ["Bern", "Lugano", "Zug", "Basel", "Chur"]


def write_patients(path: Path, rows: int = 1000) -> None:
    """Patients of whom age, cholesterol and the kind of pain tell something about the outcome."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "hospital", "age", "chol", "pain", "outcome"])
        for k in range(rows):
            ill = rng.random() < 0.5
            hospital = HOSPITALS[int(5 * rng.random() ** 1.5)]
            hospital = hospital.lower() if rng.random() < 0.1 and hospital in ("Bern", "Zug") else hospital
            age, chol = rng.normal(60 if ill else 48, 9), rng.normal(265 if ill else 225, 40)
            pain = int(rng.choice([1, 2, 3], p=[0.2, 0.3, 0.5] if ill else [0.5, 0.2, 0.3]))
            chol = "NA" if rng.random() < 0.1 else round(chol, 1)
            table.writerow([k, hospital, round(age), chol, pain, "ill" if ill else "healthy"])


def show_what_becomes_of_it() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "patients.csv"
        write_patients(path)
        try:
            fedadc.from_csv(path, label="outcome", client="hospital")
        except fedadc.FedadcError as error:
            print("refused:", str(error).replace(str(path), path.name))
        settings = {"label": "outcome", "client": "hospital", "merge_names": True, "categories": ["pain"]}
        data = fedadc.from_csv(path, **settings)
        print("notes:", *(f"  {note}" for note in data.notes), sep="\n")
        for scale in ("standard", "per-client", "none"):
            config = {
                "rounds": 20,
                "data": {"name": "csv", "path": str(path), **settings, "drop": ["id"], "scale": scale},
                "model": {"name": "mlp", "hidden": [8]},
                "method": {"name": "fedadc", "beta": 0.9},
                "local": {"steps": 4, "batch_size": 16, "lr": 0.05},
            }
            last = fedadc.run(config, out=Path(name) / scale).history[-1]
            print(f"scale {scale}: accuracy {last['test_accuracy']:.2f}, loss {last['test_loss']:.2f}")


if sys.argv[1:]:
    write_patients(Path(sys.argv[1]))
else:
    show_what_becomes_of_it()
