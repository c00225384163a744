"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
