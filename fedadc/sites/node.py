"""A site from what its SuperNode was started with: `--node-config 'client="bern" data-path="/data/bern.csv"'`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedadc.errors import FedadcError, require, unknown
from fedadc.sites.app import config_of_app
from fedadc.sites.packets import Fact
from fedadc.sites.site import Site
from fedadc.sites.site_data import file_of

SETTINGS = {
    "client": "the name of this site's client",
    "data-path": "its data: a CSV file, an .npz file, a folder of images, or /path/file.py:function",
    "folder": "where it keeps its client's states (default: ~/.fedadc/sites/CLIENT)",
    "allow": "what it may tell beside what training needs: label-counts",
}
SIMULATED = "partition-id"  # which Flower's simulation gives to a node
OF_SIMULATION = (SIMULATED, "num-partitions")


def site_of(folder: Path, given: Mapping[str, Fact], of_run: Mapping[str, Fact]) -> Site:
    """The site that a SuperNode's settings describe; `folder` is that of the app, `of_run` are settings of the run."""
    for name in given:
        if name not in SETTINGS and name not in OF_SIMULATION:
            raise unknown("--node-config: setting", name, SETTINGS)
    if SIMULATED in given and "client" not in given:
        given = _simulated(given, of_run)
    for name in ("client", "data-path"):
        require(bool(given.get(name)), f"--node-config lacks {name}, {SETTINGS[name]}.")
    client, path = str(given["client"]), str(given["data-path"])
    require(file_of(path)[0].exists(), f"site {client} has no data: there is no {file_of(path)[0]}.")
    kept = Path(str(given.get("folder") or Path("~/.fedadc/sites") / client)).expanduser()
    allowed = str(given.get("allow", "")).split()
    if wrong := [name for name in allowed if name != "label-counts"]:
        raise FedadcError(f"--node-config: allow must be label-counts or nothing, not {wrong[0]!r:.60}.")
    return Site(client, path, kept, config_of_app(folder), bool(allowed))


def name_of(given: Mapping[str, Fact], of_run: Mapping[str, Fact]) -> str:
    """The name of a site's client, without its data."""
    if SIMULATED in given and "client" not in given:
        given = _simulated(given, of_run)
    require(bool(given.get("client")), f"--node-config lacks client, {SETTINGS['client']}.")
    return str(given["client"])


def _simulated(given: Mapping[str, Fact], of_run: Mapping[str, Fact]) -> dict[str, Fact]:
    """The settings of a node of Flower's simulation: it takes one of the files in a folder."""
    folder = Path(str(of_run.get("sites-data") or "")).expanduser()
    require(
        bool(of_run.get("sites-data")) and folder.is_dir(),
        "in Flower's simulation, sites-data must be a folder with one file per site.",
    )
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    number = int(given[SIMULATED])
    require(number < len(files), f"{folder} has data of {len(files)} sites; the simulation has more nodes.")
    path = files[number]
    kept = str(folder.parent / "kept" / path.stem)
    return {"client": path.stem, "data-path": str(path), "folder": kept, "allow": "label-counts"}
