"""The commands that work on finished runs: `compare`, `evaluate` and `personalize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedadc.cli.options import DataDir, Device, Json, Trust

By = Annotated[
    str | None, typer.Option(metavar="client|class|target", help="Also show figures of every client, class or target.")
]
Positive = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The class that sensitivity, AUROC etc. are about (default: the last of two; with more, means over all).",
    ),
]
Intervals = Annotated[
    bool,
    typer.Option(
        "--intervals", metavar="", help="Also bootstrap intervals (95 %) over rows or, by client, over clients."
    ),
]


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of run directories.")],
    target: Annotated[
        float | None,
        typer.Option(help="Metric value to reach; the table shows how long it took (default: 90 % of the best)."),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Metric to compare and plot (default: test_accuracy; test_r2 for regressions).")
    ] = None,
    x: Annotated[
        str,
        typer.Option(
            "--x", help="Measure of progress: round, bytes, bytes_up, bytes_down, virtual_seconds, seconds or samples."
        ),
    ] = "round",
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Also save the curves as a plot (PNG).")] = None,
    json: Json = False,
) -> None:
    """Compare runs in a table: mean ± std over seeds, rounds to a target, bytes sent; optionally plot them."""
    from fedadc.analysis.comparison import compare as compare_runs
    from fedadc.cli.terminal import comparison, note, say

    result = compare_runs(runs, target=target, metric=metric, x=x, notes=note)
    if plot_file is not None:
        result.plot(plot_file)
    comparison(result, result.metric, json)
    if plot_file is not None and not json:
        say(f"plot:  {plot_file}")


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    data: Annotated[
        Path | None, typer.Option(help="Other samples to evaluate on: .npz, .csv or a folder of images.")
    ] = None,
    metrics: Annotated[
        str, typer.Option(help="Additional metrics, e.g. macro_f1,auroc,sensitivity,specificity,calibration_error.")
    ] = "",
    by: By = None,
    positive: Positive = None,
    intervals: Intervals = False,
    confusion: Annotated[Path | None, typer.Option(help="Also save the confusion matrix as a picture (PNG).")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also save the figures of clients, classes or targets as CSV.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace existing files.")] = False,
    data_dir: DataDir = None,
    device: Device = "cpu",
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Evaluate the saved model of a run on the run's test data, or on other data; by client, class or target."""
    from fedadc.errors import require
    from fedadc.system.processes import import_torch

    import_torch()
    from fedadc.analysis.confusion import plot_confusion
    from fedadc.cli.evaluation_output import evaluation_tables
    from fedadc.cli.terminal import note, say
    from fedadc.runs.evaluate import evaluate as evaluate_run
    from fedadc.system.files import require_new_file

    require(out is None or by is not None, "--out needs --by client, class or target, whose figures it saves.")
    for file, what in ((out, "out"), (confusion, "confusion")):
        if file is not None:
            require_new_file(file, what, overwrite)
    names = [m.strip() for m in metrics.split(",") if m.strip()]
    request: dict[str, Any] = {"metrics": names, "by": by, "positive": positive, "intervals": intervals}
    result = evaluate_run(run, data, **request, data_dir=data_dir, device=device, trust=trust, notes=note)
    if confusion is not None:
        plot_confusion(result.confusion, result.report().classes, confusion, f"{run.name}, {result.split}")
    if out is not None:
        result.by_table.write_csv(out, overwrite)
    evaluation_tables(result, json)
    for path in filter(None, [] if json else [confusion, out]):
        say(f"written: {path}")


def personalize(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    clients: Annotated[str | None, typer.Option(help="Clients to personalize, e.g. 0-9,12 (default: all).")] = None,
    regularizer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="none (the default), prox or confidence; may be repeated.")
    ] = None,
    layers: Annotated[str, typer.Option(help="Layers to tune: head (the classifier) or all.")] = "head",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Start from model-NAME.safetensors (default: model.safetensors).")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="The clients' new data: .npz, .csv, or .yaml with a `data` node.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over each client's data.")] = 2,
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: local.lr of the run).")] = None,
    mu: Annotated[float | None, typer.Option(help="Weight of the prox regularizer (default: 0.01).")] = None,
    lam: Annotated[float | None, typer.Option(help="Weight of the confidence regularizer (default: 0.35).")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results (default: RUN/personal).")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Also save one plot of all runs (PNG).")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace existing results.")] = False,
    data_dir: DataDir = None,
    device: Device = "cpu",
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Personalize runs: tune the model on each client's own data, and evaluate it on the client's own test share."""
    from fedadc.system.processes import import_torch

    import_torch()
    from fedadc.cli.terminal import note, personal_table, progress_of_clients, say
    from fedadc.personal.personalize import personalize as personalize_runs
    from fedadc.personal.plots import plot_gains
    from fedadc.personal.results import as_json

    request: dict[str, Any] = {
        "clients": clients, "regularizers": regularizer or ["none"], "layers": layers, "model": model,
        "data": data, "epochs": epochs, "lr": lr, "mu": mu, "lam": lam,
        "out": out, "overwrite": overwrite, "data_dir": data_dir, "device": device, "trust": trust,
    }  # fmt: skip
    with progress_of_clients() as watch:
        result = personalize_runs(runs, watch=watch, notes=note, **request)
    if plot_file is not None:
        plot_gains(result.rows, plot_file)
    if json:
        typer.echo(as_json(result.rows))
        return
    personal_table(result.rows)
    for path in [*result.folders, *([plot_file] if plot_file is not None else [])]:
        say(f"written: {path}")
