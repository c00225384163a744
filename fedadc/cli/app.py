"""The command line. Commands import what they need when they run, so that `--help` stays quick."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedadc.errors import FedadcError

app = typer.Typer(
    name="fedadc",
    help="Federated learning with FedADC: train, compare and inspect.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
data_app = typer.Typer(help="Get data sets, and look at who holds what.", no_args_is_help=True)
app.add_typer(data_app, name="data")

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where data sets lie (else FEDADC_DATA, else a cache folder).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Workers = Annotated[
    str, typer.Option(help="Processes that train clients: auto (a core each), a number, or 0 (this process).")
]
WorkersPerGpu = Annotated[int, typer.Option(min=1, help="What auto means on each GPU of --device cuda.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a run that stands in the way.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="Settings to change.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from fedadc.system.version import __version__

        typer.echo(__version__)
        raise typer.Exit


def _get_ready(workers: str) -> None:
    """Import torch, here and in the server of the workers at the same time."""
    from fedadc.system.processes import get_ready, import_torch

    if workers != "0":
        get_ready("fedadc.cli.app", "fedadc.engines.worker")
    import_torch()


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A YAML config; `fedadc init` writes one.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run directory (else runs/CONFIG-seedN).")] = None,
    preset: Annotated[
        list[str] | None, typer.Option(help="A method's settings of the paper (`fedadc list presets`), over CONFIG's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same as seed=N.")] = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    workers: Workers = "auto",
    workers_per_gpu: WorkersPerGpu = 1,
    overwrite: Overwrite = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out if there is one.")] = False,
) -> None:
    """Train by a config and leave a run directory."""
    _get_ready(workers)
    from fedadc.cli.terminal import progress_of_run, run_summary
    from fedadc.runs.record import load_config
    from fedadc.runs.runner import run as run_config

    changes = [*(overrides or []), *([f"seed={seed}"] if seed is not None else [])]
    chosen = load_config(config, changes, presets=preset or ())
    out = out or Path("runs") / "-".join([config.stem, *(preset or []), f"seed{chosen.seed}"])
    with progress_of_run(chosen.rounds, config.stem) as (watch, notes):
        result = run_config(
            chosen,
            out=out,
            overwrite=overwrite,
            resume=resume,
            data_dir=data_dir,
            device=device,
            workers=workers,
            workers_per_gpu=workers_per_gpu,
            watch=watch,
            notes=notes,
        )
    run_summary(result)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.SUB=VALUE]...", help="What may change, e.g. rounds=200.")
    ] = None,
    data_dir: DataDir = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps (else as before).")] = None,
    workers: Workers = "auto",
    workers_per_gpu: WorkersPerGpu = 1,
) -> None:
    """Go on with a run that was interrupted or killed, or prolong it; the result is that of a run in one go."""
    _get_ready(workers)
    from fedadc.cli.terminal import progress_of_run, run_summary
    from fedadc.errors import require
    from fedadc.runs.layout import CONFIG
    from fedadc.runs.record import load_config
    from fedadc.runs.runner import resume as resume_run

    require(run.is_dir(), f"there is no run directory {run}.")
    require((run / CONFIG).is_file(), f"{run} is not a run directory: it has no {CONFIG}.")
    rounds = load_config(run / CONFIG, overrides or ()).rounds
    with progress_of_run(rounds, run.resolve().name) as (watch, notes):
        result = resume_run(
            run,
            overrides or (),
            data_dir=data_dir,
            device=device,
            workers=workers,
            workers_per_gpu=workers_per_gpu,
            watch=watch,
            notes=notes,
        )
    run_summary(result)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="The folder of the demo's runs.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many seeds per method.")] = 3,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """FedAvg, SlowMo, FedADC and FedADC+ on digits within a minute: a table and a plot."""
    from fedadc.system.processes import import_torch

    import_torch()
    from fedadc.analysis.compare import as_json, summarise
    from fedadc.analysis.demo import METHODS, TARGET, TITLE, configs, run_demo
    from fedadc.analysis.plots import plot
    from fedadc.cli.terminal import comparison, progress_of_runs, say
    from fedadc.runs.record import read_run

    rounds = sum(config.rounds for _, config in configs(seeds))
    with progress_of_runs(rounds, len(METHODS) * seeds) as watch:
        runs = [read_run(path) for path in run_demo(out, seeds, overwrite, watch)]
    rows = summarise(runs, TARGET)
    picture = out / "convergence.png"
    plot(runs, picture, title=TITLE)
    if json:
        typer.echo(as_json(rows))
        return
    comparison(rows, TITLE)
    say(f"runs:  {out}\nplot:  {picture}")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of run directories.")],
    target: Annotated[
        float | None, typer.Option(help="The value whose first round is told (else 90 % of the best).")
    ] = None,
    metric: Annotated[str, typer.Option(help="What is compared and plotted.")] = "test_accuracy",
    x: Annotated[
        str,
        typer.Option(
            "--x", help="Against what: round, bytes, bytes_up, bytes_down, virtual_seconds, seconds, samples."
        ),
    ] = "round",
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Where the plot goes (else no plot).")] = None,
    json: Json = False,
) -> None:
    """Compare runs: mean ± std over seeds, rounds to a target, bytes, and a plot."""
    from fedadc.analysis.compare import as_json, summarise
    from fedadc.analysis.plots import plot
    from fedadc.cli.terminal import comparison, find_runs, note, say
    from fedadc.runs.record import read_run

    read = [read_run(path) for path in find_runs(runs)]
    for run in read:
        if run.records[-1]["round"] < run.tree.get("rounds", 0) and not run.stopped():
            note(f"{run.path} ended after {run.records[-1]['round']} of {run.tree['rounds']} rounds")
    rows = summarise(read, target, metric, x)
    if plot_file is not None:
        plot(read, plot_file, metric, x=x)
    if json:
        typer.echo(as_json(rows))
        return
    comparison(rows, metric)
    if plot_file is not None:
        say(f"plot:  {plot_file}")


@app.command()
def experiment(
    file: Annotated[Path, typer.Argument(help="An experiment file; the experiments folder has some.")],
    out: Annotated[Path | None, typer.Option(help="The folder of its runs (else runs/FILE).")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at once (else as many as there are cores).")] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Train several methods, each with its grid of settings, and compare them at their best. Finished runs are kept."""
    from fedadc.system.processes import import_torch

    import_torch()
    from fedadc.analysis.compare import as_json, summarise
    from fedadc.analysis.experiment import check_rows, choose, read_experiment, run_trials, unfinished, write_choices
    from fedadc.analysis.plots import plot
    from fedadc.cli.terminal import choices_table, comparison, note, progress_of_trials, say
    from fedadc.system.files import locked

    plan, trials = read_experiment(file)
    check_rows(trials, data_dir)
    out = out or Path("runs") / file.stem
    with locked(out):
        todo = unfinished(trials, out)
        if len(todo) < len(trials):
            kept = f"{len(trials) - len(todo)} of {len(trials)} runs in {out} were finished before and are kept"
            note(f"{kept}; if your data or code has changed since, choose another --out")
        with progress_of_trials(len(todo)) as watch:
            try:
                diverged = run_trials(todo, out, jobs or os.cpu_count() or 1, data_dir, watch)
            except KeyboardInterrupt:
                note("the same command goes on from here: what is finished is kept")
                raise
        choices = choose(plan, trials, out, diverged)
        write_choices(choices, plan.choose_by, out / "choices.json")
        runs = [run for choice in choices for run in choice.runs]
        rows, picture = summarise(runs, plan.target, plan.metric, plan.x), out / "convergence.png"
        if json:
            typer.echo(as_json(rows))
        else:
            comparison(rows, plan.title)
            choices_table(choices, plan.choose_by)
        plot(runs, picture, plan.metric, plan.title, plan.x)
    if not json:
        say(f"runs:  {out}\nplot:  {picture}\nall settings:  {out / 'choices.json'}")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    data: Annotated[Path | None, typer.Option(help="Other samples: .npz, .csv or a folder of images.")] = None,
    metrics: Annotated[str, typer.Option(help="Further ones, e.g. top5,macro_f1,per_class.")] = "",
    data_dir: DataDir = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Evaluate the saved model of a run on its own test data, or on other data."""
    from fedadc.system.processes import import_torch

    import_torch()
    from fedadc.cli.terminal import metrics_table
    from fedadc.runs.evaluate import evaluate_run

    found = evaluate_run(run, data, [m.strip() for m in metrics.split(",") if m.strip()], data_dir, device)
    metrics_table(found, json)


@app.command()
def personalize(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    clients: Annotated[str | None, typer.Option(help="Which, e.g. 0-9,12 (else all).")] = None,
    regularizer: Annotated[list[str] | None, typer.Option(help="none, prox or confidence; may be repeated.")] = None,
    layers: Annotated[str, typer.Option(help="What is tuned: head (the classifier) or all.")] = "head",
    model: Annotated[str | None, typer.Option(help="NAME of a model-NAME.safetensors (else the judged one).")] = None,
    data: Annotated[
        Path | None, typer.Option(help="What the clients hold now: .npz, .csv, or .yaml with a `data` node.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over a client's own data.")] = 2,
    lr: Annotated[float | None, typer.Option(help="Learning rate (else the run's local.lr).")] = None,
    mu: Annotated[float | None, typer.Option(help="Of prox (else 0.01).")] = None,
    lam: Annotated[float | None, typer.Option(help="Of confidence (else 0.35).")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the results (else RUN/personal).")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="A picture of all runs together.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results that stand in the way.")] = False,
    data_dir: DataDir = None,
    device: Device = "cpu",
    json: Json = False,
) -> None:
    """Give every client of a run its own model, tuned on its own data, and measure it on its own test share."""
    from fedadc.system.processes import import_torch

    import_torch()
    from fedadc.cli.terminal import personal_table, progress_of_clients, say
    from fedadc.personal.personalize import personalize as personalize_runs
    from fedadc.personal.picture import plot_gains
    from fedadc.personal.results import as_json

    with progress_of_clients() as watch:
        result = personalize_runs(
            runs,
            clients=clients,
            regularizers=regularizer or ["none"],
            layers=layers,
            model=model,
            data=data,
            epochs=epochs,
            lr=lr,
            mu=mu,
            lam=lam,
            out=out,
            overwrite=overwrite,
            data_dir=data_dir,
            device=device,
            watch=watch,
        )
    if plot_file is not None:
        plot_gains(result.rows, plot_file)
    if json:
        typer.echo(as_json(result.rows))
        return
    personal_table(result.rows)
    for folder in [*result.folders, *([plot_file] if plot_file is not None else [])]:
        say(f"written: {folder}")


@app.command("list")
def list_table(
    what: Annotated[
        str,
        typer.Argument(
            help="methods, objectives, presets, datasets, models, partitions, schedules, selections, downlinks, "
            "uplinks or distributions."
        ),
    ],
    json: Json = False,
) -> None:
    """Show what can be named in a config, with settings and defaults."""
    from fedadc.cli.catalogue import entries
    from fedadc.cli.terminal import catalogue_table

    catalogue_table(what, entries(what), json)


@app.command()
def init(path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("fedadc.yaml")) -> None:
    """Write a commented starter config."""
    from fedadc.config.starter import STARTER
    from fedadc.errors import require

    require(not path.exists(), f"{path} exists already; choose another name.")
    try:
        path.write_text(STARTER, encoding="utf-8")
    except OSError as error:
        raise FedadcError(f"cannot write {path} ({error.strerror or error}).") from error
    typer.echo(f"wrote {path}; train with: fedadc run {path}")


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="mnist, fashion_mnist, cifar10 or cifar100.")],
    data_dir: DataDir = None,
    origin: Annotated[str | None, typer.Option("--from", help="Another address, a folder or an archive.")] = None,
) -> None:
    """Download a data set, check it and unpack it."""
    from fedadc.cli.terminal import progress_of_download, say
    from fedadc.data.loaders.download import get

    with progress_of_download() as progress:
        place = get(name, data_dir, origin, progress)
    say(f"{name} is in {place}")


@data_app.command("show")
def data_show(
    config: Annotated[Path, typer.Argument(help="A YAML config.")],
    overrides: Overrides = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Where the picture goes as PNG.")] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Draw who holds what: clients × classes."""
    from fedadc.analysis.label_counts import holdings, plot_holdings
    from fedadc.cli.terminal import holdings_picture, say
    from fedadc.runs.record import load_config

    found = holdings(load_config(config, overrides or []), data_dir)
    if plot_file is not None:
        plot_holdings(found, plot_file)
    holdings_picture(found, json)
    if plot_file is not None and not json:
        say(f"plot:  {plot_file}")


def main() -> None:
    """The entry point: a user's mistake is one sentence and exit code 2, an interruption exit code 130."""
    logging.getLogger("fedadc").handlers[:] = [_Warnings(logging.WARNING)]
    from fedadc.system.signals import asked_by, ignoring_signals, stopping_on_signals

    try:
        with stopping_on_signals():
            code = typer.main.get_command(app).main(prog_name="fedadc", standalone_mode=False)
    except BrokenPipeError:  # `| head` has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (FedadcError, OSError) as error:
        where = getattr(error, "__notes__", [])[:1]  # in which round, by which client
        print(f"error: {error}" + "".join(f" ({note})" for note in where), file=sys.stderr)
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if isinstance(error, MemoryError) or "not enough memory" in str(error):  # torch's way to say so
            print("error: memory is not enough for this; choose a smaller model or less data.", file=sys.stderr)
            sys.exit(2)
        if not hasattr(error, "format_message"):  # a usage error of typer's has it
            raise
        message = " ".join(error.format_message().split()).rstrip(".")
        if message:  # without a command the help has been shown
            print(f"error: {message}; see `fedadc --help`.", file=sys.stderr)
        code = 2
    if code == 130:  # typer's code for any KeyboardInterrupt
        ignoring_signals()
        number = asked_by()
        code = 128 + number
        print(
            "interrupted." if number == signal.SIGINT else f"ended by {signal.Signals(number).name}.", file=sys.stderr
        )
    sys.exit(code or 0)


class _Warnings(logging.Handler):
    """Warnings as lines of their own, above a progress bar if there is one: it stands in for sys.stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            print(f"warning: {record.getMessage()}", file=sys.stderr)


if __name__ == "__main__":
    main()
