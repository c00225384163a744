"""Server and clients in separate processes that share no data and pass bytes: the bits are those of the simulation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from family import OBJECTIVES_OF_CLASSES
from fedadc.communication.downlinks import DOWNLINKS
from fedadc.communication.uplinks import UPLINKS
from fedadc.config.build import prepare
from fedadc.federation import Federation
from fedadc.methods import METHODS
from fedadc.runs.record import load_config
from fedadc.selections import SELECTIONS
from fedadc.system.files import to_safetensors
from fedadc.training.state import Round
from halves import plain_spec, read_frame, write_frame

HALVES = str(Path(__file__).parent.parent / "halves.py")
ROUNDS = 3
SMALL: dict[str, Any] = {
    "rounds": ROUNDS,
    "seed": 5,
    "data": {"name": "digits", "clients": 8, "partition": {"name": "dirichlet", "alpha": 0.5}},
    "model": {"name": "mlp", "hidden": [8], "projection": 6},  # MOON needs the projection
    "local": {"epochs": 1, "batch_size": 50, "lr": 0.1, "weight_decay": 1e-3},
    "cohort": {"size": 4},
}
WITHOUT_A_GLOBAL_MODEL = ("local_only", "fedper", "fedrep", "fedbn")
CASES: dict[str, dict[str, Any]] = {
    f"{m} with {o}": {"method": m, "objective": o}
    for m, (o, objective) in product(METHODS, OBJECTIVES_OF_CLASSES.items())
    if not (m in WITHOUT_A_GLOBAL_MODEL and objective().asks_the_global_model)
}
CASES |= {
    f"{m} over {u}": {"method": m, "communication": {"uplink": u}}
    for m, u in product(("fedavg", "fedadc", "scaffold", "fedper"), UPLINKS)
}
CASES |= {f"fedadc over {d}": {"method": "fedadc", "communication": {"downlink": d}} for d in DOWNLINKS}
CASES |= {f"selection {s}": {"cohort": {"size": 4, "selection": s}} for s in SELECTIONS}
CASES |= {
    "faults": {"method": "scaffold", "faults": {"drop": 0.3, "slow": 0.3}},
    "momentum and clipping": {"method": "slowmo", "local": {"steps": 3, "momentum": 0.5, "clip": 0.1}},
    "images, augmented": {
        "method": "feddyn",
        "model": {"name": "cnn", "channels": [4], "hidden": [8]},
        "data": {**SMALL["data"], "augment": {"crop": 1, "flip": True}},
    },
    "an average as teacher": {
        "objective": {"name": "global_distillation", "teacher": "ema"},
        "ensembles": {"ema": {"decay": 0.9}},
    },
    "weighted by samples": {"method": "scaffold", "cohort": {"size": 4, "weighting": "samples"}},
    "by size": {"method": {"name": "feddyn", "alpha_by_size": True}},
}
MANY = {"data": {**SMALL["data"], "clients": 20}, "evaluate": {"drift": True}}  # a block and a half
DRIFT: dict[str, dict[str, Any]] = {
    "uniform": {"method": "fedadc", "cohort": {"size": 12}},
    "weighted": {"method": "slowmo", "cohort": {"size": 12, "weighting": "samples"}},
    "top_k": {"method": "fedadc", "cohort": {"size": 12}, "communication": {"uplink": "top_k"}},
    "eight_bit, weighted": {
        "method": "scaffold",
        "cohort": {"size": 12, "weighting": "samples"},
        "communication": {"uplink": "eight_bit"},
    },
    "faults": {
        "method": "slowmo",
        "cohort": {"size": 16, "weighting": "samples"},
        "faults": {"drop": 0.3, "slow": 0.3},
    },
    "a part of theta": {"method": "fedper", "cohort": {"size": 12}},
    "no upload": {"method": "local_only", "cohort": {"size": 12}},
}
CASES |= {f"drift, {name}": {**MANY, **case} for name, case in DRIFT.items()}


QUICK = [name for name in CASES if " with " not in name or name.endswith("cross_entropy") or name.startswith("fedadc ")]
PARAMETERS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]


class Halves:
    """The two processes, and the bytes that passed between them."""

    def __init__(self) -> None:
        self.processes = {
            role: subprocess.Popen([sys.executable, HALVES, role], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for role in ("server", "clients")
        }

    def write(self, role: str, head: dict[str, Any], body: bytes = b"") -> None:
        stream = self.processes[role].stdin
        assert stream is not None
        write_frame(stream, head, body)

    def read(self, role: str) -> tuple[dict[str, Any], bytes]:
        stream = self.processes[role].stdout
        assert stream is not None
        frame = read_frame(stream)
        assert frame is not None, f"the process of the {role} has ended"
        return frame

    def train(self, tree: dict[str, Any], federation: Federation) -> tuple[dict[str, Any], bytes, bytes, int, int]:
        """Train a config: the server's last frame, its model and state, the clients' states, bytes down and up."""
        data, clients = federation.data, federation.clients
        head = {"config": tree, "spec": plain_spec(data.spec)}
        own = {k: data.train.take(clients[k]) for k in range(len(clients))}
        samples = {f"{k}.{part}": getattr(s, part) for k, s in own.items() for part in ("x", "y")}
        self.write("clients", {**head, "clients": len(clients)}, to_safetensors(samples))
        counts = clients.class_counts(data.train.y, len(data.classes))
        self.write("server", {**head, "sizes": clients.sizes.tolist(), "label_counts": counts.tolist()})
        down = up = 0
        while "client" in (frame := self.read("server"))[0]:
            self.write("clients", *frame)
            answer = self.read("clients")[1]
            self.write("server", {}, answer)
            down, up = down + len(frame[1]), up + len(answer)
        self.write("clients", {"counted": frame[0]["counted"]})
        return frame[0], frame[1], self.read("clients")[1], down, up

    def close(self) -> None:
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == 0


@pytest.fixture(scope="module")
def halves() -> Iterator[Halves]:
    both = Halves()
    yield both
    both.close()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("name", PARAMETERS)
def test_two_processes_that_pass_only_bytes_give_the_bits_of_the_simulation(name: str, halves: Halves) -> None:
    tree = {**SMALL, **CASES[name]}
    plan = prepare(load_config(tree))
    rounds = list(plan.federation.rounds(ROUNDS))
    seen, model, states, down, up = halves.train(tree, plan.federation)
    state = rounds[-1].state
    same(load(model), {"theta": state.theta, **state.server})
    kept = {client: own for client, own in state.clients.items() if own}
    same(load(states), {f"{k}.{n}": vector for k, own in kept.items() for n, vector in own.items()})
    assert seen["loss"] == rounds[-1].train_loss
    drift = [{k: v for k, v in r.metrics.items() if k.startswith("drift")} for r in rounds]
    assert seen["drift"] == drift and bool(drift[-1]) == ("evaluate" in tree)
    assert (seen["up"], seen["down"]) == (rounds[-1].bytes_up, rounds[-1].bytes_down)
    check_bytes(rounds, tree, down, up)


def check_bytes(rounds: list[Round], tree: dict[str, Any], down: int, up: int) -> None:
    """The ledger counts what really passes, but for headers. (Other downlinks than pull are only simulated so far.)"""
    messages = sum(len(r.cohort) - len(r.dropped) for r in rounds)
    assert 0 < up - sum(r.bytes_up for r in rounds) < messages * 1024
    if "downlink" not in tree.get("communication", {}) and "faults" not in tree:
        assert 0 < down - sum(r.bytes_down for r in rounds) < messages * 1024
