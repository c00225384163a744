"""Commands for data sets: get, show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedadc.cli.options import DataDir, Json, Overrides


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


def data_show(
    config: Annotated[Path, typer.Argument(help="A YAML config.")],
    overrides: Overrides = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Where the picture goes as PNG.")] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Draw who holds what: clients × classes."""
    from fedadc.analysis.label_counts import label_counts, plot_label_counts
    from fedadc.cli.terminal import label_counts_table, say
    from fedadc.runs.record import load_config

    found = label_counts(load_config(config, overrides or []), data_dir)
    if plot_file is not None:
        plot_label_counts(found, plot_file)
    label_counts_table(found, json)
    if plot_file is not None and not json:
        say(f"plot:  {plot_file}")
