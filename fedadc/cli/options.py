"""Options and arguments that several commands share.

An empty metavar keeps typer from showing `<bool>` beside a flag that takes no value.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedadc.cli.supervision import require_supervision

if TYPE_CHECKING:
    from fedadc.cluster.settings import RayCluster

RAY_SETTINGS = ("cpus_per_worker", "gpus_per_worker", "other_nodes", "patience")

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
Engine = Annotated[
    str,
    typer.Option(
        metavar="local|ray",
        callback=require_supervision,
        help="Where clients are trained: on this machine, or on a Ray cluster.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="auto|HOST:PORT", help="A running Ray cluster (default: start one on this machine)."),
]
RaySettings = Annotated[
    list[str] | None,
    typer.Option(
        "--ray",
        metavar="KEY=VALUE",
        help=f"A setting of the Ray engine, e.g. gpus_per_worker=0.5; may be repeated ({', '.join(RAY_SETTINGS)}).",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace existing runs.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Runs to train in parallel (default: one per core).")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Config settings to override, e.g. local.lr=0.05.")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", metavar="", help="Load the user code that a run directory names although it is not sealed."
    ),
]


def chosen_engine(
    engine: str,
    address: str | None,
    settings: Sequence[str] | None,
    workers: str = "auto",
    workers_per_gpu: int = 1,
) -> RayCluster | None:
    """The cluster that the options of a command mean; None: this machine, with so many workers."""
    from fedadc.cluster.settings import RayCluster
    from fedadc.config.yaml import override
    from fedadc.errors import FedadcError, require, unknown

    require(engine in ("local", "ray"), f"engine must be local or ray, not {engine!r:.60}.")
    if engine == "local":
        require(address is None and not settings, "--ray-address and --ray need --engine ray.")
        return None
    require(workers_per_gpu == 1, "--workers-per-gpu is for --engine local; use e.g. --ray gpus_per_worker=0.5.")
    tree: dict[str, Any] = {}
    for setting in settings or ():
        require("=" in setting, f"--ray must be KEY=VALUE, such as gpus_per_worker=0.5, not {setting!r:.60}.")
        tree = override(tree, setting)
    for key in tree:
        if key not in RAY_SETTINGS:
            raise unknown("--ray: setting", key, RAY_SETTINGS)
    try:
        return RayCluster(address=address, workers=workers, **tree)
    except FedadcError as error:
        prefix = {"workers": "", "address": "--ray-"}.get(str(error).split()[0], "--ray: ")
        raise FedadcError(f"{prefix}{error}") from error


def parse_seeds(text: str | None) -> list[int] | None:
    """The seeds that a text names: 3 is 0, 1, 2; and 4,7 is 4, 7."""
    from fedadc.errors import require

    if text is None:
        return None
    parts = text.split(",")
    good = all(part.strip().isdecimal() for part in parts)
    require(good, f"seeds must be a number of seeds such as 3, or seeds such as 0,1,2, not {text!r:.60}.")
    return list(range(int(text))) if len(parts) == 1 else [int(part) for part in parts]


def in_words_of_the_command_line(text: str, options: Mapping[str, str]) -> str:
    """A message of the Python API with options in the place of arguments, e.g. --out for `out`.

    `options` has the option of every argument. An argument at the beginning of the message has no quotes; it may also
    be a key of the config, so it is only replaced where its option was given.
    """
    text = re.sub(r"`(\w+)`", lambda found: options.get(found[1], found[0]), text)
    first = re.match(r"(\w+)(?=: | must | is | ')", text)
    option = options.get(first[1], "") if first else ""
    given = option and any(word.partition("=")[0] == option for word in sys.argv[1:])
    return option + text[len(first[1]) :] if first and given else text
