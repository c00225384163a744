"""The two halves of a federation, each in a process of its own: `python halves.py server`, `python halves.py clients`.

Both read frames from standard input and write frames to standard output: a line of JSON, then so many bytes. What they
get to begin with is a config and the kind of the data. The server also gets a roster; only the clients get samples,
each its own. Everything else that passes is the bytes of `fedadc.training.wire`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
import torch
from safetensors.torch import load

from fedadc.config.build import build_agreement, build_coordinator, complete
from fedadc.config.settings import Config
from fedadc.data.dataset import DataSpec, Normalization, Samples
from fedadc.data.roster import Roster
from fedadc.engines.remote import Remote
from fedadc.runs.record import load_config
from fedadc.system.files import to_safetensors
from fedadc.training.client import Client
from fedadc.training.rounds import train

Frame = tuple[dict[str, Any], bytes]


def write_frame(stream: IO[bytes], head: dict[str, Any], body: bytes = b"") -> None:
    stream.write(json.dumps({**head, "bytes": len(body)}).encode() + b"\n" + body)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Frame | None:
    """The next frame; None at the end."""
    line = stream.readline()
    if not line:
        return None
    head = json.loads(line)
    return head, stream.read(head["bytes"])


def spec_of(tree: dict[str, Any]) -> DataSpec:
    normalization = Normalization(tree["scale"], tuple(tree["mean"]), tuple(tree["std"]))
    return DataSpec(tuple(tree["input_shape"]), getattr(torch, tree["dtype"]), tuple(tree["classes"]), normalization)


def plain_spec(spec: DataSpec) -> dict[str, Any]:
    """A spec as JSON, for `spec_of`."""
    constants = spec.normalization
    return {
        "input_shape": spec.input_shape,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "classes": spec.classes,
        "scale": constants.scale,
        "mean": constants.mean,
        "std": constants.std,
    }


def config_of(head: dict[str, Any]) -> Config:
    return complete(load_config(head["config"]))


def serve_rounds(head: dict[str, Any], source: IO[bytes], sink: IO[bytes]) -> None:
    """The server's half of all rounds: no sample is in this process."""
    config = config_of(head)
    agreement = build_agreement(config, spec_of(head["spec"]))
    counts = np.array(head["label_counts"])
    coordinator = build_coordinator(config, agreement, Roster(np.array(head["sizes"]), None, lambda: counts))

    def exchange(messages: Sequence[tuple[int, bytes]]) -> Iterator[bytes]:
        for client, message in messages:
            write_frame(sink, {"client": client}, message)
        for _ in messages:
            frame = read_frame(source)
            assert frame is not None
            yield frame[1]

    rounds = list(train(coordinator, Remote(agreement, exchange).run, config.rounds, coordinator.start()))
    last, state = rounds[-1], rounds[-1].state
    seen = {"up": last.bytes_up, "down": last.bytes_down, "loss": last.train_loss, "drift": [r.metrics for r in rounds]}
    counted = {client: state.clients.counted(client) for client in state.clients}
    write_frame(sink, {**seen, "counted": counted}, to_safetensors({"theta": state.theta, **state.server}))


def serve_clients(head: dict[str, Any], body: bytes, source: IO[bytes], sink: IO[bytes]) -> None:
    """The clients' half: each of them has its own samples and states, and none of the server's."""
    config, tensors = config_of(head), load(body)
    samples = {k: Samples(tensors[f"{k}.x"], tensors[f"{k}.y"]) for k in range(head["clients"])}
    agreement = build_agreement(config, spec_of(head["spec"]), samples[0])
    clients = {k: Client(agreement, k, own) for k, own in samples.items()}
    while (frame := read_frame(source)) is not None and "client" in frame[0]:
        write_frame(sink, {}, clients[frame[0]["client"]].answer(frame[1]))
    assert frame is not None
    kept = {
        f"{k}.{name}": vector
        for k, round in frame[0]["counted"].items()
        for name, vector in clients[int(k)].states[round].items()
    }
    write_frame(sink, {}, to_safetensors(kept))


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (frame := read_frame(source)) is not None:
        if sys.argv[1] == "server":
            serve_rounds(frame[0], source, sink)
        else:
            serve_clients(*frame, source, sink)


if __name__ == "__main__":
    main()
