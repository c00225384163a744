"""The command `reproduce`, and how its results are printed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedadc.cli.options import (
    DataDir,
    Device,
    Engine,
    Json,
    RayAddress,
    RaySettings,
    chosen_engine,
    parse_seeds,
)

if TYPE_CHECKING:
    from fedadc.studies.plan import ReproductionPlan
    from fedadc.studies.reproduction import PlannedCost, Reproduction


Name = Annotated[
    str | None, typer.Argument(help="A figure or table of the paper, e.g. fig1-s2; without it, all are listed.")
]
ScaleName = Annotated[
    str, typer.Option(metavar="NAME", help="paper (as published), laptop (smaller) or digits (a minute or two).")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", metavar="", help="List the runs and estimate their cost; train nothing.")
]
Only = Annotated[list[str] | None, typer.Option(metavar="METHOD", help="Train this method only; may be repeated.")]
Budget = Annotated[float | None, typer.Option(metavar="HOURS", help="Train what fits, the most important runs first.")]


def reproduce(
    name: Name = None,
    scale: ScaleName = "digits",
    dry_run: DryRun = False,
    seeds: Annotated[
        str | None, typer.Option(help="Number of seeds, or the seeds, e.g. 0,1,2 (default: as the scale says).")
    ] = None,
    only: Only = None,
    budget: Budget = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the runs (default: runs/reproduce/SCALE).")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs to train in parallel (default: one per core).")
    ] = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    engine: Engine = "local",
    ray_address: RayAddress = None,
    ray: RaySettings = None,
    json: Json = False,
) -> None:
    """Train what a figure or table of the paper compares; show our figures beside the paper's, and judge its claims."""
    from fedadc.system.processes import import_torch, start_process_server

    start_process_server("typer", "fedadc.studies.run_process")
    import_torch()
    from fedadc.cli.terminal import note, progress_of_calibration, progress_of_queue
    from fedadc.studies import reproduce as studies
    from fedadc.studies.queue import require_none_failed

    if name is None:
        _print_designs(json)
        return
    chosen = parse_seeds(seeds)
    if dry_run:
        with progress_of_calibration() as watch:
            plan, costs = studies.dry_run(
                name, scale=scale, seeds=chosen, only=only or (), budget=budget, out=out, jobs=jobs, data_dir=data_dir,
                watch=watch,
            )  # fmt: skip
        _print_costs(plan, costs, jobs, budget, json)
        return
    cluster = chosen_engine(engine, ray_address, ray)
    with progress_of_queue() as progress:
        result = studies.reproduce(
            name, scale=scale, seeds=chosen, only=only or (), budget=budget, out=out, jobs=jobs, data_dir=data_dir,
            device=device, engine=cluster, watch=progress, notes=note,
        )  # fmt: skip
    _print_result(result, json)
    require_none_failed(result.failed)


def _print_designs(json: bool) -> None:
    import json as encoder

    from fedadc.cli.terminal import print_table, say
    from fedadc.studies.paper.designs import DESIGNS
    from fedadc.studies.paper.scales import SCALES

    if json:
        typer.echo(encoder.dumps({design.name: design.title for design in DESIGNS.values()}, indent=2))
        return
    rows = [[design.name, design.title] for design in DESIGNS.values()]
    print_table("figures and tables of the paper", ["name", "what it is"], rows)
    for scale in SCALES.values():
        say(f"--scale {scale.name}: {scale.summary}")


def _print_plan(plan: ReproductionPlan) -> None:
    from fedadc.cli.terminal import say

    say(f"{plan.design.title}\nscale {plan.scale.name}: {plan.scale.summary}")
    for change in plan.changes():
        say(f"  {change}")


def _print_costs(
    plan: ReproductionPlan, costs: Sequence[PlannedCost], jobs: int | None, budget: float | None, json: bool
) -> None:
    import json as encoder
    from dataclasses import asdict

    from fedadc.analysis.compare import human_bytes
    from fedadc.cli.terminal import duration, print_table, say
    from fedadc.system.processes import cores

    if json:
        typer.echo(encoder.dumps([asdict(cost) for cost in costs], indent=2))
        return
    _print_plan(plan)
    if not costs:
        say("all runs are finished")
        return
    total = sum(cost.runs * cost.each.seconds for cost in costs)
    headings = ["panel", "method", "runs", "FLOPs", "bytes", "memory", "time"]
    cells = [
        [
            cost.panel, f"{cost.label}, tuning" if cost.tuning else cost.label,
            str(cost.runs) if budget is None else f"{cost.fit} of {cost.runs}",
            f"{cost.runs * cost.each.flops:.1e}", human_bytes(cost.runs * (cost.each.bytes_up + cost.each.bytes_down)),
            human_bytes(cost.each.memory), duration(cost.runs * cost.each.seconds),
        ]
        for cost in costs
    ]  # fmt: skip
    print_table("", headings, cells, "FLOPs, bytes, time: of all runs of the row; memory: of one run")
    runs = sum(cost.runs for cost in costs)
    at_once = min(jobs or cores(), runs)
    say(f"{runs} runs, {duration(total)} of one core, about {duration(total / at_once)} with {at_once} at once")
    if budget is not None:
        say(f"{sum(cost.fit for cost in costs)} of them are expected to fit in the budget of {budget:g} hours")


def _print_result(result: Reproduction, json: bool) -> None:
    from fedadc.cli.terminal import duration, note, print_table, say
    from fedadc.studies.reproduction import RULE

    if json:
        typer.echo(result.file("json").read_text(encoding="utf-8"), nl=False)
        return
    caption = "accuracy: mean of the last 10 rounds, then mean ± std over seeds"
    if result.plan.design.regularizers:
        caption += "; gain: points over the global model"
    for title, (headings, cells) in result.tables():
        print_table(title, headings, cells, caption)
    for sentence in result.edges():
        note(sentence)
    headings, cells = result.claims_table()
    print_table("claims of the paper", headings, cells, f"ours: mean over seeds [interval], in points or %. {RULE}")
    if result.plan.scale.name != "paper":
        say(f"Verdicts are about scale {result.plan.scale.name}, which is not the paper's setting.")
    if result.seconds:
        took = f"estimated {duration(result.estimated_seconds)} of a free core, took {duration(result.seconds)}"
        say(f"all runs trained now: {took}")
    say(f"runs:   {result.out}")
    if result.file("png").is_file():
        say(f"plot:   {result.file('png')}")
    say(f"tables: {result.file('md')}, {result.file('json').name}")
