"""The commands that help to write a config: `list` and `init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedadc.cli.options import Json
from fedadc.errors import DiskError


def list_table(
    what: Annotated[
        str,
        typer.Argument(
            help="The table to show: methods, objectives, presets, datasets, models, partitions, schedules, "
            "selections, downlinks, uplinks or distributions."
        ),
    ],
    json: Json = False,
) -> None:
    """List the methods, models, data sets and other names for a config, with settings and defaults."""
    from fedadc.cli.catalog import entries
    from fedadc.cli.terminal import catalog_table

    catalog_table(what, entries(what), json)


def init(path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("fedadc.yaml")) -> None:
    """Write a commented starter config."""
    from fedadc.config.starter import STARTER
    from fedadc.errors import require

    require(not path.exists(), f"{path} already exists; choose another name.")
    try:
        path.write_text(STARTER, encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot write {path} ({error.strerror or error}).") from error
    typer.echo(f"wrote {path}; train with: fedadc run {path}")
