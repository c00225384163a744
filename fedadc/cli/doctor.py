"""`fedadc doctor`: what a cluster offers, and what is wrong with it."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedadc.cli.options import Json, RayAddress, RaySettings, chosen_engine
from fedadc.cli.supervision import require_supervision

if TYPE_CHECKING:
    from fedadc.cluster.doctor import NodeReport


def doctor(
    what: Annotated[
        str, typer.Argument(metavar="ray", help="What to examine: a Ray cluster.", callback=require_supervision)
    ],
    ray_address: RayAddress = None,
    ray: RaySettings = None,
    json: Json = False,
) -> None:
    """Show what a Ray cluster offers, and whether torch, CPU type and fedadc agree on all of its nodes."""
    from fedadc.errors import WorkersLost, require
    from fedadc.system.processes import import_torch

    require(what == "ray", f"what to examine must be ray, not {what!r:.60}.")
    import_torch()
    from fedadc.cli.terminal import say
    from fedadc.cluster.doctor import examine

    cluster = chosen_engine("ray", ray_address, ray)
    assert cluster is not None
    reports = examine(cluster)
    if json:
        typer.echo(json_module.dumps([_as_json(report) for report in reports], indent=2))
    else:
        _show(reports)
    bad = [f"node {report.node}: {', '.join(report.problems)}" for report in reports if report.problems]
    require(not bad, "; ".join(bad) + ".", WorkersLost)
    workers = sum(report.workers for report in reports)
    require(workers > 0, "no node has room for a worker.", WorkersLost)
    if not json:
        nodes = f"{len(reports)} node{'s' if len(reports) > 1 else ''}"
        say(f"{nodes} with room for {workers} workers; results have the bits of this machine")


def _show(reports: Sequence[NodeReport]) -> None:
    from rich.table import Table

    from fedadc.cli.terminal import out
    from fedadc.system.node_facts import NodeFacts

    here = NodeFacts.here()
    caption = (
        "GB: object store; ms: one call; MB/s: from here to the node\n"
        f"here: fedadc {here.fedadc}, torch {here.torch}, {here.machine} with {here.cpu}, MKL_CBWR {here.mkl_cbwr}"
    )
    table = Table(title="Ray cluster", title_justify="left", caption=caption, caption_justify="left")
    for heading in ("node", "CPUs", "GPUs", "GB", "workers", "ms", "MB/s", "bits"):
        table.add_column(heading, justify="left" if heading in ("node", "bits") else "right")
    for report in reports:
        node = report.node
        call = f"{report.milliseconds:.1f}" if report.facts else "-"
        rate = f"{report.megabytes_per_second:.0f}" if report.megabytes_per_second else "-"
        store, bits = f"{node.memory / 1e9:.1f}", ", ".join(report.problems) or "as here"
        table.add_row(str(node), f"{node.cpus:g}", f"{node.gpus:g}", store, str(report.workers), call, rate, bits)
    out.print(table)


def _as_json(report: NodeReport) -> dict[str, Any]:
    return {**asdict(report), "same_bits": not report.problems}
