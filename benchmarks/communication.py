"""What travels by method and downlink, and when overlap hides the momentum: `python benchmarks/communication.py`.

Prints the ledger of every method under every downlink, in vectors per client and round; then the seconds of a round by
bandwidth, simulated and by the formulas of docs/communication.md, and draws them (--plot FILE).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import fedadc
from fedadc.analysis.plots import COLORS, save_png
from fedadc.communication.clock import Devices
from fedadc.communication.downlinks import DOWNLINKS, Downlink, Overlap, Pull
from fedadc.communication.network import Network
from fedadc.methods import METHODS, PAIRS
from fedadc.models import MLP
from fedadc.objectives import OBJECTIVES

CLIENTS, COHORT, ROUNDS = 40, 4, 30
VECTOR, STEPS, STEP_SECONDS, UP, LATENCY = 10e6, 8, 0.5, 1e6, 0.05  # a model of 10 MB, links of 1 MB/s up


def famous() -> dict[str, fedadc.methods.Method]:
    pairs = {name: METHODS[m](objective=OBJECTIVES[o]()) for name, (m, o) in PAIRS.items()}
    return {**{name: cls() for name, cls in METHODS.items()}, **pairs}


def vectors(method: fedadc.methods.Method, downlink: Downlink) -> tuple[float, float, float] | str:
    """Up, down and of that ahead, per client of a cohort and round, in sizes of what is sent of theta; or why not."""
    rng = np.random.default_rng(0)
    samples = [(torch.from_numpy(rng.normal(size=(4, 5))).float(), torch.arange(4) % 2) for _ in range(CLIENTS)]
    torch.manual_seed(0)
    try:
        federation = fedadc.Federation(
            test=0,
            model=MLP((5,), 2, [6], projection=3),
            data=fedadc.from_clients(samples),
            method=method,
            local=fedadc.LocalWork(steps=2, batch_size=4, lr=0.01),
            cohort=COHORT,
            communication=fedadc.communication.Communication(downlink=downlink),
        )
    except fedadc.FedadcError as error:
        return str(error)
    rounds = list(federation.rounds(ROUNDS))[1:]  # the first has no past
    one = COHORT * federation.coordinator.network.full.get("theta", 1)
    ahead = mean(sum(r.ledger.ahead.values()) for r in rounds)
    return mean(r.bytes_up for r in rounds) / one, mean(r.bytes_down for r in rounds) / one, ahead / one


def ledger() -> Table:
    title = f"vectors per client of a cohort and round ({COHORT} of {CLIENTS} clients, rounds 2 to {ROUNDS})"
    table = Table(title=title, title_justify="left")
    for heading in ("method", "up", *DOWNLINKS):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for name, method in famous().items():
        cells = []
        for make in DOWNLINKS.values():
            found = vectors(method, make())
            if isinstance(found, str):
                cells.append("refused")
                continue
            _, down, ahead = found
            cells.append(f"{down:.2f}" + (f" ({ahead:.2f} ahead)" if ahead else ""))
        table.add_row(name, f"{vectors(method, Pull())[0]:.2f}", *cells)
    return table


def simulated(downlink: Downlink, down: float, server: bool) -> float:
    """Mean seconds of a round of clients that are all alike, two halves of them in turns."""
    halves = np.split(np.arange(4), 2)
    devices = Devices(*(np.full(4, value) for value in (STEP_SECONDS, down, UP, LATENCY)))
    full = {"theta": int(VECTOR), **({"m": int(VECTOR)} if server else {})}
    mean = {"delta": torch.zeros(int(VECTOR) // 4)}  # float32
    network, ends = Network(downlink, devices, 4, 0, full, slice(None), lambda t: halves[t % 2]), []
    links = network.start()
    for t in range(1, 103):
        cohort = halves[t % 2]
        sent = {int(k): {"delta": int(VECTOR)} for k in cohort}
        _, links = network.carry(t, cohort, dict.fromkeys(cohort.tolist(), STEPS), sent, mean, links)
        ends.append(float(links["now"]))
    return (ends[-1] - ends[1]) / (len(ends) - 2)


def derived(down: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Of docs/communication.md: seconds of FedAvg, of pull and of overlap, and the threshold."""
    work = STEPS * STEP_SECONDS + LATENCY + VECTOR / UP
    plain, ahead = LATENCY + VECTOR / down + work, LATENCY + 2 * VECTOR / down
    return plain, ahead + work, np.maximum(plain, (ahead + plain) / 2), VECTOR / work


def threshold_table(rates: np.ndarray) -> Table:
    plain, pull, overlap, threshold = derived(rates)
    title = f"seconds of a round, simulated / derived; the threshold is {threshold / 1e6:.3f} MB/s"
    table = Table(title=title, title_justify="left")
    for heading in ("down, MB/s", "FedAvg", "FedADC, pull", "FedADC, overlap"):
        table.add_column(heading, justify="right")
    for rate, *expected in zip(rates, plain, pull, overlap, strict=True):
        found = simulated(Pull(), rate, False), simulated(Pull(), rate, True), simulated(Overlap(), rate, True)
        pairs = [f"{s:.2f} / {e:.2f}" for s, e in zip(found, expected, strict=True)]
        table.add_row(f"{rate / 1e6:.3f}", *pairs)
    return table


def draw(file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    rates, few = np.geomspace(1e5, 1e7, 200), np.geomspace(1e5, 1e7, 15)
    *lines, threshold = derived(rates)
    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    schemes = [("FedAvg", Pull(), False), ("FedADC, pull", Pull(), True), ("FedADC, overlap", Overlap(), True)]
    for color, line, (label, downlink, server) in zip((COLORS[0], COLORS[2], COLORS[4]), lines, schemes, strict=True):
        axes.plot(rates / 1e6, line, color=color, lw=1.8, label=f"{label}, derived")
        points = [simulated(downlink, rate, server) for rate in few]
        axes.plot(few / 1e6, points, "o", color=color, ms=5, label=f"{label}, simulated")
    axes.axvline(threshold / 1e6, color="#9ca3af", ls=":", lw=1.5)
    axes.text(threshold / 1e6 * 1.06, axes.get_ylim()[1] * 0.55, f"b* = {threshold / 1e6:.2f} MB/s", color="#4b5563")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, ticks in ((axes.xaxis, (0.1, 0.2, 0.5, 1, 2, 5, 10)), (axes.yaxis, (15, 20, 30, 50, 100, 200))):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("downlink of a client (MB/s)")
    axes.set_ylabel("seconds of a round")
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save_png(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    file = parser.parse_args().plot
    console = Console()
    console.print(ledger())
    console.print(threshold_table(derived(np.ones(1))[3] * np.array([0.1, 0.5, 0.9, 1.0, 1.1, 2.0, 10.0])))
    if file is not None:
        draw(file)


if __name__ == "__main__":
    main()
