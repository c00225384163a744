"""Models that predict numbers, and models that take whole numbers, after they are loaded and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedadc

WORDS = """
import torch

class Words(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.words, self.head = torch.nn.Embedding(50, 6), torch.nn.Linear(6, classes)

    def embed(self, x):
        return self.words(x).mean(dim=1)

    def forward(self, x):
        return self.head(self.embed(x))
"""
LOCAL: dict[str, Any] = {"steps": 4, "batch_size": 8}


def numbers_run(folder: Path) -> Path:
    """A run that predicts two numbers in different units."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4)).astype(np.float32)
    y = np.stack([300 + 40 * x[:, 0], 0.01 * x[:, 1] - 5], axis=1)
    np.savez(folder / "numbers.npz", x=x, y=y, client=np.arange(200) % 5)
    data, model = {"name": "npz", "path": str(folder / "numbers.npz")}, {"name": "mlp", "hidden": [8]}
    fedadc.run({"rounds": 8, "task": "regression", "data": data, "model": model, "local": LOCAL}, out=folder / "run")
    return folder / "run"


def words_run(folder: Path) -> Path:
    """A run whose model begins with an embedding."""
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=120)
    np.savez(folder / "words.npz", x=rng.integers(0, 40, size=(120, 6)) + 10 * y[:, None], y=y)
    (folder / "mine.py").write_text(WORDS)
    data, model = "{name: npz, path: words.npz, clients: 4}", '"mine:Words"'
    (folder / "c.yaml").write_text(f"rounds: 2\ndata: {data}\nmodel: {model}\nlocal: {{steps: 4, batch_size: 8}}\n")
    fedadc.run(folder / "c.yaml", out=folder / "run")
    return folder / "run"


def test_numbers_are_in_units_of_the_labels(tmp_path: Path) -> None:
    loaded = fedadc.load(numbers_run(tmp_path))
    arrays = np.load(tmp_path / "numbers.npz")
    predicted = loaded.predict(arrays["x"])
    assert predicted.columns().keys() == {"predicted_label 1", "predicted_label 2"}
    error = np.abs(predicted.values - arrays["y"]).mean(axis=0)
    assert error[0] < 20 and error[1] < 0.01, "off by less than half of the standard deviation, in each one's own units"
    targets = loaded.preprocessing.spec.targets
    assert predicted.values[:, 0] == pytest.approx(predicted.outputs[:, 0] * targets[0].spread + targets[0].center)
    wide = predicted.outputs.astype(np.float64) * [t.spread for t in targets] + [t.center for t in targets]
    assert predicted.values.dtype == np.float64 and np.array_equal(predicted.values, wide)
    with pytest.raises(fedadc.FedadcError, match="predicts no classes"):
        _ = predicted.probabilities


@pytest.mark.parametrize("make", [numbers_run, words_run])
def test_the_exported_program_has_the_same_bits(make: Any, tmp_path: Path) -> None:
    run = make(tmp_path)
    fedadc.export(run, tmp_path / "out", format="torch")
    (file,) = tmp_path.glob("*.npz")
    x, loaded = np.load(file)["x"][:32], fedadc.load(run)
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    with torch.no_grad():
        outputs = program(torch.from_numpy(x))
    assert np.array_equal(outputs.numpy(), loaded.predict(x).outputs)
