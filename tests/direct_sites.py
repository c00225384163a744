"""Sites without a network between them and their server, and data for them."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedadc.runs.record import load_config
from fedadc.sites.node import ALLOWED, NodeSettings
from fedadc.sites.packets import HEADER_LENGTH, PROBLEM, Kind, Lost, Packet
from fedadc.sites.replies import reply
from fedadc.sites.serving import serve
from fedadc.sites.site import Site

CLIENTS = ("anna", "bert", "carl", "dora", "emil")


class Direct:
    """Calls the sites; a node may be lost once, after it has trained but before its answer arrives."""

    def __init__(self, sites: Collection[Site], losing: Collection[int] = ()) -> None:
        self.sites = dict(enumerate(sites, start=100))
        self.answers: dict[str, Packet | Lost] = {}
        self.losing, self.sent, self.limit = set(losing), 0, 10**9

    def nodes(self) -> Collection[int]:
        return list(self.sites)

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        self.sent += 1
        if self.sent > self.limit:
            raise Interrupted
        answer: Packet | Lost = reply(self.sites[node], kind, packet)
        if kind == "train" and self.sent in self.losing:
            self.sites[node + 1000] = self.sites.pop(node)  # it starts again as another node
            answer = Lost("it was killed")
        self.answers[str(self.sent)] = answer
        return str(self.sent)

    def receive(self, numbers: Collection[str]) -> Mapping[str, Packet | Lost]:
        return {number: self.answers.pop(number) for number in reversed(list(numbers)) if number in self.answers}


class Interrupted(BaseException):
    """The server dies."""


def round_of(packet: Packet) -> int:
    """The round of a training message."""
    header = json.loads(packet.head[HEADER_LENGTH:])
    found: int = json.loads(header["__metadata__"]["fedadc"])["round"]
    return found


class Unreliable(Direct):
    """Sites with faults: (round, name) -> what happens to the upload. Sites come and go before given rounds."""

    def __init__(
        self,
        sites: Collection[Site],
        faults: Mapping[tuple[int, str], str] | None = None,
        here: Mapping[str, Collection[int]] | None = None,  # rounds before which a site is connected; others: always
    ) -> None:
        super().__init__(sites)
        self.faults, self.here, self.round = dict(faults or {}), dict(here or {}), 1
        self.late: dict[str, Packet | Lost] = {}
        self.asked: list[tuple[int, str]] = []

    def nodes(self) -> Collection[int]:
        return [n for n, site in self.sites.items() if self.round in self.here.get(site.name, (self.round,))]

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        if kind == "refuse":
            self.answers["refused"] = Packet()
            return "refused"
        number = super().send(node, kind, packet)
        if kind != "train":
            return number
        name, round = self.sites[node].name, round_of(packet)
        self.asked.append((round, name))
        fault = self.faults.get((round, name), "")
        answer = self.answers[number]
        assert isinstance(answer, Packet)
        if fault.startswith("late"):
            self.late[number] = self.answers.pop(number)
            if fault == "late once":
                del self.faults[round, name]
        elif fault == "garbage":
            self.answers[number] = Packet({}, random.Random(round).randbytes(100), b"")
        elif fault == "truncated":
            self.answers[number] = Packet({}, answer.head, answer.body[:-3])
        elif fault == "nan":
            body = torch.full((len(answer.body) // 4,), torch.nan).numpy().tobytes()
            self.answers[number] = Packet({}, answer.head, body)
        elif fault == "problem":
            self.answers[number] = Packet({PROBLEM: "the disk is full"})
        return number

    def after(self, record: Mapping[str, Any]) -> None:
        """A round is over: what was late comes now, and sites come and go."""
        self.answers |= self.late
        self.late, self.round = {}, record["round"] + 1


def served_by_mortals(config: Any, sites: Collection[Site], out: Path, limits: Collection[int]) -> int:
    """Serve a run with servers that die after so many messages, one after the other; returns how many have died."""
    for deaths, limit in enumerate(limits):
        transport = Direct(sites)
        transport.limit = limit
        with suppress(Interrupted):
            serve(config, transport, out)
            return deaths
    raise AssertionError("the last server has died too")


def split_arrays(folder: Path) -> None:
    """All samples in one file, and those of every client in a file of its own."""
    rng = np.random.default_rng(0)
    client = rng.choice(np.array(CLIENTS), 120, p=[0.1, 0.3, 0.2, 0.3, 0.1])
    x, y = rng.normal(size=(120, 6)), rng.choice(4, 120)
    np.savez(folder / "all.npz", x=x, y=y, client=client)
    for name in CLIENTS:
        np.savez(folder / f"{name}.npz", x=x[client == name], y=y[client == name])


def config_of(folder: Path, **changes: Any) -> Any:
    tree: dict[str, Any] = {
        "rounds": 4, "seed": 2, "data": {"name": "npz", "path": str(folder / "all.npz")},
        "model": {"name": "mlp", "hidden": [8], "projection": 6}, "cohort": {"size": 3},
        "local": {"epochs": 2, "batch_size": 8, "lr": 0.1},
    }  # fmt: skip
    return load_config({**tree, **changes})


def sites_of(folder: Path, config: Any) -> list[Site]:
    kept = folder / "kept"
    settings = [NodeSettings(n, str(folder / f"{n}.npz"), kept / n, ALLOWED) for n in reversed(CLIENTS)]
    return [Site(own, config) for own in settings]
