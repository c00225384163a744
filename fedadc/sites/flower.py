"""The two halves of a federation on Flower, which carries their packets. No other module imports Flower."""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import flwr
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedadc.errors import FedadcError, one_line, require, unknown
from fedadc.sites.node import NodeSettings
from fedadc.sites.packets import PROBLEM, REFUSED, RUN_CONFIG, Fact, Kind, Lost, NotSent, Packet, too_large
from fedadc.sites.resident import ask_resident
from fedadc.system.version import __version__

log = logging.getLogger("flwr")  # what Flower shows

TYPES: dict[Kind, str] = {
    "hello": "query.hello",
    "refuse": "query.refuse",
    "describe": "query.describe",
    "check": "query.check",
    "agree": "query.agree",
    "train": "train",
    "keep": "query.keep",
    "count": "evaluate",
    "finish": "query.finish",
}
Value = TypeVar("Value")
FACTS_RECORD, PARTS_RECORD = "facts", "parts"
SERIALIZATION = "fedadc"  # how the bytes of an array came about: they are the bytes of a message, as they are
MOST_FACTS = 1 << 16  # bytes of the facts of an answer, and of what Flower adds
PAUSES = (1.0, 3.0, 9.0)  # seconds before the SuperLink is asked again
# errors of Flower that mean: the app does not work there; after all others, the site may answer again
APP_FAILED = (1, 2, 7)  # it cannot be loaded, it raised an exception, its bundle is not valid


def to_record(packet: Packet) -> RecordDict:
    parts = {name: content for name, content in (("head", packet.head), ("body", packet.body)) if content}
    arrays = {name: Array("uint8", (len(content),), SERIALIZATION, content) for name, content in parts.items()}
    return RecordDict({FACTS_RECORD: ConfigRecord(dict(packet.facts)), PARTS_RECORD: ArrayRecord(arrays)})


def to_packet(record: RecordDict) -> Packet:
    try:
        facts: dict[str, Fact] = {k: v for k, v in record.config_records[FACTS_RECORD].items() if isinstance(v, Fact)}
        parts = {name: array.data for name, array in record.array_records[PARTS_RECORD].items()}
    except KeyError as error:
        raise FedadcError(f"the message is not one of fedadc: it lacks {error}.") from None
    return Packet(facts, parts.get("head", b""), parts.get("body", b""))


class GridTransport:
    """Packets over Flower's grid."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._keys: dict[int, bytes] = {}  # node -> its public key, in PEM
        self._answers = BoundedAnswers(grid)

    def nodes(self) -> Collection[int]:
        get_nodes: Callable[[], Iterable[Any]] | None = getattr(self.grid, "get_nodes", None)
        if get_nodes is None:  # Flower's simulation
            return _tried(lambda: list(self.grid.get_node_ids()))
        found = _tried(lambda: list(get_nodes()))
        self._keys = {node.node_id: node.public_key for node in found}
        return self._keys.keys()

    def key(self, node: int) -> bytes:
        return self._keys.get(node, b"")

    def send(self, node: int, kind: Kind, packet: Packet) -> str:
        try:
            numbers = list(self.grid.push_messages([Message(to_record(packet), node, TYPES[kind])]))
        except Exception as error:  # a SuperLink with much to do; Flower has many kinds of errors
            time.sleep(PAUSES[0])
            raise NotSent(f"{type(error).__name__}: {one_line(error):.120}") from error
        require(bool(numbers) and numbers[0] is not None, f"the SuperLink does not take the {kind} message.")
        self._answers.most[str(numbers[0])] = packet.most + MOST_FACTS
        return str(numbers[0])

    def receive(self, numbers: Collection[str]) -> Mapping[str, Packet | Lost]:
        found: dict[str, Packet | Lost] = {}
        for message in _tried(lambda: list(self.grid.pull_messages(list(numbers)))):
            found[message.metadata.reply_to_message_id] = self._read(message)
        return found

    def _read(self, message: Message) -> Packet | Lost:
        if (most := self._answers.too_large(message.metadata.reply_to_message_id)) is not None:
            return Packet({REFUSED: too_large(most - MOST_FACTS)})
        if not message.has_error():
            try:
                return to_packet(message.content)
            except FedadcError as error:
                return Packet({REFUSED: str(error).rstrip(".")})
        said = re.sub(r"^<class '[^']*'>:<'(.*)'>$", r"\1", message.error.reason or "no reason given")
        reason = f"Flower's error {message.error.code}: {said}"
        return Packet({PROBLEM: reason}) if message.error.code in APP_FAILED else Lost(reason)


class BoundedAnswers:
    """Gives up an answer that is larger than it may be, before all of it has come.

    Flower (1.42) has no such bound: it fetches an answer part by part, and puts it together. So the parts are counted
    as they come. A part has 5 MiB if the node keeps to Flower's rules; a proxy before the SuperLink can see to it.
    """

    def __init__(self, grid: Grid) -> None:
        self.most: dict[str, int] = {}  # number of a request -> bytes of its answer
        self._came: Counter[str] = Counter()
        self._request_of: dict[str, str] = {}  # part of an answer -> number of the request
        self._lock = threading.Lock()  # Flower fetches several parts at once
        if not hasattr(grid, "get_nodes"):  # Flower's simulation has all answers in its own memory
            return
        try:
            from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

            client = cast(Any, grid)._runtime_client
            self._messages, self._part, self._error = client.PullMessages, client.PullObject, ObjectPullError
            client.PullMessages, client.PullObject = self._pull_messages, self._pull_part
        except (ImportError, AttributeError):
            log.warning("warning: with this version of Flower, answers are not bounded while they are fetched")

    def too_large(self, number: str) -> int | None:
        """The bytes that an answer could have had if it was too large. What is known of it is forgotten."""
        most = self.most.pop(number, None)
        return most if most is not None and self._came.pop(number, 0) > most else None

    def _pull_messages(self, request: Any) -> Any:
        found = self._messages(request)
        self._request_of.clear()
        for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            for part in _parts_of(tree):
                self._request_of.setdefault(part, message.metadata.reply_to_message_id)
        return found

    def _pull_part(self, request: Any) -> Any:
        number = self._request_of.get(request.object_id, "")
        self._require_room(number, request.object_id)
        found = self._part(request)
        with self._lock:
            self._came[number] += len(found.object_content)
        self._require_room(number, request.object_id)
        return found

    def _require_room(self, number: str, part: str) -> None:
        if self._came[number] > self.most.get(number, self._came[number]):
            raise self._error(part, "the answer is too large")


def _parts_of(tree: Any) -> Iterator[str]:
    """The names of all parts of an answer."""
    trees = [tree]
    while trees:
        tree = trees.pop()
        yield tree.object_id
        trees += tree.children


def _tried(call: Callable[[], list[Value]]) -> list[Value]:
    """What the SuperLink answers; one with much to do is asked again."""
    for pause in PAUSES:
        try:
            return call()
        except Exception as error:  # Flower has many kinds of errors
            log.warning("the SuperLink does not answer (%s: %s)", type(error).__name__, one_line(error))
            time.sleep(pause)
    return call()


def client_app(app_file: str) -> ClientApp:
    """The ClientApp of a federation; the app's folder has its config."""
    app, folder = ClientApp(), Path(app_file).resolve().parent

    def answering(kind: Kind) -> Callable[[Message, Context], Message]:
        def answer(message: Message, context: Context) -> Message:
            try:
                packet = _answer(kind, to_packet(message.content), folder, context)
            except FedadcError as error:
                client = str(context.node_config.get("client", ""))
                packet = Packet({"client": client, PROBLEM: str(error)})
            if PROBLEM in packet.facts:
                log.error("%s: %s", kind, packet.facts[PROBLEM])
            return Message(to_record(packet), reply_to=message)

        return answer

    for kind, name in TYPES.items():
        category, _, action = name.partition(".")
        register: Any = getattr(app, category)
        (register(action) if action else register())(answering(kind))
    return app


def _answer(kind: Kind, request: Packet, folder: Path, context: Context) -> Packet:
    settings = NodeSettings.of(context.node_config, context.run_config)
    if kind == "hello" and not request.facts:
        return Packet({"client": settings.client, "fedadc": __version__})
    if kind == "refuse":
        raise FedadcError(f"the server refuses site {settings.client}: {request.facts.get('reason')}")
    if (answer := ask_resident(kind, request, folder, settings)) is not None:
        return answer
    from fedadc.sites.app import config_of_app  # these import torch, which takes most of the start
    from fedadc.sites.replies import reply
    from fedadc.sites.site import Site

    return reply(Site(settings, config_of_app(folder)), kind, request)


def packed_app(folder: Path) -> bytes:
    """An app as Flower packs and sends it."""
    from flwr.cli.build import build_fab_from_disk

    return build_fab_from_disk(folder)


def run_client_app(pins: Collection[str]) -> None:
    """What Flower does in the process of a message, for apps with these checksums only.

    The check stands before the place where Flower unpacks an app. If a version of Flower has no such place, nothing is
    run.
    """
    program: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    unpack = program.install_from_fab
    known = program.run_clientapp.__code__.co_names
    require("install_from_fab" in known, f"--pin does not work with Flower {flwr.__version__}; nothing is run.")

    def checked(content: bytes, *args: Any, **settings: Any) -> Any:
        found = hashlib.sha256(content).hexdigest()
        require(found in pins, f"this site runs only apps that it knows (--pin), not the one with checksum {found}.")
        return unpack(content, *args, **settings)

    program.install_from_fab = checked
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    flwr_clientapp()


def _one_sentence(record: logging.LogRecord) -> bool:
    """Flower logs errors with their tracebacks; of ours, the sentence is enough."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, FedadcError):
        record.msg, record.args, record.exc_info = f"error: {error}", (), None
    return True


def server_app(app_file: str) -> ServerApp:
    """The ServerApp of a federation; the app's folder has its config."""
    app, folder = ServerApp(), Path(app_file).resolve().parent

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedadc.sites.app import config_of_app
        from fedadc.sites.serving import examined, serve

        log.addFilter(_one_sentence)
        given = context.run_config
        for name in given:
            if name not in RUN_CONFIG:
                raise unknown("--run-config: setting", name, RUN_CONFIG)
        out, data = Path(str(given.get("out") or "run")).expanduser(), str(given.get("server-data") or "")
        own, metrics = Path(data).expanduser() if data else None, str(given.get("metrics") or "")
        keys = Path(str(given["site-keys"])).expanduser() if given.get("site-keys") else None
        if report := str(given.get("examine") or ""):
            within = float(given.get("examine-within") or 60)
            examined(config_of_app(folder), GridTransport(grid), log.info, keys, within).write(Path(report))
            return
        serve(config_of_app(folder), GridTransport(grid), out, own, notes=log.info, metrics=metrics, site_keys=keys)

    return app
