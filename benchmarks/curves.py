"""Seconds per round against what a user may choose: clients, cohort, parameters, workers. `python benchmarks/curves.py`

Each point is the minimum of a few rounds of FedADC after a warm-up round; one process, points one after another.
Writes the figures as JSON and a plot to results/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from measure import QUIET, machine, machine_line, result_name, wait_until_quiet
from ours import METHODS, dataset, small_clients, small_federation
from workloads import CLASSES, LR, cache_folder, load_tensors, mlp

import fedadc

HERE = Path(__file__).resolve().parent
ENGINES = {"in-process": 0, "2 workers": 2}
COLORS = {"in-process": "#D55E00", "2 workers": "#0072B2"}  # told apart by color-blind readers too
Curve = dict[str, Any]  # title, x label, points


def vector_federation(data: fedadc.Dataset, workers: int, cohort: int, width: int = 200) -> fedadc.Federation:
    """The data of W2: 1,000 clients of 60 vectors of 784, three steps of batch 20 each."""
    torch.manual_seed(0)
    work = fedadc.LocalWork(epochs=1, batch_size=20, lr=LR)
    model = mlp(784, width, width, CLASSES)
    return fedadc.Federation(
        test=0, model=model, data=data, method=METHODS["fedadc"], cohort=cohort, local=work, workers=workers
    )


@dataclass
class Stopwatch:
    """Measures points, each on a quiet machine where possible."""

    most: float  # seconds for one point: no further round is begun after that, if there have been three
    patience: float  # seconds to wait for a quiet machine
    busiest: float = 0.0  # cores that others kept busy just before a point

    def __call__(self, federation: fedadc.Federation) -> float:
        """The quickest of 3 to 30 rounds, after one that is not counted."""
        self.busiest = max(self.busiest, round(wait_until_quiet(self.patience), 2))
        ends: list[float] = []
        for _ in federation.rounds(31):
            ends.append(time.perf_counter())
            if len(ends) > 3 and ends[-1] - ends[0] > self.most:
                break
        federation.close()
        return round(min(after - before for before, after in pairwise(ends)), 5)


def curve(
    title: str, label: str, xs: Sequence[int], make: Callable[[int, int], fedadc.Federation], watch: Stopwatch
) -> Curve:
    """A point for each x and each engine."""
    points: dict[str, list[float]] = {name: [] for name in ENGINES}
    for x in xs:
        for name, workers in ENGINES.items():
            points[name].append(watch(make(x, workers)))
        shown = ", ".join(f"{name} {values[-1]:.4f} s" for name, values in points.items())
        print(f"{title}: {x:,}: {shown}", flush=True)
    return {"title": title, "label": label, "x": list(xs), "seconds": points}


def all_curves(watch: Stopwatch, trial: bool) -> list[Curve]:
    few = slice(0, 2) if trial else slice(None)
    vectors = dataset(*load_tensors("W2"))
    widths = [16, 50, 100, 200, 400, 800, 1600][few]
    parameters = [sum(p.numel() for p in mlp(784, w, w, CLASSES).parameters()) for w in widths]
    by_size = curve(
        "Parameters (cohort 20)",
        "parameters of the MLP",
        parameters,
        lambda n, workers: vector_federation(vectors, workers, 20, widths[parameters.index(n)]),
        watch,
    )
    by_cohort = curve(
        "Cohort (of 1,000 clients, 200-200 MLP)",
        "clients per round",
        [10, 30, 100, 300, 1000][few],
        lambda n, workers: vector_federation(vectors, workers, n),
        watch,
    )
    counts = [0, 1, 2, 3, 4][few]
    by_workers = {
        "title": "Workers (cohort 100, 200-200 MLP)",
        "label": "worker processes (0: in-process)",
        "x": counts,
        "seconds": {"any": [watch(vector_federation(vectors, n, 100)) for n in counts]},
    }
    by_clients = curve(
        "Clients (cohort 100, small model)",
        "clients of 10 samples of 16 features",
        [10**n for n in range(2, 7)][few],
        lambda n, workers: small_federation(small_clients(n), workers),
        watch,
    )
    return [by_clients, by_cohort, by_size, by_workers]


def draw(curves: list[Curve], about: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), dpi=100)
    for axis, one in zip(axes.flat, curves, strict=True):
        for name, values in one["seconds"].items():
            marker = {"in-process": "s", "2 workers": "o"}.get(name, "o")
            axis.plot(one["x"], values, marker=marker, color=COLORS.get(name, "#0072B2"), label=name)
        axis.set(title=one["title"], xlabel=one["label"], ylabel="seconds per round")
        axis.grid(alpha=0.3)
        if one is curves[0]:  # of clients: nearly flat, so from zero
            axis.set_xscale("log")
        elif "any" in one["seconds"]:
            axis.set_xticks(one["x"])
        else:
            axis.set(xscale="log", yscale="log")
        if axis.get_yscale() == "linear":
            axis.set_ylim(0, 1.3 * axis.get_ylim()[1])
        if len(one["seconds"]) > 1:
            axis.legend(frameon=False)
    figure.suptitle("FedADC: seconds per round, the quickest of several rounds at each point", fontsize=13)
    figure.text(0.5, 0.012, about, ha="center", fontsize=9, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only try the script: two points of each curve")
    parser.add_argument("--out", type=Path, help="folder for the results (else results/; with --quick the cache)")
    parser.add_argument("--patience", type=float, default=30, help="seconds to wait for a quiet machine each time")
    given = parser.parse_args()
    os.environ.pop("FEDADC_BENCH_QUICK", None)
    out = given.out or (cache_folder() / "quick" if given.quick else HERE / "results")
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, HERE / "workloads.py"], check=True)
    watch = Stopwatch(0.5, 0.0) if given.quick else Stopwatch(3.0, given.patience)
    facts, curves = machine(), all_curves(watch, given.quick)
    name = result_name(facts, "-curves")
    raw = {"machine": facts, "quick": given.quick, "cores_of_others": watch.busiest, "curves": curves}
    others = f"; others kept up to {watch.busiest:.1f} cores busy" if watch.busiest > QUIET else ""
    (out / f"{name}.json").write_text(json.dumps(raw, indent=1) + "\n")
    draw(curves, machine_line(facts) + others, out / f"{name}.png")
    print(f"written: {name}.json and .png")


if __name__ == "__main__":
    main()
