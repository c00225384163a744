"""Three hospitals train one model on Flower, and each of them tunes it on its own patients.

    pip install 'fedadc[flower]'
    python examples/three_sites.py        (a minute or two)

Every hospital is a process of this machine with a file of its own. `docs/federation.md` says how to start the same app
on three machines. The federation ends with the model of a simulation, byte for byte.
"""

import csv
import tempfile
from pathlib import Path

import numpy as np

import fedadc
from fedadc.sites.trial import train_on_this_machine

HOSPITALS = {"bern": 0.2, "lugano": 0.5, "zug": 0.8}  # share of patients who are ill


def write_patients(path: Path) -> None:
    """A table in which age and pressure tell something about the outcome, and hospitals see different patients."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["hospital", "age", "pressure", "outcome"])
        for hospital, share in HOSPITALS.items():
            for ill in rng.random(200) < share:
                age, pressure = rng.normal(60 if ill else 45, 10), rng.normal(140 if ill else 120, 12)
                rows.writerow([hospital, f"{age:.1f}", f"{pressure:.1f}", "ill" if ill else "healthy"])


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_patients(folder / "patients.csv")
        config = fedadc.load_config({
            "rounds": 3,
            "data": {"name": "csv", "path": str(folder / "patients.csv"), "label": "outcome", "client": "hospital",
                     "scale": {"age": [50, 15], "pressure": [130, 20]}},
            "model": {"name": "mlp", "hidden": [8]},
            "method": "fedadc",
            "local": {"epochs": 2, "batch_size": 20, "lr": 0.1},
            "federation": {"personalize": {"regularizers": ["none"]}},
        })  # fmt: skip
        there = train_on_this_machine(folder / "federation", config, notes=print)
        here = folder / "simulation"
        fedadc.run(config, out=here)
        same = (here / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()
        print(f"the model is that of the simulation: {same}")
        print((there / "personal" / "clients.csv").read_text())


if __name__ == "__main__":
    main()
