"""Makes a site hostile: Python imports this file in every process of a SuperNode that has its folder on PYTHONPATH.

What the site answers to the training message of round t is changed by the t-th of the attacks named in HOSTILE; of its
other messages, only counts of test samples and the name that it says are changed, by attacks of these kinds.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import time
from pathlib import Path
from typing import Any


class Executed:
    """Pickled, this is a command: reading it as a pickle would make a file."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {os.environ['HOSTILE_FOLDER']}/executed",)


def header_of(head: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(head[8:])
    return found


def facts_of(head: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(header_of(head)["__metadata__"]["fedadc"])
    return found


def with_header(head: bytes, change: Any) -> bytes:
    """The head of a message with another header."""
    header = header_of(head)
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def with_facts(head: bytes, **facts: Any) -> bytes:
    def change(header: dict[str, Any]) -> None:
        header["__metadata__"]["fedadc"] = json.dumps({**facts_of(head), **facts})

    return with_header(head, change)


def renamed(header: dict[str, Any]) -> None:
    header["gamma"] = header.pop("delta")


def reshaped(header: dict[str, Any]) -> None:
    (numbers,) = header["delta"]["shape"]
    header["delta"]["shape"] = [1, numbers]


def retyped(header: dict[str, Any]) -> None:
    header["delta"]["dtype"] = "I32"


def attacked(attack: str, packet: Any, packet_of: Any, past: Path) -> Any:
    """The upload of an honest site, changed."""
    head, body = packet.head, packet.body
    if attack == "slow":
        time.sleep(float(os.environ["HOSTILE_SECONDS"]))
    elif attack == "honest":
        past.write_bytes(head + body)
    elif attack == "past round":
        return packet_of(past.read_bytes())
    elif attack == "another run":
        head = with_facts(head, agreement="0" * 64)
    elif attack == "another client":
        head = with_facts(head, client=0)
    elif attack == "names":
        head = with_header(head, renamed)
    elif attack == "shape":
        head = with_header(head, reshaped)
    elif attack == "dtype":
        head = with_header(head, retyped)
    elif attack == "nan":
        body = struct.pack("<f", float("nan")) + body[4:]
    elif attack == "infinity":
        body = struct.pack("<f", float("inf")) + body[4:]
    elif attack == "truncated":
        body = body[:-5]
    elif attack == "garbage":
        head, body = os.urandom(300), os.urandom(1000)
    elif attack == "pickle":
        head, body = pickle.dumps(Executed()), pickle.dumps(Executed())
    elif attack == "long header":
        head = struct.pack("<Q", 2**62) + head[8:]
    elif attack == "deep header":
        head = struct.pack("<Q", 60000) + b'{"a":' * 12000
    elif attack == "repeated":
        body = bytes(int(os.environ["HOSTILE_BYTES"]))  # Flower sends equal parts once
    elif attack == "huge":
        body = os.urandom(int(os.environ["HOSTILE_BYTES"]))
    return type(packet)(packet.facts, head, body)


def become_hostile() -> None:
    from flwr.app import RecordDict

    from fedadc.sites import flower
    from fedadc.sites.packets import PROBLEM, Packet

    answer, record_of = flower._answer, flower.to_record
    attacks, past = os.environ["HOSTILE"].split(","), Path(os.environ["HOSTILE_FOLDER"]) / "past"

    def hostile_answer(kind: Any, request: Packet, folder: Path, context: Any) -> Packet:
        found = answer(kind, request, folder, context)
        if kind == "count" and "counts" in attacks:
            return Packet(found.facts, body=os.urandom(100))
        if kind == "hello" and "name" in attacks:
            return Packet({**found.facts, "client": os.environ["HOSTILE_NAME"]}, body=found.body)
        if kind != "train":
            return found
        round = facts_of(request.head)["round"]
        attack = attacks[round - 1] if round <= len(attacks) else "honest"
        if attack == "a long problem":
            return Packet({PROBLEM: "\x1b[2J\n" + "lies " * 2_000})
        if attack == "no records":
            return Packet({attack: True})
        return attacked(attack, found, lambda message: Packet.of(message, {}), past)

    def hostile_record(packet: Packet) -> RecordDict:
        return RecordDict() if "no records" in packet.facts else record_of(packet)

    flower._answer, flower.to_record = hostile_answer, hostile_record  # type: ignore[assignment]


if "HOSTILE" in os.environ and any("flwr-clientapp" in word for word in sys.orig_argv):
    become_hostile()
