"""From a table to predictions: train over four wards, predict new patients, export the model.

    python examples/predict.py        (some seconds)

The same with commands: `docs/predict.md`.
"""

import csv
import tempfile
from pathlib import Path

import numpy as np

import fedadc


def write_patients(path: Path) -> None:
    """A table in which age and pain tell something about the outcome."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["ward", "age", "pain", "outcome"])
        for k in range(400):
            ill = rng.random() < 0.5
            pain = ["none", "weak", "strong"][min(2, int(rng.integers(3)) + int(ill))]
            rows.writerow([f"ward {k % 4}", round(rng.normal(62 if ill else 45, 9)), pain, "ill" if ill else "healthy"])


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write_patients(folder / "patients.csv")
    data = {"name": "csv", "path": str(folder / "patients.csv"), "label": "outcome", "client": "ward"}
    config = {
        "rounds": 20,
        "data": {**data, "scale": {"age": [50, 15]}},
        "model": {"name": "mlp", "hidden": [8]},
        "method": {"name": "fedadc", "beta": 0.9},
        "local": {"steps": 4, "batch_size": 16, "lr": 0.05},
    }
    fedadc.run(config, out=folder / "run")
    (folder / "patients.csv").unlink()  # from here on, the run's directory is enough

    new = {"age": [30, 71, None], "pain": ["none", "strong", "unbearable"]}
    found = fedadc.predict(folder / "run", new, folder / "predictions.csv")
    for outcome, probabilities in zip(found.classes, found.probabilities, strict=True):
        print(outcome, probabilities.round(3).tolist())
    print("note:", *found.notes)
    files = fedadc.export(folder / "run", folder / "model", format=["state_dict", "torch"])
    print("exported:", ", ".join(file.name for file in files))
