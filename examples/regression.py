"""Twenty weather stations learn to predict the yield of a solar panel, without sharing a measurement.

    python examples/regression.py        (seconds)

The labels are numbers in watts. Models are trained on scaled labels; the figures are in watts again.
"""

import numpy as np
import torch

import fedadc

STATIONS, HOURS = 20, 120


def measurements(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Height of the sun, clouds and temperature of one station, and the yield; stations have different weather."""
    sun, clouds = rng.uniform(0, 1, HOURS), rng.beta(*rng.uniform(0.5, 3, size=2), HOURS)
    warmth = rng.normal(15, 8) + 10 * sun + rng.normal(0, 2, HOURS)
    watts = 900 * sun * (1 - 0.75 * clouds**3) * (1 - 0.004 * (warmth - 25)) + rng.normal(0, 10, HOURS)
    return np.stack([sun, clouds, warmth / 10], axis=1), watts


def main() -> None:
    rng = np.random.default_rng(0)
    data = fedadc.from_clients([measurements(rng) for _ in range(STATIONS)], task="regression", targets=["watts"])
    torch.manual_seed(0)  # of the initial weights
    for method in (fedadc.methods.FedAvg(), fedadc.methods.FedADC(nesterov=True)):
        federation = fedadc.Federation(
            model=fedadc.models.MLP((3,), 1, hidden=[16]), data=data, method=method, cohort=5,
            local=fedadc.LocalWork(steps=8, batch_size=16, lr=0.1),
        )  # fmt: skip
        *_, last = federation.rounds(30)
        figures = last.metrics
        print(f"{type(method).__name__}: off by {figures['test_mae']:.0f} W on average, R² {figures['test_r2']:.3f}")
    state, x = last.state, np.array([[0.9, 0.1, 2.0], [0.9, 0.9, 2.0]], dtype=np.float32)
    clear, cloudy = federation.data.task.predicted(federation.predict(state, x))[:, 0]
    print(f"the sun is high: {clear:.0f} W under a clear sky, {cloudy:.0f} W under clouds")


if __name__ == "__main__":
    main()
