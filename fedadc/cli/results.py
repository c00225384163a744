"""The commands that work on finished runs: `compare`, `evaluate` and `personalize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedadc.cli.options import DataDir, Device, Json, Trust


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of run directories.")],
    target: Annotated[
        float | None,
        typer.Option(help="Metric value to reach; the table shows how long it took (default: 90 % of the best)."),
    ] = None,
    metric: Annotated[str, typer.Option(help="Metric to compare and plot.")] = "test_accuracy",
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
    comparison(result, metric, json)
    if plot_file is not None and not json:
        say(f"plot:  {plot_file}")


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    data: Annotated[
        Path | None, typer.Option(help="Other samples to evaluate on: .npz, .csv or a folder of images.")
    ] = None,
    metrics: Annotated[str, typer.Option(help="Additional metrics, e.g. top5,macro_f1,per_class.")] = "",
    data_dir: DataDir = None,
    device: Device = "cpu",
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Evaluate the saved model of a run on the run's test data, or on other data."""
    from fedadc.system.processes import import_torch

    import_torch()
    from fedadc.cli.terminal import metrics_table, note
    from fedadc.runs.evaluate import evaluate as evaluate_run

    names = [m.strip() for m in metrics.split(",") if m.strip()]
    values = evaluate_run(run, data, metrics=names, data_dir=data_dir, device=device, trust=trust, notes=note)
    metrics_table(values, json)


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
