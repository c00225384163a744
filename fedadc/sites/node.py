"""The settings of a site, with which its SuperNode is started: `--node-config 'client="bern" data-path="bern.csv"'`.

This module does not import torch: a site says its name before it loads anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fedadc.errors import FedadcError, require, unknown
from fedadc.sites.packets import Fact

SIMULATED = "partition-id"  # which Flower's simulation gives to a node
OF_SIMULATION = (SIMULATED, "num-partitions")
ALLOWED_BY_DEFAULT = ("samples", "loss", "evaluation", "categories", "ranges", "sums")
ALLOWED = (*ALLOWED_BY_DEFAULT, "label-counts", "many-categories")
SETTINGS = {
    "client": "the name of this site's client",
    "data-path": "its data: a CSV file, an .npz file, a folder of images, or /path/file.py:function",
    "folder": "where it keeps its client's states (default: ~/.fedadc/sites/CLIENT)",
    "allow": "what it may tell: nothing, or some of " + ", ".join(ALLOWED),
    "keep": "seconds for which its process waits for the next message (default: 300; 0: a new process for every one)",
}
LONGEST_NAME = 64
KEEP, MOST_SECONDS = 300, 10**6


@dataclass(frozen=True)
class NodeSettings:
    """A site's own settings."""

    client: str
    data_path: str  # a file or folder, or a function in a file
    folder: Path  # for what the site keeps
    allows: tuple[str, ...] = ALLOWED_BY_DEFAULT
    keeps: float = 0.0  # seconds for which a process waits for the next message

    @property
    def tells_evaluation(self) -> bool:
        """Whether the server may learn how good models are on its test samples, and so how many these are."""
        return {"samples", "evaluation"} <= {*self.allows}

    def own_folder(self) -> Path:
        """The folder, which only its owner may enter: it has the site's samples."""
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        return self.folder

    def text(self) -> str:
        """All settings, for another process."""
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    @staticmethod
    def from_text(text: str) -> NodeSettings:
        given = json.loads(text)
        return NodeSettings(**{**given, "folder": Path(given["folder"]), "allows": tuple(given["allows"])})

    @staticmethod
    def of(given: Mapping[str, Fact], of_run: Mapping[str, Fact]) -> NodeSettings:
        """The settings that a SuperNode was started with; `of_run` are those of the run."""
        for name in given:
            if name not in SETTINGS and name not in OF_SIMULATION:
                raise unknown("--node-config: setting", name, SETTINGS)
        if SIMULATED in given and "client" not in given:
            return _simulated(int(given[SIMULATED]), of_run)
        for name in ("client", "data-path"):
            require(bool(given.get(name)), f"--node-config lacks {name}, {SETTINGS[name]}.")
        client, path = str(given["client"]), str(given["data-path"])
        require_file_name(client, "--node-config: client")
        require(file_of(path)[0].exists(), f"site {client} has no data: there is no {file_of(path)[0]}.")
        folder = Path(str(given.get("folder") or Path("~/.fedadc/sites") / client)).expanduser()
        allowed = tuple(
            name for name in str(given.get("allow", " ".join(ALLOWED_BY_DEFAULT))).split() if name != "nothing"
        )
        if wrong := [name for name in allowed if name not in ALLOWED]:
            raise FedadcError(f"--node-config: allow must have {', '.join(ALLOWED)} or nothing, not {wrong[0]!r:.60}.")
        keep = given.get("keep", KEEP)
        require(
            isinstance(keep, int | float) and 0 <= keep <= MOST_SECONDS,
            f"--node-config: keep must be between 0 and {MOST_SECONDS} seconds, not {keep!r:.60}.",
        )
        return NodeSettings(client, path, folder, allowed, float(keep))


def require_file_name(client: str, what: str) -> None:
    """Refuse a client's name that could not be the name of a file."""
    require(
        client.isprintable() and 0 < len(client) <= LONGEST_NAME and not {"/", "\\"} & {*client} and client[0] != ".",
        f"{what} must be at most {LONGEST_NAME} characters, without slashes and not with a dot at the beginning, not "
        f"{client!r:.80}.",
    )


def file_of(path: str) -> tuple[Path, str]:
    """The file or folder of a site's data, and the function in it: /data/mine.py:load."""
    file, _, function = path.rpartition(".py:")
    found = Path(f"{file}.py" if file else path).expanduser().resolve()
    return found, function if file else ""


def _simulated(number: int, of_run: Mapping[str, Fact]) -> NodeSettings:
    """A node of Flower's simulation takes one of the files in a folder."""
    folder = Path(str(of_run.get("sites-data") or "")).expanduser()
    require(
        bool(of_run.get("sites-data")) and folder.is_dir(),
        "in Flower's simulation, sites-data must be a folder with one file per site.",
    )
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    require(number < len(files), f"{folder} has data of {len(files)} sites; the simulation has more nodes.")
    path = files[number]
    return NodeSettings(path.stem, str(path), folder.parent / "kept" / path.stem, ALLOWED)
