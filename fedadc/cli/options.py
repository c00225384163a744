"""Options and arguments that several commands share.

An empty metavar keeps typer from showing `<bool>` beside a flag that takes no value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder of the data sets (default: FEDADC_DATA, or a cache folder).")
]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON instead of a table.")]
Device = Annotated[str, typer.Option(help="Device to compute on: auto, cpu, cuda, cuda:N or mps.")]
Workers = Annotated[
    str,
    typer.Option(help="Processes that train clients: auto (one per core), a number, or 0 (train in this process)."),
]
WorkersPerGpu = Annotated[
    int, typer.Option(min=1, metavar="N", help="Workers per GPU with --workers auto and --device cuda.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace existing runs.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Config settings to override, e.g. local.lr=0.05.")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", metavar="", help="Load the user code that a run directory names although it is not sealed."
    ),
]
