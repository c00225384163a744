"""Regression: every sample has one number, or several, and a model returns as many.

Models are trained on scaled labels, (label - center) / spread, so that the learning rate does not depend on the units.
Metrics are in units of the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedadc.errors import require
from fedadc.tasks.base import Array, Sums, Task

ROUNDING = 1e-10  # share of a sum of squares that may be rounding


@dataclass(frozen=True)
class Target:
    """One number to predict: its name, and the constants by which it is scaled for training."""

    name: str
    center: float = 0.0
    spread: float = 1.0
    scaled: bool = True  # False: the constants are not known yet
    mean: float | None = None  # from which deviations are measured, to lose no digits; None: the center

    def __post_init__(self) -> None:
        valid = isfinite(self.center) and isfinite(self.spread) and self.spread > 0
        require(valid, f"target {self.name} needs a finite center and a spread above 0.")


@dataclass(frozen=True)
class Regression(Task):
    """Numbers to predict; labels are [n, targets], in their own units, float32 or float64."""

    name: ClassVar[str] = "regression"
    score: ClassVar[str] = "r2"
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "mse", "mae")
    always: ClassVar[tuple[str, ...]] = ("loss", "mse", "mae", "r2")
    extra_metrics: ClassVar[tuple[str, ...]] = ("per_target",)
    sample_metric: ClassVar[str] = "mse"

    targets: tuple[Target, ...]

    @property
    def words(self) -> tuple[str, str]:
        return "numbers", f"{len(self.targets)} target{'s' if len(self.targets) > 1 else ''}"

    @property
    def outputs(self) -> tuple[int, ...]:
        return (len(self.targets),)

    def label_problem(self, y: Tensor, split: str) -> str:
        if not y.is_floating_point() or y.ndim != 2 or y.shape[1] != len(self.targets):
            wanted = f"[n, {len(self.targets)}]"
            return f"{split} labels must be floating-point numbers {wanted}, not {y.dtype} {list(y.shape)}"
        invalid = torch.nonzero(~torch.isfinite(y).all(dim=1))
        if not len(invalid):
            return ""
        return f"a label of {split} sample {int(invalid[0, 0])} is NaN or infinite"

    def blank_labels(self, samples: int) -> Tensor:
        return torch.zeros((samples, len(self.targets)))

    def for_training(self, y: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """The scaled labels, in the type of the model."""
        center, spread = _constants(self.targets)
        return ((y.double() - center) / spread).to(device, dtype)

    def strata(self, y: Tensor) -> Array:
        return np.zeros(len(y), dtype=np.int64)

    @property
    def groups(self) -> int:
        return 1

    def counted(self, outputs: Tensor, y: Tensor) -> Sums:
        """The sum of the loss, and per target those of errors and of deviations from the center."""
        _, spread = _constants(self.targets)
        errors = self._errors(outputs, y)
        deviation = y.double() - _means(self.targets)
        return {
            "samples": np.array([len(y)]),
            "loss": errors.square().mean(dim=1).sum().numpy().reshape(1),
            "squared": (errors * spread).square().sum(dim=0).numpy(),
            "absolute": (errors * spread).abs().sum(dim=0).numpy(),
            "deviation": deviation.sum(dim=0).numpy(),
            "deviation_squared": deviation.square().sum(dim=0).numpy(),
        }

    def _errors(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Outputs minus scaled labels, float64 [n, targets]."""
        center, spread = _constants(self.targets)
        return outputs.cpu().double() - (y.double() - center) / spread

    def shapes(self) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        number, each = np.dtype(np.float64), (len(self.targets),)
        sums = dict.fromkeys(("squared", "absolute", "deviation", "deviation_squared"), (each, number))
        return {"samples": ((1,), np.dtype(np.int64)), "loss": ((1,), number), **sums}

    def possible(self, sums: Sums, samples: int) -> bool:
        finite = all(np.isfinite(values).all() for values in sums.values())
        positive = all((sums[name] >= 0).all() for name in ("loss", "squared", "absolute", "deviation_squared"))
        return bool(finite and positive and int(sums["samples"][0]) == samples)

    def metrics(self, sums: Sums, wanted: Sequence[str]) -> dict[str, Any]:
        """The loss, and MSE, MAE and R², which are means over the targets; R² is missing where labels do not differ."""
        each = self.of_targets(sums)
        metrics: dict[str, Any] = {"loss": float(sums["loss"][0]) / int(sums["samples"][0])}
        metrics |= {name: float(np.mean(each[name])) for name in ("mse", "mae")}
        known = [r2 for r2 in each["r2"] if r2 is not None]
        if len(known) == len(self.targets):
            metrics["r2"] = float(np.mean(known))
        if "per_target" in wanted:
            metrics |= {f"per_target_{name}": values for name, values in each.items()}
        return metrics

    def of_targets(self, sums: Sums) -> dict[str, list[Any]]:
        """MSE, MAE and R² of every target, in its own units; R² is None where its labels do not differ."""
        n = int(sums["samples"][0])
        total = sums["deviation_squared"] - sums["deviation"] ** 2 / n
        differ = total > ROUNDING * sums["deviation_squared"]  # otherwise the total is what rounding leaves
        explained = [1 - float(s / t) if d else None for s, t, d in zip(sums["squared"], total, differ, strict=True)]
        return {"mse": (sums["squared"] / n).tolist(), "mae": (sums["absolute"] / n).tolist(), "r2": explained}

    def sample_values(self, outputs: Tensor, y: Tensor) -> Array:
        """The squared errors in units of the labels, as means over the targets."""
        _, spread = _constants(self.targets)
        values: Array = (self._errors(outputs, y) * spread).square().mean(dim=1).numpy()
        return values

    def sample_total(self, sums: Sums) -> float:
        return float(sums["squared"].mean())

    def predicted(self, outputs: Tensor) -> Array:
        """The predicted numbers, [n, targets], in units of the labels."""
        center, spread = _constants(self.targets)
        numbers: Array = (outputs.cpu().double() * spread + center).numpy()
        return numbers


@cache
def _means(targets: tuple[Target, ...]) -> Tensor:
    means = [target.center if target.mean is None else target.mean for target in targets]
    return torch.tensor(means, dtype=torch.float64)


@cache
def _constants(targets: tuple[Target, ...]) -> tuple[Tensor, Tensor]:
    """Centers and spreads, float64."""
    center, spread = ([getattr(target, name) for target in targets] for name in ("center", "spread"))
    return torch.tensor(center, dtype=torch.float64), torch.tensor(spread, dtype=torch.float64)
