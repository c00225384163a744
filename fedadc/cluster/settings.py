"""Which cluster a simulation uses, and how."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedadc.data.dataset import Dataset
from fedadc.errors import require
from fedadc.fields.settings import Settings
from fedadc.fields.values import show
from fedadc.system.determinism import MAX_WORKERS

ADDRESS = re.compile(r"([^:/\s]+|\[[0-9a-fA-F:.%]+\]):[0-9]{1,5}")  # host or [IPv6 address], and port

NO_CLIENTS = (
    "addresses of Ray Client are not supported; start the command on a machine of the cluster, with the address auto."
)


@dataclass(frozen=True, kw_only=True)
class RayCluster(Settings):
    """Train the clients on a Ray cluster. The results have the bits of a simulation in one process."""

    address: str | None = None  # of a running cluster: auto or HOST:PORT; None: start one on this machine
    workers: int | str = "auto"  # processes in the whole cluster; auto: as many as fit on its nodes
    cpus_per_worker: float = 1.0  # as Ray counts them
    gpus_per_worker: float = 0.0  # as Ray counts them: with 0.5, two workers share a GPU
    other_nodes: Literal["refuse", "leave out", "use"] = "refuse"  # nodes that differ in torch, CPU type or fedadc
    patience: float = 60.0  # seconds to wait for a node, a worker or a vector before it counts as lost
    load: Callable[[], Dataset] | None = None  # reads the data on a node from its own disk; None: the data is sent
    logs: Path | None = None  # folder for the logs of a cluster that is started here

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.load is None or callable(self.load),
            f"load must be a function that returns a Dataset, not {show(self.load)}.",
        )
        require(self.address is None or not self.address.startswith("ray://"), f"address is ray://...: {NO_CLIENTS}")
        require(
            self.address is None or self.address == "auto" or ADDRESS.fullmatch(self.address) is not None,
            f"address must be auto or HOST:PORT of the head, as in 10.0.0.1:6379, not {self.address!r:.60}.",
        )
        number = str(self.workers)
        require(
            number == "auto" or (number.isdecimal() and 1 <= int(number) <= MAX_WORKERS),
            f"workers must be auto or a number from 1 to {MAX_WORKERS} on a cluster, not {self.workers!r:.60}.",
        )
        require(self.cpus_per_worker > 0, f"cpus_per_worker must be above 0, not {self.cpus_per_worker}.")
        require(self.gpus_per_worker >= 0, f"gpus_per_worker must be at least 0, not {self.gpus_per_worker}.")
        require(self.patience > 0, f"patience must be above 0 seconds, not {self.patience}.")

    @property
    def most_workers(self) -> int:
        return MAX_WORKERS if self.workers == "auto" else int(self.workers)


def cluster_of(engine: RayCluster | str | None, workers: int | str = 0) -> RayCluster | None:
    """The cluster that an argument `engine` means; None: this machine."""
    if engine is None or engine == "local":
        return None
    require(
        isinstance(engine, RayCluster) or engine == "ray",
        f"engine must be local, ray or a RayCluster, not {engine!r:.60}.",
    )
    number = workers if workers not in (0, "0") else "auto"
    if isinstance(engine, RayCluster):
        require(number == "auto", "workers: give RayCluster(workers=...) the number instead.")
        return engine
    return RayCluster(workers=number)
