"""Packets over the grid of Flower, by which the server's half of a federation reaches its sites."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from flwr.app import Array, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_children_ids_from_object_content
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fedadc.errors import FedadcError, one_line
from fedadc.sites.packets import MAX_ANSWER, PROBLEM, REFUSED, Kind, Lost, NotSent, Packet, too_large
from fedadc.sites.records import TYPES, to_packet, to_record

log = logging.getLogger("flwr")  # what Flower shows

STALLED = 600.0  # seconds without a part of an answer, of which some parts have come
MOST_FACTS = 1 << 16  # bytes of the facts of an answer, and of what Flower adds
MOST_PARTS, LEAST_PART = 100, 1 << 20  # parts of a small answer; bytes of further ones: Flower's have 5 MiB
PAUSES = (1.0, 3.0, 9.0)  # seconds before the SuperLink is asked again
# errors of Flower that mean: the app does not work there; after all others, the site may answer again
APP_FAILED = (1, 2, 7)  # it cannot be loaded, it raised an exception, its bundle is not valid
Value = TypeVar("Value")


class GridTransport:
    """Packets over Flower's grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._nodes: dict[int, Any] = {}  # what Flower knows of every node that is connected
        self._answers = None if not hasattr(grid, "get_nodes") else _answers_of(grid)  # None: Flower's simulation

    def nodes(self) -> Collection[int]:
        if not hasattr(self.grid, "get_nodes"):
            return _tried(lambda: list(self.grid.get_node_ids()))
        found = _tried(lambda: list(cast(Any, self.grid).get_nodes()))
        self._nodes = {node.node_id: node for node in found}
        if self._answers is not None:
            self._answers.seen({node: str(info.last_activated_at) for node, info in self._nodes.items()})
        return self._nodes.keys()

    def key(self, node: int) -> bytes:
        return bytes(self._nodes[node].public_key) if node in self._nodes else b""

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        try:
            numbers = list(self.grid.push_messages([Message(to_record(packet), node, TYPES[kind])]))
        except Exception as error:  # a SuperLink with much to do; Flower has many kinds of errors
            time.sleep(PAUSES[0])
            raise NotSent(f"{type(error).__name__}: {one_line(error):.120}") from error
        if not numbers or not numbers[0]:
            raise NotSent("the SuperLink does not take it: the node has gone")
        if self._answers is not None:
            self._answers.most[str(numbers[0])] = packet.most + MOST_FACTS
        return str(numbers[0])

    def receive(self, numbers: Collection[str]) -> Mapping[str, Packet | Lost]:
        if self._answers is None:
            came = _tried(lambda: list(self.grid.pull_messages(list(numbers))))
            return {message.metadata.reply_to_message_id: read_answer(message) for message in came}
        if self._answers.are_waiting:
            self.nodes()
        return self._answers.take(numbers)


def read_answer(message: Message) -> Packet | Lost:
    """A message of Flower as a packet. One that is an error tells that none will come, or that the app fails there."""
    if not message.has_error():
        try:
            packet = to_packet(message.content)
            return replace(packet, facts={name: fact for name, fact in packet.facts.items() if name != REFUSED})
        except FedadcError as error:
            return Packet({REFUSED: str(error).rstrip(".")})
    said = re.sub(r"^<class '[^']*'>:<'(.*)'>$", r"\1", message.error.reason or "no reason given")
    reason = f"Flower's error {message.error.code}: {said}"
    return Packet({PROBLEM: reason}) if message.error.code in APP_FAILED else Lost(reason)


@dataclass
class _Arriving:
    """An answer of which some parts have not come."""

    message: Any  # without its content
    missing: list[str]  # names of parts
    started: str  # when its node had started
    parts: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    since: float = field(default_factory=time.monotonic)  # when the last part came


class Answers:
    """Fetches answers part by part, as Flower stores them, and never waits for a part.

    If a node was killed while it sent an answer, Flower's own `pull_messages` (1.41) waits for the rest until the
    SuperLink gives it up (3 minutes were seen), and takes no other answer meanwhile; and it makes room for whatever a
    node sends. Here an answer is given up if its node is gone or
    has started again, if no part comes for long, or if it has more bytes than it may have.
    """

    def __init__(self, grid: Any) -> None:
        self.most: dict[str, int] = {}  # number of a request -> bytes of its answer
        self._grid, self._arriving = grid, dict[str, _Arriving]()
        self._started: dict[int, str] = {}  # node -> when it was started

    @property
    def are_waiting(self) -> bool:
        """Whether parts of some answers have not come."""
        return bool(self._arriving)

    def seen(self, started: Mapping[int, str]) -> None:
        """These nodes are connected now."""
        self._started = dict(started)

    def take(self, numbers: Collection[str]) -> dict[str, Packet | Lost]:
        """The answers to these requests that are complete, or that will never be."""
        if wanted := [number for number in numbers if number not in self._arriving]:
            self._look_for(wanted)
        found = {}
        for number in [number for number in numbers if number in self._arriving]:
            if (answer := self._fetched(number, self._arriving[number])) is not None:
                del self._arriving[number]
                self.most.pop(number, None)
                found[number] = answer
        return found

    def _look_for(self, numbers: Sequence[str]) -> None:
        request = PullAppMessagesRequest(message_ids=numbers)
        (reply,) = _tried(lambda: [self._grid._runtime_client.PullMessages(request)])
        for message, tree in zip(reply.messages_list, reply.message_object_trees, strict=True):
            started = self._started.get(message.metadata.src_node_id, "")
            number = message.metadata.reply_to_message_id
            self._arriving[number] = _Arriving(message, list(_parts_of(tree)), started)

    def _fetched(self, number: str, arriving: _Arriving) -> Packet | Lost | None:
        """The answer; None: it is not complete yet."""
        most, client = self.most.get(number, MAX_ANSWER), self._grid._runtime_client
        if len(arriving.missing) > MOST_PARTS + most // LEAST_PART:
            return Packet({REFUSED: f"its answer has {len(arriving.missing)} parts, more than any can have"})
        while arriving.missing:
            wanted = PullObjectRequest(
                node=self._grid.node, run_id=self._grid.run.run_id, object_id=arriving.missing[-1]
            )
            (part,) = _tried(lambda wanted=wanted: [client.PullObject(wanted)])  # type: ignore[misc]
            if not part.object_found:
                return Lost("parts of its answer are gone")
            if not part.object_available:
                return self._given_up(arriving)
            arriving.parts[arriving.missing.pop()] = part.object_content
            arriving.size, arriving.since = arriving.size + len(part.object_content), time.monotonic()
            if arriving.size > most:
                return Packet({REFUSED: too_large(most - MOST_FACTS)})
        name = arriving.message.metadata.message_id
        received = ConfirmMessageReceivedRequest(
            node=self._grid.node, run_id=self._grid.run.run_id, message_object_id=name
        )
        _tried(lambda: [client.ConfirmMessageReceived(received)])
        try:
            if put_together(arriving.parts) > most:
                return Packet({REFUSED: too_large(most - MOST_FACTS)})
            return read_answer(cast(Message, inflate_object_from_contents(name, arriving.parts)))
        except Exception as error:  # whatever a node has sent; Flower has many kinds of errors
            return Packet({REFUSED: f"its answer cannot be read ({type(error).__name__})"})

    def _given_up(self, arriving: _Arriving) -> Lost | None:
        """Why the missing parts of an answer will not come; None: they may."""
        node = arriving.message.metadata.src_node_id
        if self._started.get(node) != arriving.started:
            return Lost("it has ended while it sent its answer")
        stalled = time.monotonic() - arriving.since > STALLED
        return Lost(f"no part of its answer has come for {STALLED:g} seconds") if stalled else None


def put_together(parts: Mapping[str, bytes]) -> int:
    """The bytes of all arrays of an answer: Flower stores parts of the same content once, however often they occur."""
    total, beginning = 0, Array.__qualname__.encode() + b" "
    for content in parts.values():
        if content.startswith(beginning):
            children = get_object_children_ids_from_object_content(content)
            total += sum(len(parts[children[k]]) for k in json.loads(get_object_body(content, Array))["arraychunk_ids"])
    return total


def _answers_of(grid: Any) -> Answers | None:
    """None: this version of Flower does not have what is needed, and its own way must do."""
    needed = ("PullMessages", "PullObject", "ConfirmMessageReceived")
    client = getattr(grid, "_runtime_client", None)
    if all(hasattr(client, name) for name in needed):
        return Answers(grid)
    log.warning(
        "warning: with this version of Flower, answers have no largest size, and one that breaks off is awaited"
    )
    return None


def _parts_of(tree: Any) -> Iterator[str]:
    """The names of all parts of an answer, each once."""
    trees, names = [tree], dict[str, None]()
    while trees:
        tree = trees.pop()
        names[tree.object_id] = None
        trees += tree.children
    yield from names


def _tried(call: Callable[[], list[Value]]) -> list[Value]:
    """What the SuperLink answers; one with much to do is asked again."""
    for pause in PAUSES:
        try:
            return call()
        except Exception as error:  # Flower has many kinds of errors
            log.warning("the SuperLink does not answer (%s: %s)", type(error).__name__, one_line(error))
            time.sleep(pause)
    return call()
