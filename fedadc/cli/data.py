"""The commands `data get` and `data show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedadc.cli.options import DataDir, Json, Overrides, Trust


def data_get(
    name: Annotated[str, typer.Argument(help="The data set: mnist, fashion_mnist, cifar10 or cifar100.")],
    data_dir: DataDir = None,
    origin: Annotated[str | None, typer.Option("--from", help="Another source: a URL, a folder or an archive.")] = None,
) -> None:
    """Download a data set, verify its checksums and unpack it."""
    from fedadc.cli.terminal import progress_of_download, say
    from fedadc.data.loaders.download import download

    with progress_of_download() as progress:
        folder = download(name, data_dir, origin, progress)
    say(f"{name} is in {folder}")


def data_show(
    config: Annotated[Path, typer.Argument(help="A YAML config.")],
    overrides: Overrides = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Also save the table as a plot (PNG).")] = None,
    data_dir: DataDir = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Show how many samples of each class every client holds."""
    from fedadc.analysis.label_counts import label_counts, plot_label_counts
    from fedadc.cli.terminal import label_counts_table, note, say

    counts = label_counts(config, overrides or (), data_dir=data_dir, trust=trust, notes=note)
    if plot_file is not None:
        plot_label_counts(counts, plot_file)
    label_counts_table(counts, json)
    if plot_file is not None and not json:
        say(f"plot:  {plot_file}")
