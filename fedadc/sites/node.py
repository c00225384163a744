"""A site from what its SuperNode was started with: `--node-config 'client="bern" data-path="/data/bern.csv"'`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedadc.config.settings import Config
from fedadc.errors import FedadcError, require, unknown
from fedadc.runs.record import load_config
from fedadc.sites.packets import Fact
from fedadc.sites.site import Site

CONFIG = "fedadc.yaml"  # in the folder of an app
SETTINGS = {
    "client": "the name of this site's client",
    "data-path": "its data: a CSV file, an .npz file or a folder of images",
    "folder": "where it keeps its client's states (default: ~/.fedadc/sites/CLIENT)",
    "allow": "what it may tell beside what training needs: label-counts",
}
OF_SIMULATION = ("partition-id", "num-partitions")  # which Flower's simulation adds


def config_of_app(folder: Path) -> Config:
    return load_config(folder / CONFIG, trust=True)


def site_of(folder: Path, given: Mapping[str, Fact]) -> Site:
    """The site that a SuperNode's settings describe; `folder` is that of the app."""
    for name in given:
        if name not in SETTINGS and name not in OF_SIMULATION:
            raise unknown("--node-config: setting", name, SETTINGS)
    for name in ("client", "data-path"):
        require(bool(given.get(name)), f"--node-config lacks {name}, {SETTINGS[name]}.")
    client, path = str(given["client"]), Path(str(given["data-path"])).expanduser().resolve()
    require(path.exists(), f"site {client} has no data: there is no {path}.")
    kept = Path(str(given.get("folder") or Path("~/.fedadc/sites") / client)).expanduser()
    allowed = str(given.get("allow", "")).split()
    if wrong := [name for name in allowed if name != "label-counts"]:
        raise FedadcError(f"--node-config: allow must be label-counts or nothing, not {wrong[0]!r:.60}.")
    return Site(client, path, kept, config_of_app(folder), bool(allowed))
