"""The command that tries many settings of one config: `sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedadc.cli.options import (
    DataDir,
    Engine,
    Jobs,
    Json,
    RayAddress,
    RaySettings,
    Trust,
    chosen_engine,
    parse_seeds,
)

Searches = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUES",
        help="Keys to sweep: local.lr=0.01,0.1 (values; a bracketed list is one value), local.lr=0.001..1,log or "
        "local.steps=1..16,int (ranges).",
    ),
]


def sweep(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="The file of a sweep, or a config.")],
    search: Searches = None,
    sampler: Annotated[
        str | None, typer.Option(metavar="NAME", help="grid (all combinations), random or tpe (default: as fits).")
    ] = None,
    pruner: Annotated[
        str | None, typer.Option(metavar="NAME", help="End bad trials early: none (the default), median or hyperband.")
    ] = None,
    trials: Annotated[int | None, typer.Option(metavar="N", help="Settings to try (default: 20; a grid: all).")] = None,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Trials to sample and prune together.")] = None,
    rungs: Annotated[
        str | None, typer.Option(metavar="ROUNDS", help="Rounds at which trials may be pruned, e.g. 10,20.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Number of seeds per setting, or the seeds, e.g. 0,1,2 (default: 0).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler (default: 0).")] = None,
    choose_by: Annotated[
        str | None, typer.Option(metavar="METRIC", help="Validation metric (default: validation_accuracy).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs (default: runs/FILE-sweep).")] = None,
    jobs: Jobs = None,
    data_dir: DataDir = None,
    engine: Engine = "local",
    ray_address: RayAddress = None,
    ray: RaySettings = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Try many settings of a config and choose the best by validation data. A sweep that was stopped goes on."""
    from fedadc.system.processes import import_torch, start_process_server

    start_process_server("typer", "fedadc.studies.run_process")
    import_torch()
    from fedadc.cli.sweep_output import sweep_summary
    from fedadc.cli.terminal import note, progress_of_queue
    from fedadc.studies.space import parse_searches
    from fedadc.studies.sweep import sweep as run_sweep

    searches = parse_searches(search or [])
    with progress_of_queue() as watch:
        result = run_sweep(
            source, searches, sampler=sampler, pruner=pruner, trials=trials, batch=batch, seed=seed,
            choose_by=choose_by, out=out, jobs=jobs, data_dir=data_dir, trust=trust, watch=watch, notes=note,
            seeds=parse_seeds(seeds), rungs=_whole_numbers("rungs", rungs),
            engine=chosen_engine(engine, ray_address, ray),
        )  # fmt: skip
    sweep_summary(result, json)


def _whole_numbers(name: str, text: str | None) -> list[int] | None:
    from fedadc.errors import FedadcError

    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise FedadcError(f"{name} must be whole numbers such as 1,2,3, not {text!r:.60}.") from None
