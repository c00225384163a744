"""The Flower app of a federation: a config without data, and two files that import ours.

Flower sends the files of an app to all sites and runs them there. So an app has no data, and lists no package that
Flower would fetch: every site has installed fedadc itself.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fedadc.config.settings import AT_SITES, Config, DataConfig, parse_config
from fedadc.config.yaml import read_yaml
from fedadc.errors import FedadcError, require, unknown
from fedadc.sites.packets import RUN_CONFIG
from fedadc.system.files import write_file
from fedadc.system.user_code import UserCode

APP_CONFIG = "fedadc.yaml"
LOCAL_FOLDER = "local"  # folder of a local federation, which is not part of the app
# what a config may say about data that it does not have
DATA_OPTIONS = {"label", "drop", "scale", "size", "client"}
NOT_AT_SITES = ("path", "clients", "partition")

SERVER_APP = '''"""The server's half; `flwr run` starts it on the SuperLink."""

from fedadc.sites.flower import server_app

app = server_app(__file__)
'''
CLIENT_APP = '''"""A site's half; Flower starts it on every SuperNode for every message."""

from fedadc.sites.flower import client_app

app = client_app(__file__)
'''
PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federation that is trained with fedadc"
license = "Apache-2.0"
dependencies = []  # Flower would fetch what is listed here; sites install fedadc[flower] themselves

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedadc"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
{settings}
"""
README = """# {name}

A [Flower](https://flower.ai) app that trains across real sites with fedadc. `fedadc.yaml` has the settings; every site
names its own data. See docs/federation.md of fedadc.

On every machine: `pip install 'fedadc[flower]'`, the same version.

The server's machine:

    flower-superlink --insecure --disable-runtime-dependency-installation --host 0.0.0.0 --database superlink.db

Every site, with a name of its own:

    flower-supernode --insecure --superlink SERVER:8000 \\
        --node-config 'client="bern" data-path="/data/bern.csv"'

The server's machine again, in this folder. The first command adds the address to Flower's own config, once:

    mkdir -p ~/.flwr
    printf '[superlink.{name}]\\naddress = "127.0.0.1:8000"\\ninsecure = true\\n' >> ~/.flwr/config.toml
    flwr run . {name} --stream

The run directory is `out` in pyproject.toml, relative to where the SuperLink was started. If anything was killed: start
it again, then `flwr run` again. The run goes on and ends with the same bits.

`--insecure` is for trying it on one machine or a trusted network.

Try everything on this machine first, in another folder: `fedadc federation up trial --sites 3 --config CONFIG`.
"""


def write_app(folder: Path, config: Config, name: str | None = None) -> None:
    """Write a Flower app for a config, whose data is left out."""
    require(
        not folder.exists() or (folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCAL_FOLDER}),
        f"{folder} exists and is not an empty folder; name a new one.",
    )
    write_app_files(folder, config, name)


def write_app_files(folder: Path, config: Config, name: str | None = None) -> None:
    """Write the files of an app, also over those that are there; its config comes last, and makes it an app."""
    name = app_name(name or folder.resolve().name)
    defaults = {**dict.fromkeys(RUN_CONFIG, '""'), "out": f'"runs/{name}"', "examine-within": "60.0"}
    settings = "\n".join(f"# {RUN_CONFIG[key]}\n{key} = {value}" for key, value in defaults.items())
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "server_app.py": SERVER_APP,
        "client_app.py": CLIENT_APP,
        "pyproject.toml": PYPROJECT.format(name=name, settings=settings),
        "README.md": README.format(name=name),
        ".gitignore": f"{LOCAL_FOLDER}/\nruns/\n__pycache__/\n",
    }
    for name in sorted(config.code.files if config.code else ()):  # the user's own method or model
        shutil.copyfile(config.folder / name, folder / name)
    for name, text in {**files, APP_CONFIG: config_text(config)}.items():
        write_file(folder / name, text.encode())


def app_name(text: str) -> str:
    """A name that Flower accepts, from any text."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return name if name[:1].isalpha() else f"federation-{name}".strip("-")


def config_text(config: Config) -> str:
    """The config of an app: that of a simulation, less its data. Settings that are empty by default are left out."""
    whole = without_data(config).tree()
    short = _without_empty(whole)
    same = parse_config(short, UserCode(config.folder)).tree() == whole
    tree = short if same else whole
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)


def _without_empty(tree: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: _without_empty(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return {key: value for key, value in found.items() if value is not None and value not in ({}, [])}


def without_data(config: Config) -> Config:
    options = {key: value for key, value in config.data.options.items() if key in DATA_OPTIONS - {"client"}}
    test = None if isinstance(config.data.test, str) else config.data.test
    data = replace(config.data, name=AT_SITES, path=None, test=test, clients=None, partition=None, options=options)
    weights = config.model.weights  # the server sends them to the sites
    model = replace(config.model, weights=None if weights is None else str(config.file(weights).resolve()))
    return replace(config, data=data, model=model)


def config_of_app(folder: Path) -> Config:
    """The config in the folder of an app. It may leave out `data`: every site has its own."""
    tree = read_yaml(folder / APP_CONFIG)
    data = tree.get("data") or {}
    require(isinstance(data, Mapping), f"{folder / APP_CONFIG}: data must be a mapping of settings.")
    tree = {**tree, "data": {"name": AT_SITES, **data}}
    config = parse_config(tree, UserCode(folder), source=str(folder / APP_CONFIG))
    _check(config.data)
    return config


def _check(data: DataConfig) -> None:
    for key in NOT_AT_SITES:
        given: Any = getattr(data, key)
        require(given is None, f"data.{key} is {given!r:.60}, but every site names its own data; remove it.")
    require(data.name == AT_SITES, f"data.name is {data.name!r:.60}, but every site names its own data; remove it.")
    for key in data.options:
        if key not in DATA_OPTIONS:
            raise unknown("data: key", key, DATA_OPTIONS | {"test", "validation", "seed", "normalize", "augment"})
    if isinstance(data.test, str):
        raise FedadcError("data.test must be a share in a federation: every site holds out its own.")
