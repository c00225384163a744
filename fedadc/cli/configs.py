"""The commands that help to write a config: `list` and `init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedadc.cli.options import Json


def list_table(
    what: Annotated[
        str,
        typer.Argument(
            help="The table to show: methods, objectives, presets, datasets, models, partitions, schedules, "
            "optimizers, selections, downlinks, uplinks or distributions."
        ),
    ],
    json: Json = False,
) -> None:
    """List the methods, models, data sets and other names for a config, with settings and defaults."""
    from fedadc.cli.terminal import catalog_table
    from fedadc.config.catalog import catalog

    catalog_table(what, catalog(what), json)


def init(path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("fedadc.yaml")) -> None:
    """Write a commented starter config."""
    from fedadc.config.starter import init as write_starter

    write_starter(path)
    typer.echo(f"wrote {path}; train with: fedadc run {path}")
