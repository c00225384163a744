"""The commands that train: `run`, `resume`, `demo` and `experiment`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedadc.cli.options import (
    DataDir,
    Device,
    Engine,
    Json,
    Overrides,
    Overwrite,
    RayAddress,
    RaySettings,
    Trust,
    Workers,
    WorkersPerGpu,
    chosen_engine,
)
from fedadc.cli.supervision import announce_run


def run(
    config: Annotated[Path, typer.Argument(help="A YAML config; `fedadc init` writes one.")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run directory to write (default: runs/CONFIG-seedN).")] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Override CONFIG with the paper's settings of a method (see `fedadc list presets`); may be repeated.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed; the same as seed=N.")] = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    workers: Workers = "auto",
    workers_per_gpu: WorkersPerGpu = 1,
    engine: Engine = "local",
    ray_address: RayAddress = None,
    ray: RaySettings = None,
    overwrite: Overwrite = False,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Resume the run in --out if there is one.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Train from a config and write a run directory."""
    _preload(workers if engine == "local" else "0")
    from fedadc.cli.terminal import note, progress_of_run, run_summary
    from fedadc.errors import require
    from fedadc.runs.record import load_config
    from fedadc.runs.runner import run as run_config

    cluster = chosen_engine(engine, ray_address, ray, workers, workers_per_gpu)
    seeds = [change for change in overrides or () if change.partition("=")[0].strip() == "seed"]
    require(seed is None or not seeds, "use --seed or seed=N, not both.")
    changes = [*(overrides or []), *([f"seed={seed}"] if seed is not None else [])]
    chosen = load_config(config, changes, presets=preset or (), trust=trust, notes=note)
    out = out or Path("runs") / "-".join([config.stem, *(preset or []), f"seed{chosen.seed}"])
    announce_run(out)
    with progress_of_run(chosen.rounds, config.stem) as (watch, notes):
        result = run_config(
            chosen, out=out, overwrite=overwrite, resume=resume, trust=trust, data_dir=data_dir, device=device,
            workers=0 if cluster else workers, workers_per_gpu=workers_per_gpu, engine=cluster, watch=watch,
            notes=notes,
        )  # fmt: skip
    run_summary(result)


def resume(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Settings that may change, e.g. rounds=200.")
    ] = None,
    data_dir: DataDir = None,
    device: Annotated[
        str | None, typer.Option(help="Device to compute on: auto, cpu, cuda, cuda:N or mps (default: as before).")
    ] = None,
    workers: Workers = "auto",
    workers_per_gpu: WorkersPerGpu = 1,
    engine: Engine = "local",
    ray_address: RayAddress = None,
    ray: RaySettings = None,
    trust: Trust = False,
) -> None:
    """Resume an interrupted run, or extend a finished one. The result is bit-identical to an uninterrupted run."""
    _preload(workers if engine == "local" else "0")
    from fedadc.cli.terminal import note, progress_of_run, run_summary
    from fedadc.runs.record import load_config, recorded_config
    from fedadc.runs.runner import resume_config

    cluster = chosen_engine(engine, ray_address, ray, workers, workers_per_gpu)
    original = recorded_config(run, trust, note)
    config = load_config(original, overrides or ())
    announce_run(run)
    with progress_of_run(config.rounds, run.resolve().name) as (watch, notes):
        count = 0 if cluster else workers
        result = resume_config(config, original, run, data_dir, device, count, workers_per_gpu, cluster, watch, notes)
    run_summary(result)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, max=100, metavar="N", help="Number of seeds per method.")] = 3,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Train FedAvg, SlowMo, FedADC heavy-ball, FedADC Nesterov and FedADC+ on digits; print a table and save a plot.

    It takes about a minute.
    """
    from fedadc.system.processes import import_torch

    import_torch()
    from fedadc.analysis.plots import PLOT
    from fedadc.cli.terminal import comparison, progress_of_runs, say
    from fedadc.studies.demo import DEMO_METHODS, TITLE, configs
    from fedadc.studies.demo import demo as run_demo

    rounds = sum(config.rounds for _, config in configs(seeds))
    with progress_of_runs(rounds, len(DEMO_METHODS) * seeds) as watch:
        result = run_demo(out, seeds=seeds, overwrite=overwrite, watch=watch)
    comparison(result, TITLE, json)
    if not json:
        say(f"runs:  {out}\nplot:  {out / PLOT}")


def experiment(
    file: Annotated[Path, typer.Argument(help="An experiment file; for examples see the folder experiments.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the runs (default: runs/FILE).")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs to train in parallel (default: one per core).")
    ] = None,
    data_dir: DataDir = None,
    engine: Engine = "local",
    ray_address: RayAddress = None,
    ray: RaySettings = None,
    json: Json = False,
) -> None:
    """Train several methods, each with a grid of settings, and compare them at their best. Finished runs are kept."""
    _preload("auto", "fedadc.studies.run_process")
    from fedadc.analysis.plots import PLOT
    from fedadc.cli.terminal import choices_table, comparison, note, progress_of_queue, say
    from fedadc.studies.experiment import CHOICES
    from fedadc.studies.experiment import experiment as run_experiment

    cluster = chosen_engine(engine, ray_address, ray)
    with progress_of_queue() as watch:
        result = run_experiment(file, out=out, jobs=jobs, data_dir=data_dir, engine=cluster, watch=watch, notes=note)
    if result.comparison is None:
        note("every setting diverged, so there is nothing to compare")
        typer.echo("[]") if json else choices_table(result.choices, result.choose_by)
        return
    comparison(result.comparison, result.comparison.title or "", json)
    if not json:
        choices_table(result.choices, result.choose_by)
        say(f"runs:  {result.out}\nplot:  {result.out / PLOT}\nall settings:  {result.out / CHOICES}")


def _preload(workers: str, module: str = "fedadc.engines.worker") -> None:
    """Import torch; at the same time, let the process server import it for the workers."""
    from fedadc.system.processes import import_torch, start_process_server

    if workers != "0":
        start_process_server("typer", module)
    import_torch()
