"""From raw figures to tables and targets: what run.py prints and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workloads import WORKLOADS, quick, workload

Results = dict[str, Any]  # name of a job: its repeats' figures, or how it failed
LIMIT, PLAIN, FEDAVG, FEDADC = "bare limit", "plain loop", "ours: FedAvg, 2 workers", "ours: FedADC, 2 workers"
PEERS = ("pfl-research", "pfl-research, 2 processes", "Flower", "fluke")
COLUMNS = ("system", "s/round, minimum", "spread", "ratio to the limit", "PSS, MB", "start-up, s", "cores of others")


@dataclass(frozen=True)
class Sheet:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Target:
    what: str
    limit: float
    value: float | None  # None: not measured
    unit: str = ""

    @property
    def bound(self) -> str:
        return f"{self.limit:g}{self.unit}"

    @property
    def measured(self) -> str:
        return "-" if self.value is None else f"{self.value:.3g}{self.unit}"

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "trial" if quick() else "pass" if self.value <= self.limit else "FAIL"


def _all(results: Results, job: str, figure: str) -> list[float]:
    """A figure of every repeat; nothing where the job failed or did not run."""
    repeats = results.get(job, [])
    return [] if isinstance(repeats, str) else [repeat[figure] for repeat in repeats]


def _best(results: Results, job: str, figure: str = "min") -> float | None:
    return min(_all(results, job, figure), default=None)


def _worst(results: Results, job: str, figure: str) -> float | None:
    return max(_all(results, job, figure), default=None)


def _ratio(value: float | None, to: float | None) -> float | None:
    return None if value is None or not to else value / to


def sheet_of(name: str, results: Results) -> Sheet:
    """One workload: a row for each system, in the order in which they ran."""
    limit, rows = _best(results, f"{name}/{LIMIT}"), []
    for job, repeats in results.items():
        workload_name, _, system = job.partition("/")
        if workload_name != name:
            continue
        if isinstance(repeats, str):
            rows.append((system, repeats, *["-"] * (len(COLUMNS) - 2)))
            continue
        minima = _all(results, job, "min")
        ratio = _ratio(min(minima), limit)
        rows.append(
            (
                system,
                f"{min(minima):.4g}",
                f"{max(minima) / min(minima):.2f}",
                "-" if ratio is None else f"{ratio:.2f}",
                f"{_worst(results, job, 'pss_mb'):.0f}",
                f"{_best(results, job, 'startup_s'):.1f}",
                f"{_worst(results, job, 'foreign_cores'):.2f}",
            )
        )
    return Sheet(workload(name).title, COLUMNS, rows)


def targets_of(results: Results) -> list[Target]:
    """What the project has promised itself. Times are minima over all repeats, memory is the maximum."""

    def best(name: str, system: str) -> float | None:
        return _best(results, f"{name}/{system}")

    def peer(name: str) -> float | None:
        return min((value for system in PEERS if (value := best(name, system)) is not None), default=None)

    ours = {name: best(name, FEDAVG) for name in WORKLOADS}
    memory = [_worst(results, f"W1/{system}", "pss_mb") for system in (FEDAVG, PLAIN)]
    beyond = [_worst(results, job, "beyond_data_mb") for job in ("many clients", "few clients")]
    more = None if None in beyond else max(0.0, beyond[0] - beyond[1])
    return [
        Target("W1: ours / limit", 0.90, _ratio(ours["W1"], best("W1", LIMIT))),
        Target("W1: FedADC / our FedAvg", 1.05, _ratio(best("W1", FEDADC), ours["W1"])),
        Target("W1: memory, ours / plain loop", 1.3, _ratio(*memory)),
        Target("W2: ours / limit", 1.15, _ratio(ours["W2"], best("W2", LIMIT))),
        Target("W2: ours / fastest peer", 0.75, _ratio(ours["W2"], peer("W2"))),
        Target("W2b: ours / limit", 1.0, _ratio(ours["W2b"], best("W2b", LIMIT))),
        Target("W2b: ours / fastest peer", 0.75, _ratio(ours["W2b"], peer("W2b"))),
        *(Target(f"{name}, 2 epochs: FedADC+ / FedADC", 1.25, _ratio(*_plus(results, name))) for name in ("W1", "W2")),
        Target("a million clients: start-up", 10, _worst(results, "many clients", "startup_s"), " s"),
        Target("a million clients / a thousand: s/round", 1.1, _ratio(*_clients(results))),
        Target("a million clients - a thousand: memory beyond the data", 100, more, " MB"),
        Target("fedadc --help", 0.5, _best(results, "help"), " s"),
        Target("from the command to the first round, digits", 4, _best(results, "first round"), " s"),
    ]


def _plus(results: Results, name: str) -> tuple[float | None, float | None]:
    return _best(results, f"plus {name}", "plus"), _best(results, f"plus {name}", "fedadc")


def _clients(results: Results) -> tuple[float | None, float | None]:
    return _best(results, "many clients"), _best(results, "few clients")


def _lines(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (columns, tuple("---" for _ in columns), *rows)]


def markdown(about: str, sheets: list[Sheet], targets: list[Target]) -> str:
    """The same tables for a file."""
    parts = ["# Seconds per round", "", about, ""]
    for sheet in sheets:
        parts += [f"## {sheet.title}", "", *_lines(sheet.columns, sheet.rows), ""]
    rows = [(target.what, target.bound, target.measured, target.verdict) for target in targets]
    return "\n".join([*parts, "## Targets", "", *_lines(("target", "at most", "measured", ""), rows), ""])
